"""Where rewards come from: reward servers over HTTP, or a Python function in a file."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from lmm_r1.errors import UserError
from remote_rm.client import RewardClient
from remote_rm.verifier import Score


class Scorer(Protocol):
    """Scores one response; raises when no reward can be had, and never returns without one."""

    async def reward(self, *, query: str, prompt: str, label: str, response: str | None = None) -> Score: ...

    async def check_health(self) -> None: ...

    async def close(self) -> None: ...


class FunctionScorer:
    """OpenRLHF's `reward_func(queries, prompts, labels)` from a file, run in a thread."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.function = _load_function(path)

    async def reward(self, *, query: str, prompt: str, label: str, response: str | None = None) -> Score:
        """Return what the function says of one sample; its errors are not caught."""
        reply = await asyncio.to_thread(self.function, [query], [prompt], [label])
        try:
            reward = _scalar(reply["rewards"])
            logs = {name: _scalar(value) for name, value in (reply.get("extra_logs") or {}).items()}
            return Score.of_reply(reward=reward, score=_scalar(reply.get("scores", reward)), extra_logs=logs)
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise UserError(
                f"--reward.remote_url {self.path}: reward_func gave no usable reward ({type(error).__name__}: {error}) in "
                f"{str(reply)[:200]}; for one response return {{'rewards': [1.0]}}, and scores and extra_logs alike"
            ) from error

    async def check_health(self) -> None:
        """Nothing can be down: the file was loaded."""

    async def close(self) -> None:
        """Nothing is held open."""


def make_scorer(endpoints: Sequence[str], *, timeout_s: float, deadline_s: float) -> Scorer:
    """Return the scorer for `--reward.remote_url`: addresses, or the path of one .py file."""
    if endpoints[0].endswith(".py"):
        return FunctionScorer(endpoints[0])
    try:
        return RewardClient(endpoints, timeout_s=timeout_s, deadline_s=deadline_s)
    except ValueError as error:
        raise UserError(f"--reward.remote_url: {error}") from error


def _load_function(path: str) -> Callable[..., Any]:
    if not Path(path).is_file():
        raise UserError(f"--reward.remote_url {path}: no such file; check the path")
    spec = importlib.util.spec_from_file_location("reward_function", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # the user's own code, which may raise anything
        raise UserError(
            f"--reward.remote_url {path}: the file cannot be imported ({type(error).__name__}: {error}); correct it"
        ) from error
    if not hasattr(module, "reward_func"):
        raise UserError(
            f"--reward.remote_url {path}: the file defines no reward_func(queries, prompts, labels); add one"
        )
    return module.reward_func


def _scalar(value: Any) -> float:
    """Return a number from a number, a list of one, or a tensor of one; raises ValueError for several."""
    if hasattr(value, "flatten"):
        value = value.flatten().tolist()
    if isinstance(value, list | tuple):
        if len(value) != 1:
            raise ValueError(f"{len(value)} values for one response")
        (value,) = value
    return float(value)
