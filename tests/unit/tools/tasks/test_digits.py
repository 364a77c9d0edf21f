import gzip
import hashlib
import itertools
import random
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from lmm_r1.tools.tasks import digits, split_of
from lmm_r1.tools.tasks.digits import (
    DIGIT_WORDS,
    DigitsTask,
    Placement,
    answer_of,
    combination,
    drawn,
    placed,
    scan,
    scan_indices,
    solution_of,
)

TASK = DigitsTask()
SCANS = Path(digits.__file__).with_name("digits.csv.gz")
TABLE = np.loadtxt(SCANS, delimiter=",", dtype=int)


def make(modality, *, split="train", rows=200, seed=0, task=TASK):
    return list(task.generate(split=split, modality=modality, rows=rows, seed=seed))


def digits_in(text):
    words = "|".join(DIGIT_WORDS)
    return tuple(
        DIGIT_WORDS.index(found) if found in DIGIT_WORDS else int(found) for found in re.findall(rf"\d|{words}", text)
    )


def question_of(row):
    return row.datasource.rpartition("_")[2]


def read_digits(row):
    """The digits in the order in which the solution reads them."""
    return tuple(map(int, re.match(r"<think>([\d ]+)\.", row.solution)[1].split()))


def answer_in(solution):
    return re.search(r"<answer>(.*)</answer>$", solution)[1]


def cells_with_chalk(page):
    """Which of the 3x3 cells hold a digit, row by row."""
    chalk = np.asarray(page) > 150
    return chalk.reshape(3, 28, 3, 28).any(axis=(1, 3))


def columns_with_chalk(page):
    """How many digits each of the three columns holds."""
    return cells_with_chalk(page).sum(axis=0).tolist()


def test_answers_and_solutions_are_those_worked_out_by_hand():
    assert answer_of("sum", (3, 7, 2)) == "12"
    assert answer_of("sort", (3, 7, 2, 3)) == "[2, 3, 3, 7]"
    assert solution_of("sum", (3, 7, 2)) == "<think>3 7 2. 3+7=10. 10+2=12.</think><answer>12</answer>"
    assert solution_of("sum", (0, 5)) == "<think>0 5. 0+5=5.</think><answer>5</answer>"
    assert solution_of("sort", (3, 7, 2)) == "<think>3 7 2. 2 3 7.</think><answer>2, 3, 7</answer>"


@pytest.mark.parametrize("modality", ["text", "image"])
def test_lengths_from_the_fewest_to_the_most_digits_all_occur(modality):
    assert {len(read_digits(row)) for row in make(modality, rows=100)} == {3}
    rows = make(modality, rows=100, task=DigitsTask(min_digits=1))
    assert {len(read_digits(row)) for row in rows} == {1, 2, 3}


def test_every_solution_ends_with_the_answer_of_its_row():
    for row in make("mixed", rows=300, task=DigitsTask(min_digits=1)):
        assert row.answer == answer_of(question_of(row), read_digits(row))
        assert answer_in(row.solution) == row.answer.strip("[]")


def test_an_image_shows_its_digits_from_left_to_right_in_the_columns_from_the_left():
    counts = set()
    for row in make("image", rows=60, task=DigitsTask(min_digits=1)):
        count = len(read_digits(row))
        assert columns_with_chalk(row.messages[0]["content"][0]["image"]) == [1, 1, 1][:count] + [0, 0, 0][count:]
        counts.add(count)
    assert counts == {1, 2, 3}


def test_most_image_digits_bound_the_images_and_leave_the_text_rows_as_they_are():
    task = DigitsTask(max_image_digits=1)
    assert make("text", rows=60, task=task) == make("text", rows=60)
    assert {len(read_digits(row)) for row in make("image", rows=60, task=task)} == {1}
    mixed = make("mixed", rows=60, task=task)
    assert [len(read_digits(row)) for row in mixed] == [3, 1] * 30
    test = make("image", split="test", rows=20, task=task)
    assert all(split_of(combination(question_of(row), read_digits(row))) == "test" for row in test)


def test_the_answer_of_every_text_row_follows_from_its_prompt():
    for row in make("text", rows=500):
        prompt = row.messages[0]["content"]
        digits = digits_in(prompt)
        assert len(digits) == 3
        assert digits == read_digits(row)
        if prompt.startswith("What is the sum of "):
            assert (row.answer, row.datasource) == (str(sum(digits)), "digits_text_sum")
        else:
            assert prompt.startswith("Sort ")
            assert (row.answer, row.datasource) == (str(sorted(digits)), "digits_text_sort")


def test_an_image_row_shows_its_digits_and_asks_without_naming_them():
    for row in make("image", rows=50):
        image, text = row.messages[0]["content"]
        assert image["image"].size == (84, 84)
        question = question_of(row)
        assert text == {
            "type": "text",
            "text": {"sum": "What is the sum of the digits?", "sort": "Sort the digits."}[question],
        }
        assert row.answer == answer_of(question, read_digits(row))
        assert columns_with_chalk(image["image"]) == [1, 1, 1]


def test_mixed_rows_alternate_and_equal_those_of_the_single_modalities():
    mixed = make("mixed", rows=6)
    assert [row.datasource.split("_")[1] for row in mixed] == ["text", "image"] * 3
    assert mixed[0::2] == make("text", rows=6)[0::2]
    assert mixed[1::2] == make("image", rows=6)[1::2]


@pytest.mark.parametrize(
    ("share", "images"),
    [
        (0, []),
        (0.25, [3, 7, 11, 15, 19]),
        (0.3, [3, 6, 9, 13, 16, 19]),
        (1 / 3, [2, 5, 8, 11, 14, 17]),
        (0.75, [1, 2, 3, 5, 6, 7, 9, 10, 11, 13, 14, 15, 17, 18, 19]),
        (1, list(range(20))),
    ],
)
def test_image_rows_are_spread_evenly_over_mixed_rows(share, images):
    task = DigitsTask(image_share=share)
    mixed = make("mixed", rows=20, task=task)
    assert [index for index, row in enumerate(mixed) if row.datasource.startswith("digits_image_")] == images
    assert [mixed[index] for index in images] == [make("image", rows=20)[index] for index in images]
    assert make("mixed", rows=8, task=task) == mixed[:8]
    assert make("text", rows=8, task=task) == make("text", rows=8)


def test_the_same_seed_gives_the_same_rows_and_a_longer_file_begins_like_a_shorter_one():
    assert make("mixed", rows=20, seed=3) == make("mixed", rows=40, seed=3)[:20]
    assert make("mixed", rows=20, seed=3) != make("mixed", rows=20, seed=4)


@pytest.mark.parametrize("modality", ["text", "image"])
def test_train_and_test_share_no_question_on_the_same_digits_in_order(modality):
    combinations = {
        split: {(question_of(row), read_digits(row)) for row in make(modality, split=split, rows=600, seed=5)}
        for split in ("train", "test")
    }
    assert not combinations["train"] & combinations["test"]
    for split, found in combinations.items():
        assert all(split_of(combination(*pair)) == split for pair in found)


def test_a_record_carries_the_solution_only_where_it_is_wanted():
    row = make("text", rows=1)[0]
    assert row.record(solution=False) == {"messages": row.messages, "answer": row.answer, "datasource": row.datasource}
    turns = row.record(solution=True)["messages"]
    assert turns == [*row.messages, {"role": "assistant", "content": row.solution}]


def test_the_scans_are_those_of_scikit_learn():
    # 1797 lines of 64 pixels and the digit: what `sklearn.datasets.load_digits` reads. Rows made of others would differ.
    content = gzip.decompress(SCANS.read_bytes())
    assert hashlib.sha256(content).hexdigest() == "6ebb3d2fee246a4e99363262ddf8a00a3c41bee6014c373ed9d9216ba7f651b8"


def test_every_scan_is_in_exactly_one_split_under_its_digit():
    train, test = scan_indices("train"), scan_indices("test")
    assert sorted(index for indices in train + test for index in indices) == list(range(1797))
    target = TABLE[:, -1]
    for digit in range(10):
        assert {int(target[index]) for index in train[digit] + test[digit]} == {digit}
        assert len(test[digit]) >= 20
    # 1797 draws at 0.2: three standard deviations are 3 * sqrt(1797 * 0.16) = 51 around 359.
    assert 308 <= sum(map(len, test)) <= 410


def test_each_digit_lies_in_the_column_of_its_place_inside_a_cell():
    rng = random.Random(0)
    target = TABLE[:, -1]
    sizes, shifts = set(), set()
    for _ in range(500):
        digits = tuple(rng.randrange(10) for _ in range(rng.randint(1, 3)))
        placements = placed(digits, rows=3, split="train", rng=rng)
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
        placements = placed((1, 2, 3), rows=3, split="train", rng=rng)
        heights[tuple(placement.top // 28 for placement in placements)] += 1
    # 27 triples of three rows each: 2700 draws at 1/27, four standard deviations are 4 * sqrt(100 * 26 / 27) = 39.
    assert set(heights) == set(itertools.product(range(3), repeat=3))
    assert all(61 <= count <= 139 for count in heights.values())


def test_a_drawn_page_holds_the_enlarged_scan_and_blank_board_elsewhere():
    index = scan_indices("test")[3][0]
    placement = Placement(scan_index=index, left=30, top=57, size=24)
    page = np.asarray(drawn([placement], size_px=(84, 84))).copy()
    assert page.shape == (84, 84)
    assert np.array_equal(page[57:81, 30:54], np.asarray(scan(index).resize((24, 24), 3)))
    assert page[57:81, 30:54].max() > 220
    page[57:81, 30:54] = 122
    assert (page == 122).all()


def test_a_board_wider_and_higher_than_the_page_is_blank_at_its_right_and_below():
    (plain,) = DigitsTask().generate(split="train", modality="image", rows=1, seed=3)
    (larger,) = DigitsTask(board_width=112, board_height=90).generate(split="train", modality="image", rows=1, seed=3)
    assert larger.solution == plain.solution
    page, board = (np.asarray(row.messages[0]["content"][0]["image"]).copy() for row in (plain, larger))
    assert board.shape == (90, 112)
    assert np.array_equal(board[:84, :84], page)
    board[:84, :84] = 122
    assert (board == 122).all()


def test_a_line_of_digits_asks_what_a_square_page_asks_and_leaves_the_rest_of_a_board_blank():
    (square,) = make("image", rows=1)
    (line,) = make("image", rows=1, task=DigitsTask(page_rows=1, board_width=112, board_height=112))
    assert (line.solution, line.answer) == (square.solution, square.answer)
    board = np.asarray(line.messages[0]["content"][0]["image"])
    assert board.shape == (112, 112)
    assert (board[:28, :84] > 150).any()
    assert (board[28:] == 122).all()
    assert (board[:, 84:] == 122).all()
    assert make("text", task=DigitsTask(page_rows=1)) == make("text")


@pytest.mark.parametrize(
    "settings",
    [
        {"min_digits": 0},
        {"min_digits": 2, "max_digits": 4},
        {"min_digits": 3, "max_digits": 2},
        {"max_digits": 3, "max_image_digits": 0},
        {"min_digits": 1, "max_digits": 2, "max_image_digits": 3},
        {"image_share": -0.1},
        {"image_share": float("nan")},
        {"board_width": 83},
        {"board_height": 83},
        {"page_rows": 0},
        {"page_rows": 4},
    ],
)
def test_impossible_settings_are_refused(settings):
    with pytest.raises(ValueError, match="must|smaller|known|needed"):
        DigitsTask(**settings)
