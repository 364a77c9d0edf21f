"""How numbers are spread, by hand."""

from lmm_r1.data_check.contents import Bin, Distribution


def test_quantiles_are_values_that_so_large_a_share_does_not_exceed():
    spread = Distribution.of("tokens", [*range(1, 101)], bins=2, limit=60)
    assert (spread.least, spread.median, spread.most_of_90, spread.most_of_99, spread.largest) == (1, 50, 90, 99, 100)
    # 1 to 50 lie below 50.5, and the largest counts in the last bin.
    assert spread.bins == (Bin(low=1, high=50.5, count=50), Bin(low=50.5, high=100, count=50))
    assert (spread.count, spread.limit) == (100, 60)


def test_one_value_makes_one_bin():
    spread = Distribution.of("tokens", [7, 7, 7])
    assert (spread.median, spread.most_of_90, spread.bins) == (7, 7, (Bin(low=7, high=7, count=3),))
