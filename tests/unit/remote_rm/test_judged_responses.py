"""Responses as models write them for charts, geometry, word problems and the like, judged by hand before any rule was run on them.

At first sight the rules of the day agreed with 87.6 % of the English set, and, after those were mended, with 91.3 % of the
mixed one (English and Chinese), of which they had seen nothing. Of the answers by kind (`paid_answers.jsonl`), the rules
before them agreed with 50 %, of stances, copies and chains (`stated_answers.jsonl`) with 54 %. The rules were not tuned to
half of each kind (`held_out`), except to one sign-off. The verdicts on capitals follow the decision that `X` is right for `x`.
"""

import json
from pathlib import Path

import pytest

from remote_rm.registry import get_verifier
from remote_rm.verifier import Item

DATA = Path(__file__).parents[3] / "tests" / "data"


@pytest.mark.parametrize(
    ("name", "least", "paid"),
    [
        ("judged_english.jsonl", 0.985, 0),
        ("judged_mixed.jsonl", 0.965, 0),
        ("paid_answers.jsonl", 0.97, 0),
        ("stated_answers.jsonl", 0.97, 3),
    ],
)
def test_responses_are_judged_as_a_strict_and_fair_teacher_would(name, least, paid):
    rows = [json.loads(line) for line in (DATA / name).read_text(encoding="utf-8").splitlines()]
    assert len(rows) >= 300
    wrong = []
    for row in rows:
        item = Item(prompt=row.get("prompt", ""), response=row["response"], label=row["gold"])
        score = get_verifier(row["verifier"]).score(item)
        if (score.score == 1.0) is not row["right"]:
            wrong.append((row["right"], row["gold"], row["response"][-80:]))
    # Right for what a teacher marks as wrong is what a policy would learn.
    assert len([case for case in wrong if not case[0]]) <= paid, wrong
    assert 1 - len(wrong) / len(rows) >= least, wrong
