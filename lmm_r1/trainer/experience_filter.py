"""A user's function that says which samples of a group are learnt from, after LMM-R1's `experience_filter`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from lmm_r1.config.ppo import FILTER_NAME
from lmm_r1.data.sample import Sample
from lmm_r1.errors import UserError
from lmm_r1.files.user_code import load_user_file, raised_at

FLAG = "--algo.experience_filter"
MODULE_NAME = "experience_filter"
"""What the module of the user's file is called."""
_SPEC = re.compile(r"(?P<path>.+\.py)(:(?P<name>[A-Za-z_]\w*))?")


class ExperienceFilter:
    """The function of `FILE.py:NAME`, called with the samples of one group at a time.

    Each sample is a dict of plain values: prompt (messages as JSON), response, label, datasource, location, reward,
    score, parts, response_length, truncated, masked, step.
    """

    def __init__(self, spec: str) -> None:
        """Import the file; raises UserError where it has no such function."""
        match = _SPEC.fullmatch(spec)
        if match is None:
            raise UserError(f"{FLAG} {spec} names no file; give it as FILE.py or FILE.py:FUNCTION")
        self.spec = spec
        self._path, self._name = match["path"], match["name"] or FILTER_NAME
        module = load_user_file(self._path, name=MODULE_NAME, what=FLAG)
        self._function: Any = getattr(module, self._name, None)
        if not callable(self._function):
            raise UserError(
                f"{FLAG} {spec}: the file defines no {self._name}(samples); add one, or name another function behind a "
                f"colon, as in {self._path}:NAME"
            )

    def __call__(self, group: Sequence[Sample], *, step: int | None) -> list[bool]:
        """Return of each sample whether it is kept; raises UserError, with the file's line, where the function fails.

        Args:
            step: that learns from the group.
        """
        location = group[0].row.location
        try:
            reply = self._function([_shown(sample, step=step) for sample in group])
        except Exception as error:  # the user's own code, which may raise anything
            place = raised_at(error, modules=(MODULE_NAME,))
            where = f"{FLAG} {self.spec}" if place is None else f"{FLAG} {place[0]}, line {place[1]}"
            said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            raise UserError(f"{where}: {self._name} raised {said}, for the group of {location}") from error
        if isinstance(reply, bool):
            return [reply] * len(group)
        kept = reply.tolist() if hasattr(reply, "tolist") else reply
        if not isinstance(kept, list | tuple) or len(kept) != len(group) or any(type(its) is not bool for its in kept):
            raise UserError(
                f"{FLAG} {self._path}: {self._name} returned {str(reply)[:200]} for the group of {location}; return True or "
                f"False for the whole group, or a list of {len(group)} of them, one for each sample"
            )
        return list(kept)


def _shown(sample: Sample, *, step: int | None) -> dict[str, object]:
    """Return a sample as the user's function is given it; what it does to it changes nothing."""
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
