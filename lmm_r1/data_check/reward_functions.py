"""What a user's reward function gives for the rows' own answers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from math import isfinite
from statistics import fmean

from lmm_r1.config.ppo import RewardConfig
from lmm_r1.config.rewards import RewardFunction, file_and_name
from lmm_r1.data.messages import Row, TextPart
from lmm_r1.data_check.contents import Finding
from lmm_r1.errors import UserError
from lmm_r1.scoring import ScoredResponse
from lmm_r1.scoring.functions import FunctionScorer

_THOUGHT = "<think>\nThis is known.\n</think>\n"
FORMS = ("{}", r"\boxed{{{}}}", _THOUGHT + "<answer>{}</answer>", _THOUGHT + r"<answer>\boxed{{{}}}</answer>")
"""How responses may write an answer; which of them the function reads is unknown."""
_ROWS_AT_ONCE = 64


def load_function(spec: str, *, deadline_s: float) -> FunctionScorer | None:
    """Return the function that a reward names as FILE.py or FILE.py:NAME, None if it names a verifier.

    Raises:
        UserError: it cannot be loaded.
    """
    path, name = file_and_name(spec)
    if path is None:
        return None
    deadline_s = max(deadline_s, RewardConfig.deadline_s)
    return FunctionScorer(
        RewardFunction(
            path=path,
            name=name,
            arguments={},
            score_key=None,
            deadline_s=deadline_s,
            flag="--reward",
            deadline_flag="--judge_timeout",
        )
    )


def function_findings(rows: Mapping[int, Row], spec: str, scorer: FunctionScorer) -> tuple[list[Finding], str]:
    """Return the findings about the rows that have an answer, and what the function gives in general, as a sentence."""
    findings, best, nothing = [], [], []
    judged = [(index, row) for index, row in rows.items() if row.answer]
    for (index, row), rewards in zip(judged, asyncio.run(_rewards(judged, scorer)), strict=True):
        if isinstance(rewards, UserError):
            what = str(rewards).removeprefix(f"{row.location}: ")
            findings.append(Finding(kind="gold refused", index=index, location=row.location, what=what))
            continue
        *given, empty = rewards
        best.append(max(given))
        nothing.append(empty)
        if max(given) <= empty:
            what = f"{spec} gives the answer {row.answer!r} itself {max(given):g}, no more than an empty response"
            findings.append(Finding(kind="gold wrong", index=index, location=row.location, what=what))
    if not best:
        return findings, f"{spec} judged no row"
    told = f"{min(best):g} to {max(best):g} (mean {fmean(best):g})"
    return findings, f"{spec} gives the rows' own answers {told}, and empty responses {fmean(nothing):g} on average"


async def _rewards(judged: Sequence[tuple[int, Row]], scorer: FunctionScorer) -> list[list[float] | UserError]:
    """Return the rewards of a row's answer in each form and of an empty response, or why there are none."""
    found: list[list[float] | UserError] = []
    for start in range(0, len(judged), _ROWS_AT_ONCE):
        some = judged[start : start + _ROWS_AT_ONCE]
        found += await asyncio.gather(*(_rewards_of(row, scorer) for _, row in some))
    return found


async def _rewards_of(row: Row, scorer: FunctionScorer) -> list[float] | UserError:
    prompt = "\n".join(part.text for turn in row.messages for part in turn.parts if isinstance(part, TextPart))
    batch = [
        ScoredResponse(row=row, prompt=prompt, query=prompt + text, response=text, num_tokens=len(text.split()) + 1)
        for text in (*(form.format(row.answer) for form in FORMS), "")
    ]
    try:
        rewards = [score.reward for score in await scorer.rewards(batch)]
    except UserError as error:
        return error
    return rewards if all(map(isfinite, rewards)) else UserError(f"{scorer.told} gives rewards that are not finite")
