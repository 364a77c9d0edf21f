import re

import numpy as np
import pytest

from lmm_r1.tasks.digits import DIGIT_WORDS, DigitsTask, answer_of, combination, solution_of
from lmm_r1.tasks.held_out import split_of

pytestmark = pytest.mark.unit

TASK = DigitsTask()


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
    chalk = np.asarray(page) > 150
    return chalk.reshape(3, 28, 3, 28).any(axis=(1, 3)).sum()


def test_answers_and_solutions_are_those_worked_out_by_hand():
    assert answer_of("sum", (3, 7, 2)) == "12"
    assert answer_of("sort", (3, 7, 2, 3)) == "2, 3, 3, 7"
    assert solution_of("sum", (3, 7, 2)) == "<think>3 7 2. 3+7=10. 10+2=12.</think><answer>12</answer>"
    assert solution_of("sum", (0, 5)) == "<think>0 5. 0+5=5.</think><answer>5</answer>"
    assert solution_of("sort", (3, 7, 2)) == "<think>3 7 2. 2 3 7.</think><answer>2, 3, 7</answer>"


def test_a_slip_changes_the_last_number_worked_out_and_the_answer():
    assert solution_of("sum", (3, 7, 2), slip=1) == "<think>3 7 2. 3+7=10. 10+2=13.</think><answer>13</answer>"
    assert solution_of("sum", (4, 5), slip=-1) == "<think>4 5. 4+5=8.</think><answer>8</answer>"
    assert solution_of("sort", (3, 7, 2), slip=1) == "<think>3 7 2. 2 3 8.</think><answer>2, 3, 8</answer>"
    assert solution_of("sort", (0, 0), slip=-1) == "<think>0 0. 0 1.</think><answer>0, 1</answer>"


def test_one_digit_is_read_and_answered_without_a_sum():
    assert solution_of("sum", (7,)) == "<think>7.</think><answer>7</answer>"
    assert solution_of("sort", (7,)) == "<think>7. 7.</think><answer>7</answer>"


@pytest.mark.parametrize("modality", ["text", "image"])
def test_rows_of_one_digit_are_well_formed_in_both_modalities(modality):
    for row in make(modality, rows=60, task=DigitsTask(min_digits=1, max_digits=1)):
        (digit,) = read_digits(row)
        assert row.answer == str(digit)
        assert answer_in(row.solution) == str(digit)
        content = row.messages[0]["content"]
        if modality == "text":
            assert digits_in(content) == (digit,)
            assert re.fullmatch(r"(What is the sum of \w+\?|Sort \w+\.)", content)
        else:
            assert cells_with_chalk(content[0]["image"]) == 1


@pytest.mark.parametrize("modality", ["text", "image"])
def test_lengths_from_the_fewest_to_the_most_digits_all_occur(modality):
    rows = make(modality, rows=100, task=DigitsTask(min_digits=1, max_digits=4))
    assert {len(read_digits(row)) for row in rows} == {1, 2, 3, 4}


@pytest.mark.parametrize("modality", ["text", "image"])
def test_the_wanted_share_of_solutions_slips_by_one_and_nothing_else_changes(modality):
    careful = make(modality, rows=1000)
    careless = make(modality, rows=1000, task=DigitsTask(slips=0.4))
    directions = []
    for right, row in zip(careful, careless, strict=True):
        assert (row.messages, row.answer, row.datasource) == (right.messages, right.answer, right.datasource)
        assert read_digits(row) == read_digits(right)
        if row.solution == right.solution:
            continue
        *given, last = map(int, answer_in(row.solution).split(", "))
        *gold, gold_last = map(int, row.answer.split(", "))
        assert given == gold
        assert abs(last - gold_last) == 1
        directions.append(last - gold_last)
    # 1000 draws at 0.4: three standard deviations are 3 * sqrt(1000 * 0.24) = 46 around 400.
    assert 354 <= len(directions) <= 446
    # Both ways about as often: 3 * sqrt(400 * 0.25) = 30 around 200, and a few more for a count other than 400.
    assert 150 <= directions.count(1) <= 250


def test_no_slips_give_every_solution_the_gold_answer_and_full_slips_give_none_of_them():
    assert DigitsTask().slips == 0
    assert make("mixed", rows=100, task=DigitsTask(slips=0.0)) == make("mixed", rows=100)
    assert all(answer_in(row.solution) == row.answer for row in make("mixed", rows=300))
    assert all(answer_in(row.solution) != row.answer for row in make("text", rows=300, task=DigitsTask(slips=1.0)))


def test_the_answer_of_every_text_row_follows_from_its_prompt():
    for row in make("text", rows=500):
        prompt = row.messages[0]["content"]
        digits = digits_in(prompt)
        assert 2 <= len(digits) <= 3
        assert digits == read_digits(row)
        if prompt.startswith("What is the sum of "):
            assert (row.answer, row.datasource) == (str(sum(digits)), "digits_text_sum")
        else:
            assert prompt.startswith("Sort ")
            assert (row.answer, row.datasource) == (", ".join(map(str, sorted(digits))), "digits_text_sort")


def test_prompts_read_like_english_with_words_and_symbols_mixed():
    prompts = [row.messages[0]["content"] for row in make("text", rows=300)]
    word = f"(?:{'|'.join(DIGIT_WORDS)}|[0-9])"
    assert all(re.fullmatch(rf"(What is the sum of|Sort) ({word}, )?{word} and {word}[?.]", p) for p in prompts)
    spelled = sum(len(re.findall("|".join(DIGIT_WORDS), prompt)) for prompt in prompts)
    total = sum(len(digits_in(prompt)) for prompt in prompts)
    assert 0.4 < spelled / total < 0.6


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
        assert cells_with_chalk(image["image"]) == len(read_digits(row))


def test_mixed_rows_alternate_and_equal_those_of_the_single_modalities():
    mixed = make("mixed", rows=6)
    assert [row.datasource.split("_")[1] for row in mixed] == ["text", "image"] * 3
    assert mixed[0::2] == make("text", rows=6)[0::2]
    assert mixed[1::2] == make("image", rows=6)[1::2]


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


def test_about_a_fifth_of_all_combinations_is_held_out():
    pairs = [split_of(combination("sum", (a, b, c))) for a in range(10) for b in range(10) for c in range(10)]
    # 1000 draws at 0.2: three standard deviations are 3 * sqrt(1000 * 0.2 * 0.8) = 38.
    assert 162 <= pairs.count("test") <= 238


def test_a_record_carries_the_solution_only_where_it_is_wanted():
    row = make("text", rows=1)[0]
    assert row.record(solution=False) == {"messages": row.messages, "answer": row.answer, "datasource": row.datasource}
    turns = row.record(solution=True)["messages"]
    assert turns == [*row.messages, {"role": "assistant", "content": row.solution}]


@pytest.mark.parametrize(("fewest", "most"), [(2, 10), (0, 3), (3, 2)])
def test_no_digits_more_than_cells_and_an_empty_range_are_refused(fewest, most):
    with pytest.raises(ValueError, match=f"{fewest} to {most} digits: at least one is needed"):
        DigitsTask(min_digits=fewest, max_digits=most)
