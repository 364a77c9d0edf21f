"""Rewards by a user's Python function, which runs in its own process, for whole groups, with a deadline."""

from __future__ import annotations

import asyncio
import inspect
import pickle
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from lmm_r1.config.rewards import RewardFunction
from lmm_r1.data.messages import Row
from lmm_r1.errors import UserError
from lmm_r1.files.user_code import advice, failure, load_user_file
from lmm_r1.files.user_process import FunctionFailed, Served, Steps, UserProcess
from lmm_r1.scoring import ScoredResponse
from lmm_r1.scoring.function_protocols import (
    ACCEPTED,
    BATCH,
    COMPLETIONS,
    LISTS,
    OPENRLHF_PARAMETERS,
    REWARD_INPUT,
    SEQUENTIAL,
    SOLUTION,
    EasyR1Function,
    FunctionProtocol,
    OpenRLHFFunction,
    TRLFunction,
    VerlFunction,
)
from remote_rm.verifier import Score

OPENRLHF_NAME, EASYR1_NAME = "reward_func", "compute_score"
CALLS_AT_ONCE = "CALLS_AT_ONCE"
"""The variable with which a file allows that many threads to call its function, if it mostly waits."""
MODULE_NAME = "users_reward_function"
"""The name of the user's module in its process."""
# `__main__` is for a function that was passed directly, in a script or a notebook.
_USERS_MODULES = (MODULE_NAME, "__main__")


class FunctionScorer:
    """A function in its own process, called once for all responses to a prompt."""

    one_by_one = False

    def __init__(self, function: RewardFunction, *, given: Callable[..., Any] | None = None) -> None:
        """Import the file, or take the function itself; raises UserError if it cannot be used.

        Args:
            given: the function, if it is not in a file.
        """
        self.told = function.told
        self._function = function
        packed = None
        if given is not None:
            from ray import cloudpickle

            packed = cloudpickle.dumps(given)
        self._process = UserProcess(partial(_served, function, packed), what=f"{function.told}: the reward function")
        self._name, self._columns = self._process.told

    def check_rows(self, rows: Sequence[Row]) -> None:
        """Raise UserError for the first row that lacks a column that the function asks for."""
        for row in rows:
            if missing := self._columns - row.columns.keys():
                found = ", ".join(row.columns) or "none"
                raise UserError(
                    f"{row.location}: {self._name} in {self.told} asks for {', '.join(sorted(missing))}, but the row has "
                    f"no such column (found: {found})"
                )

    async def rewards(self, batch: Sequence[ScoredResponse]) -> list[Score]:
        """Return the function's rewards of the responses, in their order.

        Raises:
            UserError: it raises, returns anything but one reward per response, ends its process, or does not return in
                time; then its process is killed. The time in which it computes for other groups does not count.
        """
        self.check_rows([item.row for item in batch])
        asked = self._process.ask(list(batch))
        await asyncio.wrap_future(asked.begun)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(asked.answer), timeout=self._function.deadline_s)
        except asyncio.TimeoutError as error:
            flag = self._function.deadline_flag
            reason = (
                f"{self.told}: the function has not returned the rewards of {len(batch)} responses "
                f"within {self._function.deadline_s:g} s; find out whether it hangs{f', or raise {flag}' if flag else ''}"
            )
            self._process.stop(reason)
            raise UserError(reason) from error

    async def check_health(self) -> None:
        """Do nothing: the file was loaded."""

    async def close(self) -> None:
        """End the process."""
        self._process.kill()


def _served(function: RewardFunction, packed: bytes | None) -> Served:
    """Return the function as its process serves it.

    Args:
        packed: the function itself, pickled, if it is not in a file.
    """
    protocol = _protocol_of_file(function) if packed is None else _protocol(pickle.loads(packed), function)

    def answer(batch: Sequence[ScoredResponse]) -> Steps:
        try:
            return (yield from protocol(batch))
        except UserError:
            raise
        except BaseException as error:  # the user's own code, which may raise anything
            # A generator cannot raise StopIteration.
            cause = error.__cause__ if isinstance(error.__cause__, StopIteration) else error
            place, said = failure(cause, modules=_USERS_MODULES)
            raise FunctionFailed(
                f"{function.flag}{place}: the reward function raised {said}{advice(cause)}"
            ) from error

    return Served(answer=answer, told=(protocol.name, protocol.columns), threads=protocol.calls_at_once or 0)


def _protocol_of_file(function: RewardFunction) -> FunctionProtocol:
    if function.path is None:
        raise UserError(
            f"{function.told} is a function that was passed in Python; pass it again, or write it into a file "
            f"and name that: --reward FILE.py:{function.name}"
        )
    if not PathFinder.find_spec("mathruler", [str(Path(function.path).resolve().parent), *sys.path]):
        from remote_rm import adapters

        # For EasyR1's own reward files.
        sys.modules |= {"mathruler": adapters, "mathruler.grader": adapters}
    module = load_user_file(function.path, name=MODULE_NAME, what=function.flag)
    known = (OPENRLHF_NAME, EASYR1_NAME) if function.name is None else (function.name,)
    name = next((name for name in known if callable(getattr(module, name, None))), None)
    found = [] if name is not None or function.name is not None else _reward_functions(module)
    if len(found) == 1:
        name = found[0]
    if name is None:
        wanted = function.name or f"{OPENRLHF_NAME}({', '.join(OPENRLHF_PARAMETERS)}) and no {EASYR1_NAME}"
        several = f"; it has the reward functions {', '.join(found)}" if found else f"; {ACCEPTED}"
        raise UserError(
            f"{function.told}: the file defines no {wanted}{several}. Name the function after a colon, as in "
            f"{function.path}:{found[0] if found else 'NAME'}"
        )
    kind = getattr(module, "REWARD_TYPE", None)
    called = getattr(module, name)
    stated = getattr(module, CALLS_AT_ONCE, getattr(called, CALLS_AT_ONCE, None))
    if stated is not None and (not isinstance(stated, int) or stated < 1):
        raise UserError(f"{function.told}: {CALLS_AT_ONCE} is {stated!r}; make it a whole number, at least 1")
    return _protocol(called, function, name=name, calls_at_once=stated, kind=kind)


def _reward_functions(module: ModuleType) -> list[str]:
    """Return the names of the functions of a file whose parameters are those of a reward function."""
    own = [(name, one) for name, one in vars(module).items() if inspect.isfunction(one)]
    return [
        name
        for name, one in own
        if one.__module__ == module.__name__
        and not name.startswith("_")
        and _is_reward(tuple(inspect.signature(one).parameters))
    ]


def _is_reward(parameters: tuple[str, ...]) -> bool:
    named = {COMPLETIONS, SOLUTION, REWARD_INPUT, f"{REWARD_INPUT}s"}
    return (
        not named.isdisjoint(parameters)
        or parameters[:2] == OPENRLHF_PARAMETERS[:2]
        or parameters[:1] == ("responses",)
    )


def _protocol(
    called: Callable[..., Any],
    function: RewardFunction,
    *,
    name: str | None = None,
    calls_at_once: int | None = None,
    kind: object = None,
) -> FunctionProtocol:
    """Return the calling convention of a function, detected by its name and its parameters.

    Args:
        name: its name in the file; None takes the one from the settings.
        calls_at_once: like `kind`, from the file.
    """
    name = name or str(function.name)
    try:
        parameters = tuple(inspect.signature(called).parameters)
    except (TypeError, ValueError) as error:
        raise UserError(f"{function.told}: its parameters cannot be determined ({error}); give a function") from error
    if COMPLETIONS in parameters:
        return TRLFunction(called, name=name, settings=function, calls_at_once=calls_at_once)
    if SOLUTION in parameters:
        return VerlFunction(called, name=name, settings=function, calls_at_once=calls_at_once)
    positional = name == OPENRLHF_NAME or parameters[: len(OPENRLHF_PARAMETERS)] == OPENRLHF_PARAMETERS
    if positional or parameters[:1] and parameters[0] in LISTS:
        return OpenRLHFFunction(
            called, name=name, settings=function, calls_at_once=calls_at_once, positional=positional
        )
    if kind is None:
        kind = SEQUENTIAL if parameters[:1] == (REWARD_INPUT,) else BATCH
    return EasyR1Function(called, name=name, settings=function, kind=kind)
