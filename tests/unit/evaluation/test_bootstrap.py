import pytest

from lmm_r1.evaluation.bootstrap import Interval, mean_interval

pytestmark = pytest.mark.unit


def interval(values: list[float], **changes) -> Interval:
    return mean_interval(values, **({"resamples": 10_000, "seed": 0, "confidence": 0.95} | changes))


def test_equal_values_leave_no_doubt():
    assert interval([0.25] * 7) == Interval(low=0.25, high=0.25)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(
    ("values", "low", "high"),
    [
        # The resampled mean is Binomial(10, 1/2) / 10: at most 1 with 1.1 %, at most 2 with 5.5 %, and symmetric.
        ([1.0] * 5 + [0.0] * 5, 0.2, 0.8),
        # Binomial(10, 1/10) / 10: 0 with 34.9 %, at most 2 with 93.0 %, at most 3 with 98.7 %.
        ([1.0] + [0.0] * 9, 0.0, 0.3),
        # The same with -1 for 0: 2 * X / 10 - 1.
        ([1.0] + [-1.0] * 9, -1.0, -0.4),
    ],
)
def test_two_values_have_the_quantiles_of_a_binomial(values, low, high, seed):
    found = interval(values, seed=seed)
    assert (found.low, found.high) == (pytest.approx(low), pytest.approx(high))


def test_less_confidence_is_narrower():
    # At most 3 of Binomial(10, 1/2) with 17.2 %, at most 4 with 37.7 %: the quartile is 4.
    found = interval([1.0] * 5 + [0.0] * 5, confidence=0.5)
    assert (found.low, found.high) == (pytest.approx(0.4), pytest.approx(0.6))


def test_the_seed_decides_and_batches_change_nothing(monkeypatch):
    values = [0.1, 0.7, 0.2, 0.9, 0.4, 0.3]
    assert interval(values, resamples=50, seed=3) == interval(values, resamples=50, seed=3)
    assert interval(values, resamples=50, seed=3) != interval(values, resamples=50, seed=4)
    whole = interval(values, resamples=50)
    monkeypatch.setattr("lmm_r1.evaluation.bootstrap.BATCH_VALUES", 40)
    batched = interval(values, resamples=50)
    assert (batched.low, batched.high) == (pytest.approx(whole.low), pytest.approx(whole.high))
