"""Reward functions as TRL and verl call them, told by the names of their parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from lmm_r1.config.reward_source import RewardFunction
from lmm_r1.data.messages import Row, to_chat
from lmm_r1.errors import UserError
from lmm_r1.scoring.function_protocols import called
from lmm_r1.scoring.scored_response import ScoredResponse, images_of_rows
from remote_rm.verifier import Score

COMPLETIONS = "completions"
"""The parameter that tells a function of TRL's: the responses, as messages."""
SOLUTION = "solution_str"
"""The parameter that tells a function of verl's: one response."""
_VERL_SCORE = "score"


class _NamedFunction:
    """A function that is called by the names of its parameters."""

    own_names: ClassVar[frozenset[str]]
    """Parameters that are no columns."""

    def __init__(
        self, function: Callable[..., Any], *, name: str, settings: RewardFunction, calls_at_once: int | None
    ) -> None:
        self.calls_at_once = calls_at_once
        self._function = function
        self._name = name
        self._settings = settings
        parameters = inspect.signature(function).parameters.values()
        self._takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        named = [one for one in parameters if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)]
        self._names = {parameter.name for parameter in named}
        self._required = {one.name for one in named if one.default is one.empty} - settings.arguments.keys()

    def check_row(self, row: Row) -> None:
        """Raise UserError for a row that lacks a column that the function asks for."""
        if missing := sorted(self._required - self.own_names - row.columns.keys()):
            found = ", ".join(row.columns) or "none"
            raise UserError(
                f"{row.location}: {self._name} in {self._settings.told} asks for {', '.join(missing)}, "
                f"which the row has no column for (found: {found})"
            )

    def _call(self, values: Mapping[str, object]) -> Any:
        given = {name: value for name, value in values.items() if self._takes_all or name in self._names}
        return called(self._function, **{**given, **self._settings.arguments})

    def _unusable(self, reason: object, reply: object, *, wanted: str) -> UserError:
        return UserError(
            f"{self._settings.told}: {self._name} gave no usable reward ({reason}) in {str(reply)[:200]}; return {wanted}"
        )


class TRLFunction(_NamedFunction):
    """`accuracy(completions, solution, **kwargs)`: all responses to a prompt, as messages, and columns by their names."""

    own_names = frozenset(("prompts", COMPLETIONS, "images"))

    def __call__(self, batch: Sequence[ScoredResponse]) -> list[Score]:
        rows = [item.row for item in batch]
        for row in rows:
            self.check_row(row)
        values: dict[str, object] = {name: [row.columns.get(name) for row in rows] for name in rows[0].columns}
        values |= {
            "prompts": [to_chat(row.messages) for row in rows],
            COMPLETIONS: [[{"role": "assistant", "content": item.response}] for item in batch],
            "images": images_of_rows(rows),
        }
        reply = self._call(values)
        wanted = f"a list with one number for each of the {len(batch)} completions"
        try:
            rewards = [float(reward) for reward in reply]
        except (TypeError, ValueError, OverflowError) as error:
            raise self._unusable(error, reply, wanted=wanted) from error
        if len(rewards) != len(batch):
            raise self._unusable(f"{len(rewards)} rewards", reply, wanted=wanted)
        return [Score.of_reply(reward=reward, score=reward, extra_logs={}) for reward in rewards]


class VerlFunction(_NamedFunction):
    """`compute_score(data_source, solution_str, ground_truth, extra_info=None)`: one response at a time."""

    own_names = frozenset(("data_source", SOLUTION, "ground_truth", "extra_info"))

    def __call__(self, batch: Sequence[ScoredResponse]) -> list[Score]:
        return [self._scored(item) for item in batch]

    def _scored(self, item: ScoredResponse) -> Score:
        row = item.row
        self.check_row(row)
        values = {
            **row.columns,
            "data_source": row.datasource,
            SOLUTION: item.response,
            "ground_truth": row.answer,
            "extra_info": row.columns.get("extra_info"),
        }
        reply = self._call(values)
        try:
            if not isinstance(reply, Mapping):
                return Score.of_reply(reward=float(reply), score=float(reply), extra_logs={})
            reward = float(reply[_VERL_SCORE])
            score = float(reply.get("acc", reward))
            # What else it returns may be text, which is for verl's own table of samples.
            logs = {str(name): float(value) for name, value in reply.items() if isinstance(value, bool | int | float)}
        except (TypeError, ValueError, KeyError, OverflowError) as error:
            raise self._unusable(error, reply, wanted="a number, or a dict with one as `score`") from error
        del logs[_VERL_SCORE]
        return Score.of_reply(reward=reward, score=score, extra_logs=logs)
