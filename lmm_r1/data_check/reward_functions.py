"""What a user's reward function gives for the rows' own answers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from math import isfinite
from statistics import fmean

from lmm_r1.config.ppo import RewardConfig
from lmm_r1.config.rewards import RewardFunction, file_and_name
from lmm_r1.data.messages import Row
from lmm_r1.data_check.contents import Finding
from lmm_r1.scoring import made_up
from lmm_r1.scoring.functions import FunctionScorer
from remote_rm.verifier import Score

_THOUGHT = "<think>\nThis is known.\n</think>\n"
FORMS = ("{}", r"\boxed{{{}}}", _THOUGHT + "<answer>{}</answer>", _THOUGHT + r"<answer>\boxed{{{}}}</answer>")
"""How responses may write an answer; which of them the function reads is unknown."""
_ROWS_AT_ONCE = 64


def load_function(spec: str, *, deadline_s: float) -> FunctionScorer | None:
    """Return the function of FILE.py:NAME, None for a verifier; raises UserError if it cannot be loaded."""
    path, name = file_and_name(spec)
    if path is None:
        return None
    settings = RewardFunction(
        path=path,
        name=name,
        arguments={},
        score_key=None,
        deadline_s=max(deadline_s, RewardConfig.deadline_s),
        flag="--reward",
        deadline_flag="--judge_timeout",
    )
    return FunctionScorer(settings)


def function_findings(rows: Mapping[int, Row], spec: str, scorer: FunctionScorer) -> tuple[list[Finding], str]:
    """Return the findings about the rows that have an answer, and what the function gives in general, as a sentence."""
    findings, best, nothing = [], [], []
    judged = [(index, row) for index, row in rows.items() if row.answer]
    for (index, row), outcome in zip(judged, asyncio.run(_scores([row for _, row in judged], scorer)), strict=True):
        kind, what = "gold refused", f"{spec} gives a reward that is not finite"
        if isinstance(outcome, BaseException):
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


async def _scores(rows: Sequence[Row], scorer: FunctionScorer) -> list[list[Score] | BaseException]:
    """Return the scores of each row's answer in all forms and of an empty response, or why there are none."""
    found: list[list[Score] | BaseException] = []
    for start in range(0, len(rows), _ROWS_AT_ONCE):
        asked = (
            scorer.rewards([made_up(row, text) for text in (*(form.format(row.answer) for form in FORMS), "")])
            for row in rows[start : start + _ROWS_AT_ONCE]
        )
        found += await asyncio.gather(*asked, return_exceptions=True)
    return found
