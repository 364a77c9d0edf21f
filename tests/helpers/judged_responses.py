"""Judged responses as an evaluation would write them."""

from collections.abc import Sequence

from lmm_r1.records.responses import JudgedResponse, VerifierVerdict


def judged(right: bool = True, **changes: object) -> JudgedResponse:
    """One response, right or wrong by the math verifier."""
    values = {
        "checkpoint": "base",
        "file": "held_out",
        "index": 0,
        "row": "rows.jsonl line 1",
        "datasource": "sums",
        "label": "4",
        "question": "What is 2 + 2?",
        "sample": 0,
        "response": f"<think>so</think><answer>{4 if right else 5}</answer>",
        "response_tokens": 10,
        "finish_reason": "stop",
        "verdicts": {"math": VerifierVerdict(score=float(right), parts={"accuracy": float(right), "ungradable": 0.0})},
    }
    return JudgedResponse(**(values | changes))


def judged_rows(rows: Sequence[Sequence[bool]], **changes: object) -> list[JudgedResponse]:
    """The responses to rows that are given by whether each sample is right."""
    return [
        judged(right, **({"index": index, "row": f"rows.jsonl line {index + 1}", "sample": sample} | changes))
        for index, row in enumerate(rows)
        for sample, right in enumerate(row)
    ]
