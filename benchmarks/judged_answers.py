"""How often verifiers agree with verdicts that people gave on public model answers, and their rate; JSON on the last line.

python benchmarks/judged_answers.py FILE [--output benchmarks/results/judged_answers.json]

FILE has a row per answer: {"verifier", "response", "label", "verdict", "kind"}; verdict is true for a right answer.
The answers themselves belong to their authors and are not in this repository; the result holds counts only. The rates
are those of the verifier `math` and of math-verify, each in a new process whose start is in its CPU seconds.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from machine import machine_name
from measuring import parser_of, publish
from reasoning_samples import Sample
from reward_reasoning import ITEM_SECONDS, JUDGES, agreement, judge_all


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("file", type=Path, help="JSON lines of answers with verdicts")
    arguments = parser.parse_args()
    result = {"benchmark": "judged_answers", "machine": machine_name(), **measure(arguments.file)}
    publish(result, arguments.output)


def measure(file: Path) -> dict:
    """Return the agreement with the verdicts of a file, over all answers, per verifier and per kind."""
    content = file.read_bytes()
    rows = [json.loads(line) for line in content.splitlines()]
    outcomes: dict[str, Counter[str]] = {}
    kinds: dict[str, Counter[str]] = {}
    for name in sorted({row["verifier"] for row in rows}):
        own = [row for row in rows if row["verifier"] == name]
        outcomes[name] = Counter()
        for row, paid in zip(own, asyncio.run(judge(name, own)), strict=True):
            outcome = OUTCOMES[row["verdict"], paid]
            outcomes[name][outcome] += 1
            kinds.setdefault(row["kind"], Counter())[outcome] += 1
    total = sum(outcomes.values(), Counter())
    samples = [
        Sample(prompt="", response=row["response"], label=row["label"], answer="", is_right=row["verdict"])
        for row in rows
        if row["verifier"] == "math"
    ]
    rates = {}
    for name in JUDGES:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            rates[name] = pool.submit(rate, name, samples).result()
    return {
        "item_timeout_seconds": ITEM_SECONDS,
        "sha256": hashlib.sha256(content).hexdigest(),
        "all": _shares(total),
        "verifiers": {name: _shares(counts) for name, counts in outcomes.items()},
        "kinds": {kind: _shares(counts) for kind, counts in sorted(kinds.items())},
        "rates": rates,
    }


def rate(judge: str, samples: list[Sample]) -> dict[str, float]:
    """Return how many answers a judge decides in a CPU second of this process, and how often it agrees."""
    verdicts, _, _ = judge_all(JUDGES[judge], samples)
    return {
        "answers_per_cpu_s": round(len(samples) / time.process_time(), 1),
        "agreement": agreement(verdicts, samples),
    }


async def judge(name: str, rows: list[dict]) -> list[bool]:
    """Return which answers a verifier pays, each judged within the reward service's time limit."""
    from remote_rm.registry import get_verifier
    from remote_rm.service.pool import VerifierPool
    from remote_rm.verifier import Item

    pool = VerifierPool(get_verifier(name), workers=1, item_timeout_seconds=ITEM_SECONDS)
    await pool.start()
    try:
        items = [Item(prompt="", response=row["response"], label=row["label"]) for row in rows]
        return [score.parts["accuracy"] >= 1 for score in await pool.judge(items)]
    finally:
        await pool.stop()


# Of (right by the verdict, paid by the verifier).
OUTCOMES = {
    (True, True): "right_and_paid",
    (True, False): "right_but_unpaid",
    (False, True): "wrong_but_paid",
    (False, False): "wrong_and_unpaid",
}


def _shares(counts: Counter[str]) -> dict:
    answers = sum(counts.values())
    agree = counts["right_and_paid"] + counts["wrong_and_unpaid"]
    return {
        "answers": answers,
        **{name: counts[name] for name in OUTCOMES.values()},
        "agreement": round(agree / answers, 4),
    }


if __name__ == "__main__":
    main()
