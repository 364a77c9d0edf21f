"""Responses as public models write them, answered with public gold answers: right, wrong, hedged and cut off."""

from __future__ import annotations

import json
import random
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from machine import ROOT

TEXTS = json.loads(Path(__file__).with_name("reasoning_texts.json").read_text(encoding="utf-8"))
"""Chains of thought as public models write them: scenarios of word problems, competition problems, figures and charts, each a
question and a list of steps in several wordings, and what comes before, between and after steps."""
SHORTEST, LONGEST = 800, 4000
SAMPLES_PER_PROMPT = 8
GOLDS = ROOT / "tests" / "data" / "gold_answers.jsonl"
"""Gold answers of public datasets, each spelling once: few plain numbers, of which those datasets mostly consist."""
COMPETITIONS = ("math", "comp", "olym", "olympiad", "deepscaler", "minerva", "sci", "school", "amc", "aime")
FAMILIES: dict[str, dict[str, int]] = {
    "word problems": {"whole": 100},
    "competition": {"whole": 59, "fraction": 14, "decimal": 4, "gold": 23},
    "figures": {"whole": 45, "decimal": 10, "gold": 45},
    "charts": {"whole": 48, "decimal": 24, "yes or no": 13, "gold": 15},
}
"""Kinds of gold answers by the kind of text, in a hundred: all of GSM8K's are whole numbers; of 49 of MATH-500's 29 were, with
7 fractions and 2 decimals; of the first 136 of ChartQA's (test, human) 65, with 33 decimals and 18 times yes or no. Those of
figures are set by hand."""
STYLES = {"competition": COMPETITIONS, "figures": ("geo", "mathvista"), "charts": ("mathvista", "mmmu")}
"""Datasets of `GOLDS` that the golds that are none of these come from."""
OUTCOMES = {"right": 50, "wrong": 30, "hedged": 8, "cut off": 12}
"""What becomes of a response, how many in a hundred."""
ENDINGS = {
    "boxed": (35, "{work}\n\nTherefore, the final answer is:\n\n\\[ \\boxed{{{answer}}} \\]"),
    "boxed in a sentence": (10, "{work}\n\nSo, the answer is $\\boxed{{{answer}}}$."),
    "tags": (20, "<think>\n{work}\n</think>\n<answer> {answer} </answer>"),
    "tags and formula": (10, "<think>{work}</think>\n\n<answer>${answer}$</answer>"),
    "tags and box": (10, "<think>\n{work}\n</think>\n\n<answer>\nThe answer is $\\boxed{{{answer}}}$.\n</answer>"),
    "sentence": (8, "{work}\n\nThe answer is ${answer}$."),
    "bold": (4, "{work}\n\n**Answer:** {answer}"),
    "hashes": (3, "{work}\n#### {answer}"),
}
"""How a response ends, how many in a hundred."""
HEDGES = ("{answer} or {other}", "{answer}, or maybe {other}", "{other} (or {answer})")
_WHOLE = re.compile(r"-?\d+")
_DECIMAL = re.compile(r"\d+\.\d+")


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A response to judge, and how it was made."""

    prompt: str
    response: str
    label: str
    answer: str
    is_right: bool


def golds(family: str) -> list[str]:
    """Return the public golds for a kind of text that are no plain numbers."""
    rows = map(json.loads, GOLDS.read_text(encoding="utf-8").splitlines())
    answers = [row["answer"] for row in rows if row["style"] in STYLES.get(family, ())]
    return [answer for answer in answers if not _WHOLE.fullmatch(answer)]


def make_samples(count: int, *, seed: int) -> list[Sample]:
    """Return responses, eight to a prompt, in a shuffled order."""
    rng = random.Random(seed)
    known = {family: golds(family) for family in FAMILIES}
    samples: list[Sample] = []
    while len(samples) < count:
        family = rng.choice(list(FAMILIES))
        gold = _gold(rng, FAMILIES[family], known[family])
        question, _ = reasoning(rng, kind=family)
        prompt = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        for _ in range(SAMPLES_PER_PROMPT):
            _, work = reasoning(rng, kind=family)
            samples.append(_sample(rng, prompt=prompt, work=work, gold=gold, others=known[family]))
    rng.shuffle(samples)
    return samples[:count]


def _gold(rng: random.Random, shares: dict[str, int], known: Sequence[str]) -> str:
    (kind,) = rng.choices(list(shares), weights=list(shares.values()))
    if kind == "whole":
        return str(rng.choice((rng.randint(-9, 99), rng.randint(0, 300), rng.randint(100, 9_999))))
    if kind == "fraction":
        denominator = rng.randint(2, 30)
        return rf"\frac{{{denominator * rng.randint(0, 3) + rng.randint(1, denominator - 1)}}}{{{denominator}}}"
    if kind == "decimal":
        return f"{rng.uniform(0, 100):.{rng.randint(1, 2)}f}"
    return rng.choice(("Yes", "No")) if kind == "yes or no" else rng.choice(known)


def _sample(rng: random.Random, *, prompt: str, work: str, gold: str, others: Sequence[str]) -> Sample:
    (outcome,) = rng.choices(list(OUTCOMES), weights=list(OUTCOMES.values()))
    (ending,) = rng.choices([text for _, text in ENDINGS.values()], weights=[share for share, _ in ENDINGS.values()])
    wrong = _wrong(rng, gold, others)
    answers = {"right": _rewritten(rng, gold), "wrong": wrong, "hedged": _hedge(rng, gold, wrong), "cut off": ""}
    answer = answers[outcome]
    response = ending.format(work=work, answer=answer)
    if outcome == "cut off":
        response = response[: response.index(work) + int(len(work) * rng.uniform(0.6, 1.0))]
    return Sample(prompt=prompt, response=response, label=gold, answer=answer, is_right=outcome == "right")


def _wrong(rng: random.Random, gold: str, others: Sequence[str]) -> str:
    """Return what a slip makes of a number, and the answer of another problem for anything else."""
    if _WHOLE.fullmatch(gold):
        value = int(gold)
        return str(rng.choice((value + rng.randint(1, 9), value - rng.randint(1, 9), 2 * value + 1, 10 * value + 1)))
    if _DECIMAL.fullmatch(gold):
        return f"{float(gold) + rng.uniform(1, 9):.{len(gold.partition('.')[2])}f}"
    if gold in ("Yes", "No"):
        return "No" if gold == "Yes" else "Yes"
    return rng.choice([answer for answer in others if answer != gold])


def _rewritten(rng: random.Random, gold: str) -> str:
    """Return the gold answer, in every fourth case with another spelling that models have."""
    if rng.random() >= 0.25:
        return gold
    if _WHOLE.fullmatch(gold) and len(gold) > 3 and not gold.startswith(("0", "-")):
        return f"{int(gold):,}"
    spelled = gold.replace("\\frac", "\\dfrac").replace(",", ", ").replace("=", " = ")
    return re.sub(r" {2,}", " ", spelled)


def _hedge(rng: random.Random, gold: str, other: str) -> str:
    return rng.choice(HEDGES).format(answer=gold, other=other)


def is_whole_number(gold: str) -> bool:
    """Say whether a gold answer is digits with at most a minus sign."""
    return _WHOLE.fullmatch(gold) is not None


def description_of(samples: Sequence[Sample]) -> dict:
    """Return what the responses are like."""
    lengths = sorted(len(sample.response) for sample in samples)
    return {
        "responses": len(samples),
        "characters": {"asked": [SHORTEST, LONGEST], "least": lengths[0], "most": lengths[-1]},
        "median_characters": int(statistics.median(lengths)),
        "texts_that_differ_beyond_numbers": len({wording(sample.response) for sample in samples}),
        "distinct_golds": len({sample.label for sample in samples}),
        "whole_numbers_among_golds": round(statistics.mean(is_whole_number(one.label) for one in samples), 3),
        "golds_percent_by_text": FAMILIES,
        "outcomes_percent": OUTCOMES,
        "endings_percent": {name: share for name, (share, _) in ENDINGS.items()},
        "right": round(statistics.mean(sample.is_right for sample in samples), 3),
    }


def reasoning(rng: random.Random, *, kind: str) -> tuple[str, str]:
    """Return a question and a chain of thought about it, of 800 to 4,000 characters, without an answer."""
    scenario = rng.choice(TEXTS["scenarios"][kind])
    numbers = _numbers(rng)
    length = rng.randint(SHORTEST, LONGEST - 400)
    layout = rng.choice(TEXTS["layouts"])
    pieces = [rng.choice(TEXTS["openings"])]
    while True:
        for number, wordings in enumerate(scenario["steps"], start=1):
            pieces.append(layout.format(number=number, step=rng.choice(wordings).format(**numbers)))
            if rng.random() < 0.35:
                pieces.append(rng.choice(TEXTS["second_thoughts"]).format(**numbers))
        if sum(map(len, pieces)) >= length:
            break
        pieces.append(rng.choice(TEXTS["second_passes"]))
        numbers = _numbers(rng)
    text = rng.choice(("\n\n", "\n")).join(pieces).strip()
    text = text if len(text) <= LONGEST - 200 else text[: LONGEST - 200].rpartition("\n")[0]
    return scenario["question"].format(**numbers), text


def wording(text: str) -> str:
    """Return a text without its numbers."""
    return re.sub(r"\d+", "0", text)


def _numbers(rng: random.Random) -> dict[str, float]:
    """Return the numbers that the texts name."""
    a, b, c, d, small = (*(rng.randint(11, 79) for _ in range(3)), rng.randint(2, 9), rng.randint(2, 6))
    b = b + 1 if b == a else b
    a, b = min(a, b), max(a, b)
    p, year = rng.choice((5, 10, 15, 20, 25)), rng.randint(1995, 2018)
    total = a * b + c * d
    return {
        **{"a": a, "b": b, "c": c, "d": d, "small": small, "p": p, "q": 100 - p, "year": year},
        **{"next": year + 1, "after": year + 3, "ab": a * b, "cd": c * d, "total": total, "part": total * p // 100},
        **{"bsmall": b * small, "asmall": a * small, "diff": b - a, "sum": a + b, "ab1": a + b, "abd": a * b * d},
        **{"vieta": a * a + b * b, "first": a - small, "last": a + small * (b - 1), "b1": b + 1, "b2": b * b},
        **{"bb": 2 * b, "smallfact": (1, 1, 2, 6, 24, 120, 720)[small], "adivc": a // c, "amodc": a % c},
        **{"a2modc": a * a % c, "apowbmodc": pow(a, b, c), "hyp2": a * a + b * b, "rest": 180 - 2 * c},
        **{"supp": 180 - c, "ac": a + c, "abc": a + b + c, "mean": (a + b + c) / 3, "ratio": b / a},
        **{"growth": 100 * (b - a) / a, "half": (a + b) / 2, "remaining": 100 - a, "part2": total * a / 100},
        **{"ratio2": a / c},
    }
