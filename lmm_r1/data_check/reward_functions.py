"""What a user's reward function gives for the rows' own answers."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from statistics import fmean

from lmm_r1.data.messages import Row
from lmm_r1.data.sample import Completion
from lmm_r1.data_check.contents import Finding
from lmm_r1.errors import UserError
from lmm_r1.scoring.sources import SourceJudge

_THOUGHT = "<think>\nThis is known.\n</think>\n"
FORMS = ("{}", r"\boxed{{{}}}", _THOUGHT + "<answer>{}</answer>", _THOUGHT + r"<answer>\boxed{{{}}}</answer>")
"""How responses may write an answer; which of them the function reads is unknown."""


def function_findings(rows: Mapping[int, Row], spec: str, judge: SourceJudge) -> tuple[list[Finding], str]:
    """Return the findings about the rows that have an answer, and what the function gives in general, as a sentence."""
    findings, best, nothing = [], [], []
    judged = [(index, row) for index, row in rows.items() if row.answer]
    outcomes = judge.outcomes([(row, _responses(row)) for _, row in judged])
    for (index, row), outcome in zip(judged, outcomes, strict=True):
        kind, what = "gold refused", f"{spec} gives a reward that is not finite"
        if isinstance(outcome, UserError):
            what = str(outcome).removeprefix(f"{row.location}: ")
        elif all(isfinite(score.reward) for score in outcome):
            *given, empty = [score.reward for score in outcome]
            best.append(max(given))
            nothing.append(empty)
            if max(given) > empty:
                continue
            kind = "gold wrong"
            what = f"{spec} gives the answer {row.answer!r} itself {max(given):g}, no more than an empty response"
        findings.append(Finding(kind=kind, index=index, location=row.location, what=what))
    if not best:
        return findings, f"{spec} judged no row"
    told = f"{min(best):g} to {max(best):g} (mean {fmean(best):g})"
    return findings, f"{spec} gives the rows' own answers {told}, and empty responses {fmean(nothing):g} on average"


def _responses(row: Row) -> list[Completion]:
    """Return the row's answer in all forms, and an empty response."""
    return [
        Completion(text=text, num_tokens=len(text.split()) + 1, finish_reason="stop")
        for text in (*(form.format(row.answer) for form in FORMS), "")
    ]
