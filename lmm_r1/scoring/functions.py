"""Rewards by a user's Python function: loads it, and runs it in threads, for whole groups, within a deadline."""

from __future__ import annotations

import asyncio
import inspect
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import ModuleType
from typing import Any

from lmm_r1.config.rewards import RewardFunction
from lmm_r1.data.messages import Row
from lmm_r1.errors import UserError
from lmm_r1.files.user_code import load_user_file, raised_at
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
"""The variable with which a file allows several groups at a time for `reward_func`, if it mostly waits."""
MODULE_NAME = "reward_function"
"""The name of the user's module in every process."""
# `__main__` is for a function that was passed directly, in a script or a notebook.
_USERS_MODULES = (MODULE_NAME, "__main__")


class FunctionScorer:
    """A function that runs in a thread: one call for all responses to one prompt."""

    def __init__(self, function: RewardFunction, *, given: Callable[..., Any] | None = None) -> None:
        """Import the file, or take the function itself; raises UserError if it cannot be used.

        Args:
            given: the function, if it is not in a file.
        """
        self.told = function.told
        self._deadline_s = function.deadline_s
        self._protocol = _protocol_of_file(function) if given is None else _protocol(given, function)
        # The number of threads per process that score at the same time; the default is that of `asyncio.to_thread`.
        self._slots = asyncio.Semaphore(self._protocol.calls_at_once or min(32, (os.cpu_count() or 1) + 4))

    def check_rows(self, rows: Sequence[Row]) -> None:
        """Raise UserError for the first row that lacks a column that the function asks for."""
        for row in rows:
            self._protocol.check_row(row)

    async def rewards(self, batch: Sequence[ScoredResponse]) -> list[Score]:
        """Return the function's rewards of the responses, in their order; its own errors are not caught.

        Raises:
            UserError: it returns anything but one reward per response, does not return in time, or raises SystemExit or
                StopIteration, which must not reach an event loop.
        """
        async with self._slots:
            outcome = await self._outcome(batch)
        if isinstance(outcome, BaseException):
            if isinstance(outcome, StopIteration) or not isinstance(outcome, Exception):
                raise UserError(failure_message(outcome)) from outcome
            raise outcome
        return outcome

    async def _outcome(self, batch: Sequence[ScoredResponse]) -> list[Score] | BaseException:
        """Return what the function returned or raised; waiting for a slot does not count as its time."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[list[Score] | BaseException] = loop.create_future()

        def settle(outcome: list[Score] | BaseException) -> None:
            if not answer.done():
                answer.set_result(outcome)

        def call() -> None:
            outcome: list[Score] | BaseException
            try:
                outcome = self._protocol(batch)
            except BaseException as error:  # the user's own code may raise anything, including SystemExit
                outcome = error
            # The loop is closed if nobody waits any more.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(settle, outcome)

        # A daemon thread: unlike a pool's threads, it does not keep the process alive if a function hangs.
        threading.Thread(target=call, name=MODULE_NAME, daemon=True).start()
        try:
            return await asyncio.wait_for(answer, timeout=self._deadline_s)
        except asyncio.TimeoutError as error:
            raise UserError(
                f"{self.told}: the function has not returned the rewards of {len(batch)} responses "
                f"within {self._deadline_s:g} s; find out whether it hangs, or raise --reward.deadline_s"
            ) from error

    async def check_health(self) -> None:
        """Do nothing: the file was loaded."""

    async def close(self) -> None:
        """Do nothing."""


def failure_message(error: BaseException) -> str:
    """Return what a function raised, with the line of the user's file that raised it."""
    kind = type(error).__name__
    said = f"the reward function raised {kind}: {error}" if str(error) else f"the reward function raised {kind}"
    place = raised_at(error, modules=_USERS_MODULES)
    if place is None:
        return f"--reward.remote_url: {said}"
    path, line = place
    return f"--reward.remote_url {path}, line {line}: {said}"


def _protocol_of_file(function: RewardFunction) -> FunctionProtocol:
    if function.path is None:
        raise UserError(
            f"{function.told} is a function that was passed to lmm_r1.train_rl; pass it again, or write it into a file "
            f"and name that: --reward FILE.py:{function.name}"
        )
    module = load_user_file(function.path, name=MODULE_NAME, what="--reward.remote_url")
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
    return _protocol(
        getattr(module, name), function, name=name, calls_at_once=_calls_at_once(module, function), kind=kind
    )


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


def _calls_at_once(module: ModuleType, function: RewardFunction) -> int | None:
    stated = getattr(module, CALLS_AT_ONCE, None)
    if stated is not None and (not isinstance(stated, int) or stated < 1):
        raise UserError(f"{function.told}: {CALLS_AT_ONCE} is {stated!r}; make it a whole number, at least 1")
    return stated
