import itertools
import random
from collections import Counter

import numpy as np
import pytest
from sklearn.datasets import load_digits

from lmm_r1.tasks.handwriting import Page, Placement, scan, scan_indices

pytestmark = pytest.mark.unit


def test_every_scan_is_in_exactly_one_split_under_its_digit():
    train, test = scan_indices("train"), scan_indices("test")
    assert sorted(index for indices in train + test for index in indices) == list(range(1797))
    target = load_digits().target
    for digit in range(10):
        assert {int(target[index]) for index in train[digit] + test[digit]} == {digit}
        assert len(test[digit]) >= 20
    # 1797 draws at 0.2: three standard deviations are 3 * sqrt(1797 * 0.16) = 51 around 359.
    assert 308 <= sum(map(len, test)) <= 410


def test_a_scan_is_chalk_on_a_grey_board():
    raw = load_digits().images[0]
    pixels = np.asarray(scan(0)).astype(int)
    assert (pixels[raw == 0] == 122).all()
    assert (pixels[raw == 16] == 255).all()
    # Half the chalk: 122 + 133 / 2 = 188.5, rounded to the even 188.
    assert (pixels[raw == 8] == 188).all()


def test_each_digit_lies_in_the_column_of_its_place_inside_a_cell():
    page = Page()
    rng = random.Random(0)
    target = load_digits().target
    sizes, shifts = set(), set()
    for _ in range(500):
        digits = tuple(rng.randrange(10) for _ in range(rng.randint(1, 3)))
        placements = page.place(digits, split="train", rng=rng)
        assert tuple(int(target[placement.scan_index]) for placement in placements) == digits
        # Columns begin at 0, 28 and 56 pixels; fewer digits fill the left ones.
        assert [placement.left // 28 for placement in placements] == [0, 1, 2][: len(digits)]
        for placement in placements:
            assert placement.left % 28 + placement.size <= 28
            assert placement.top % 28 + placement.size <= 28
            assert 0 <= placement.top <= 84 - placement.size
            sizes.add(placement.size)
            shifts.add(placement.left % 28 - (28 - placement.size) // 2)
    assert sizes == {22, 23, 24, 25, 26}
    assert shifts == {-2, -1, 0, 1, 2}


def test_heights_are_random_and_each_digit_has_one_of_its_own():
    rng = random.Random(0)
    heights = Counter()
    for _ in range(2700):
        placements = Page().place((1, 2, 3), split="train", rng=rng)
        heights[tuple(placement.top // 28 for placement in placements)] += 1
    # 27 triples of three rows each: 2700 draws at 1/27, four standard deviations are 4 * sqrt(100 * 26 / 27) = 39.
    assert set(heights) == set(itertools.product(range(3), repeat=3))
    assert all(61 <= count <= 139 for count in heights.values())


def test_a_page_of_four_cells_has_four_columns():
    placements = Page(cells=4).place((5, 0, 5, 9), split="test", rng=random.Random(1))
    assert [placement.left // 28 for placement in placements] == [0, 1, 2, 3]
    assert Page(cells=4).draw(placements).size == (112, 112)


def test_a_drawn_page_holds_the_enlarged_scan_and_blank_board_elsewhere():
    page = Page()
    index = scan_indices("test")[3][0]
    drawn = np.asarray(page.draw([Placement(scan_index=index, left=30, top=57, size=24)]))
    assert drawn.shape == (84, 84)
    assert np.array_equal(drawn[57:81, 30:54], np.asarray(scan(index).resize((24, 24), 3)))
    drawn = drawn.copy()
    assert drawn[57:81, 30:54].max() > 220
    drawn[57:81, 30:54] = 122
    assert (drawn == 122).all()


def test_a_page_whose_digits_do_not_fit_its_cells_is_refused():
    with pytest.raises(ValueError, match="digits of 22 to 30 px"):
        Page(max_digit_px=30)
