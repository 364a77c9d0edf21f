"""Golds as benchmarks write them, answers as people spell them, responses as models write them."""

import json
import random
import re
import time
from pathlib import Path

import pytest
from helpers.tables import table

from remote_rm.answers.accuracy import is_gradable, listed_golds, matches, quick_match
from remote_rm.answers.extraction import final_answer
from remote_rm.answers.reading import normalize

ROOT = Path(__file__).parents[4]
DATA = ROOT / "tests" / "data"
THINKING = "<think>\nSome $x = 3$, then \\boxed{99}.\n</think>\n"


def read(name: str) -> list[dict]:
    return [json.loads(line) for line in (DATA / name).read_text(encoding="utf-8").splitlines()]


GOLDS = [row["answer"] for row in read("gold_answers.jsonl")]
IN_WORDS = [gold for gold in GOLDS if gold.strip("<>=+-, ")]
"""Without golds that are a sign alone: `The answer is =.` has no reading."""


def as_math(gold: str) -> str:
    return gold if "$" in gold.replace(r"\$", "") else f"${gold}$"


@pytest.mark.parametrize(
    "wrap",
    [
        lambda gold: f"{THINKING}<answer>{gold}</answer>",
        lambda gold: f"{THINKING}<answer>\n{gold}.\n</answer>",
        lambda gold: f"{THINKING}<answer>{as_math(gold)}</answer>",
        lambda gold: f"{THINKING}<answer>{as_math(gold)}.</answer>",
        lambda gold: f"{THINKING}<answer>\\boxed{{{gold}}}</answer>",
        lambda gold: f"{THINKING}<answer>\\[ \\boxed{{{gold}}} \\]</answer>",
        lambda gold: f"{THINKING}<answer>**{gold}**</answer>",
        lambda gold: f"First \\boxed{{7777}}. The final answer is $\\boxed{{{gold}}}$. I hope it is correct.",
    ],
)
def test_every_gold_answer_is_accepted_as_its_own_answer(wrap):
    refused = [gold for gold in GOLDS if not matches(final_answer(wrap(gold)) or "", gold)]
    assert refused == []


@pytest.mark.parametrize(
    "wrap",
    [
        lambda gold: f"{THINKING}The answer is {as_math(gold)}.",
        lambda gold: f"{THINKING}<answer>The answer is {as_math(gold)}.</answer>",
        lambda gold: f"We reason.\n\n**Answer: {gold}**",
        lambda gold: f"We reason.\n\n**Final Answer:** {gold}",
        lambda gold: f"We reason.\nThe answer is {gold}.",
        lambda gold: f"We reason.\n#### {gold}",
    ],
)
def test_every_gold_answer_is_accepted_in_a_sentence(wrap):
    refused = [gold for gold in IN_WORDS if not matches(final_answer(wrap(gold)) or "", gold)]
    assert refused == []


def test_every_gold_answer_is_gradable():
    assert [gold for gold in GOLDS if not is_gradable(gold)] == []


def test_answers_are_judged_as_a_person_would():
    wrong = []
    for row in read("judged_answers.jsonl"):
        answer = row["answer"] if r"\boxed" not in row["answer"] else final_answer(row["answer"])
        if matches(answer, row["gold"]) is not row["right"]:
            wrong.append(row)
        elif quick_match(answer, row["gold"]) not in (row["right"], None):
            wrong.append({**row, "path": "quick"})
    assert wrong == []


def test_completions_are_judged_as_a_person_would():
    wrong = []
    for row in read("judged_completions.jsonl"):
        answer = final_answer(row["response"])
        if (answer is not None and matches(answer, row["gold"])) is not row["right"]:
            wrong.append(row)
    assert wrong == []


def table_rows() -> list[tuple[str, list[str], list[str]]]:
    section = (ROOT / "remote_rm" / "README.md").read_text(encoding="utf-8").split("## How an answer is judged")[1]
    lines = [line for line in section.split("\n## ")[0].splitlines() if line.startswith("|")][2:]
    cells = [[re.findall(r"`([^`]+)`", cell) for cell in line.strip().strip("|").split("|")] for line in lines]
    return [(gold[-1], equal, different) for gold, equal, different in cells]


@pytest.mark.parametrize(("gold", "equal", "different"), table_rows(), ids=lambda cell: str(cell))
def test_the_table_of_the_readme_holds(gold, equal, different):
    assert [answer for answer in equal if not matches(answer, gold)] == []
    assert [answer for answer in different if matches(answer, gold)] == []


def mutated(text: str, chance: random.Random) -> str:
    at = chance.randrange(len(text) + 1)
    return chance.choice([text[:at] + chance.choice("0123xi,.-{}()\\ ") + text[at:], text[:at] + text[at + 1 :]])


def test_the_fast_path_never_disagrees_with_the_slow_one():
    chance = random.Random(11)
    short = [gold for gold in GOLDS if len(gold) < 40]
    decided = 0
    for _ in range(4000):
        gold = chance.choice(short)
        answer = mutated(chance.choice([gold, gold, chance.choice(short)]), chance)
        quick = quick_match(answer, gold)
        if quick is not None:
            decided += 1
            assert matches(answer, gold) is quick, (answer, gold)
    assert decided > 2000


@pytest.mark.parametrize(
    "label", table("remote_rm/answers/gold_answers", "a_gold_answer_that_is_cut_off_is_not_gradable_and_meets_nothing")
)
def test_a_gold_answer_that_is_cut_off_is_not_gradable_and_meets_nothing(label):
    assert not is_gradable(label)
    if normalize(label):
        assert not matches(label, label)
        assert quick_match(label, label) is False


@pytest.mark.parametrize("label", table("remote_rm/answers/gold_answers", "unusual_but_whole_golds_are_gradable"))
def test_unusual_but_whole_golds_are_gradable(label):
    assert is_gradable(label)


def test_a_bare_list_has_no_order_and_a_bracketed_one_has_one():
    assert matches("2, -1", "-1, 2")
    assert quick_match("2, -1", "-1, 2") is True
    assert not matches("2, 2", "-1, 2")
    assert not matches("(2, -1)", "(-1, 2)")
    assert not matches("2, -1", "[-1, 2]")
    assert matches("-1, 2", "[-1, 2]")


@pytest.mark.parametrize(
    "piece", table("remote_rm/answers/gold_answers", "a_megabyte_of_anything_is_read_in_bounded_time")
)
def test_a_megabyte_of_anything_is_read_in_bounded_time(piece):
    text = piece * (1_000_000 // len(piece))
    started = time.process_time()
    for response in (text, f"<think>a</think><answer>{text}</answer>", f"\\boxed{{{text}}}"):
        answer = final_answer(response)
        assert not quick_match(answer or "", "42")
    assert quick_match("42", f"4{text}2") is False
    assert time.process_time() - started < 0.5


@pytest.mark.parametrize(
    ("label", "golds"),
    [
        ('["a", "b"]', ["a", "b"]),
        (' ["a"]', ["a"]),
        ("[1, 2.5]", ["1", "2.5"]),
        ('[{"answer": "a", "answer_id": 1}, "b"]', ["a", "b"]),
        ("[]", []),
        ("a", ["a"]),
        ('"a"', ['"a"']),
        ("42", ["42"]),
        ("[a, b]", ["[a, b]"]),
        ('["a", null]', ['["a", null]']),
        ("[true]", ["[true]"]),
        ("[[1]]", ["[[1]]"]),
        ('[{"text": "a"}]', ['[{"text": "a"}]']),
        ("[" * 100_000, ["[" * 100_000]),
        (f"[{'9' * 5000}]", [f"[{'9' * 5000}]"]),
    ],
    ids=range(15),
)
def test_the_golds_that_a_label_lists(label, golds):
    assert listed_golds(label) == golds
