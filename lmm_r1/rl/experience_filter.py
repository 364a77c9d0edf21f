"""The user's function that decides which samples a step trains on; it runs in a process of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from lmm_r1.config.ppo import FILTER_NAME
from lmm_r1.errors import UserError
from lmm_r1.files.user_code import advice, failure, find_user_function, module_of
from lmm_r1.files.user_process import FunctionFailed, Served, Steps, UserProcess, called

if TYPE_CHECKING:
    from lmm_r1.data.sample import Sample

FLAG = "--algo.experience_filter"


class ExperienceFilter:
    """The user's function `FILE.py:NAME?option=value`, called with the samples of one group at a time.

    Each sample is a dict of plain values: prompt (messages as JSON), response, label, datasource, location, reward,
    score, parts, response_length, truncated, masked, step.
    """

    def __init__(self, spec: str) -> None:
        """Import the file; raises UserError if it has no such function."""
        self.spec = spec
        self._process = UserProcess(partial(_served, spec), what=f"{FLAG} {spec}")

    def __call__(self, group: Sequence[Sample], *, step: int | None) -> list[bool]:
        """Return for each sample whether it is kept; raises UserError, with the file's line, if the function fails.

        Args:
            step: the step that trains on the group.
        """
        return self._process.ask([_shown(sample, step=step) for sample in group]).answer.result()


def _served(spec: str) -> Served:
    """Return a filter as its process serves it; raises UserError if the file has no such function."""
    function = find_user_function(spec, default=FILTER_NAME, flag=FLAG)

    def answer(samples: Sequence[Mapping[str, object]]) -> Steps:
        group = f"for the group of {samples[0]['location']}"
        count = len(samples)
        try:
            reply = yield from called(function, samples)
        except BaseException as error:  # the user's own code, which may raise anything
            place, said = failure(error, modules=(module_of(FILTER_NAME),))
            raise FunctionFailed(f"{FLAG}{place or f' {spec}'}: it raised {said}, {group}{advice(error)}") from error
        if isinstance(reply, bool):
            return [reply] * count
        kept = reply.tolist() if hasattr(reply, "tolist") else reply
        if not isinstance(kept, list | tuple) or len(kept) != count or any(type(its) is not bool for its in kept):
            raise UserError(
                f"{FLAG} {spec}: it returned {str(reply)[:200]} {group}; return True or False for the whole group, "
                f"or a list of {count} of them, one for each sample"
            )
        return list(kept)

    return Served(answer=answer)


def _shown(sample: Sample, *, step: int | None) -> dict[str, object]:
    """Return a copy of a sample as plain values for the user's function."""
    score = sample.scored
    return {
        "prompt": sample.prompt,
        "response": sample.response,
        "label": sample.label,
        "datasource": sample.row.datasource,
        "location": sample.row.location,
        "reward": score.reward,
        "score": score.score,
        "parts": dict(score.parts),
        "response_length": sample.generated_tokens,
        "truncated": sample.truncated,
        "masked": sample.masked,
        "step": step,
    }
