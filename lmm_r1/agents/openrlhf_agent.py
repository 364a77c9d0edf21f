"""Agents in OpenRLHF's form: the `AgentExecutor` of a user's file, and its steps as the answers of an environment."""

from __future__ import annotations

import asyncio
import inspect
import math
import threading
from collections.abc import Coroutine, Mapping
from typing import Any, ClassVar, TypeVar

from lmm_r1.agents.environment import Answered, Environment, Episode, RawText, Turn, passable
from lmm_r1.data.messages import ImagePart, Row
from lmm_r1.errors import UserError
from lmm_r1.files.user_code import load_user_file

Outcome = TypeVar("Outcome")


class AgentLoop:
    """Runs coroutines concurrently in one thread, which ends with the process."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name=name, daemon=True).start()

    async def run(self, work: Coroutine[Any, Any, Outcome]) -> Outcome:
        """Return the result of a coroutine; may be awaited in any event loop. Cancelling this cancels the coroutine."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(_kept(work), self._loop))


async def _kept(work: Coroutine[Any, Any, Outcome]) -> Outcome:
    try:
        return await work
    except (SystemExit, KeyboardInterrupt) as error:  # in a task, either would end the loop for all others
        raise passable(error) from error


FLAG = "--train.agent_func_path"
CLASS = "AgentExecutor"
"""The name of the class in such a file."""
REWARD = "agent_reward"
"""The part of the reward that agents give."""


class AgentFault(Exception):
    """An agent returned something that OpenRLHF's form does not allow."""


def agent_class(path: str) -> type:
    """Return the `AgentExecutor` of a file; raises UserError if it has none that can be created."""
    from lmm_r1.host.openrlhf import AgentExecutorBase

    found = getattr(load_user_file(path, name="agent_module", what=FLAG), CLASS, None)
    if not isinstance(found, type) or not issubclass(found, AgentExecutorBase) or inspect.isabstract(found):
        raise UserError(
            f"{FLAG} {path}: the file defines no class {CLASS} that is an AgentExecutorBase of openrlhf.utils.agent with an "
            "execute; derive one from MultiTurnAgentExecutor, or use an environment of this project with --train.agent"
        )
    return found


def executes_itself(made: Any) -> bool:
    """Return whether a class overrides `execute`, and requests its turns itself."""
    from lmm_r1.host.openrlhf import MultiTurnAgentExecutor

    return not issubclass(made, MultiTurnAgentExecutor) or made.execute is not MultiTurnAgentExecutor.execute


def load_agent(path: str) -> StepAgent | ExecutorAgent:
    """Return the agent of a file; raises UserError if there is none, or it cannot be created."""
    made = agent_class(path)
    try:
        executor = made()
    except Exception as error:  # the user's own code, which may raise anything
        raise UserError(
            f"{FLAG} {path}: {CLASS}() cannot be created ({type(error).__name__}: {error}); it gets no arguments"
        ) from error
    if executes_itself(made):
        return ExecutorAgent(path, executor=executor)
    return StepAgent(path, instance_class=executor.agent_instance_cls)


class StepAgent(Environment):
    """An agent in OpenRLHF's form: `reset` opens an episode, `step` answers a turn with raw text."""

    name = "agent_func_path"
    rewards: ClassVar[tuple[str, ...]] = (REWARD,)
    raw: ClassVar[bool] = True

    def __init__(self, path: str, *, instance_class: type) -> None:
        self.path = path
        self.instance_class = instance_class
        self.loop = AgentLoop("agents")

    def begin(self, row: Row, *, seed: int) -> Episode:
        """Return an episode with its own agent; OpenRLHF's form has no seed."""
        return _Steps(self, label=row.answer)


class ExecutorAgent(Environment):
    """An agent that requests its turns from the engine itself, and returns complete episodes."""

    name = "agent_func_path"
    rewards: ClassVar[tuple[str, ...]] = (REWARD,)
    raw: ClassVar[bool] = True

    def __init__(self, path: str, *, executor: Any) -> None:
        self.path = path
        self.executor = executor
        self.loop = AgentLoop("agents")
        parameters = inspect.signature(executor.execute).parameters
        # OpenRLHF always passes it, but its own example of a server does not accept it.
        self.takes_images = "images" in parameters or any(
            parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()
        )

    def begin(self, row: Row, *, seed: int) -> Episode:
        raise AssertionError("an executor plays whole episodes")


class _Steps(Episode):
    def __init__(self, agent: StepAgent, *, label: str) -> None:
        self._agent = agent
        self._label = label
        self._instance: Any = None
        self._observation = ""
        self._earned = 0.0

    async def open(self, prompt: str) -> str:
        self._observation = await self._agent.loop.run(self._reset(prompt))
        return self._observation

    async def answer(self, turn: Turn) -> Answered:
        action = turn.text.removeprefix(turn.begun)
        states = {
            "observation_text": self._observation,
            "action_text": action,
            "label": self._label,
            "sampling_params": turn.parameters,
        }
        result = await self._agent.loop.run(self._instance.step(states))
        reward = number(result["rewards"], what="rewards")
        feedback = _text(result["environment_feedback"], what="environment_feedback")
        images = result.get("environment_images")
        images = [] if images is None else images if isinstance(images, (list, tuple)) else [images]
        self._earned += reward
        self._observation += action + feedback
        return Answered(
            raw=None if result["done"] else RawText(text=feedback, images=tuple(map(ImagePart, images))),
            rewards={REWARD: reward},
            score=number(result.get("scores", self._earned), what="scores"),
            logs=logs_of(result),
            parameters=result.get("sampling_params"),
        )

    async def _reset(self, prompt: str) -> str:
        instance_class: Any = self._agent.instance_class
        self._instance = instance_class.__new__(instance_class)
        # `__init__` may be a coroutine, as it is in OpenRLHF's own example.
        if inspect.isawaitable(begun := instance_class.__init__(self._instance)):
            await begun
        result = await self._instance.reset({"observation": prompt, "label": self._label})
        return _text(result["observation"], what="observation")


def logs_of(result: Mapping[str, Any]) -> dict[str, float]:
    """Return the `extra_logs` of a dict that an agent returned; for a tensor its first number, as in OpenRLHF."""
    logs = result.get("extra_logs") or {}
    return {
        str(name): number(value.flatten()[0] if hasattr(value, "flatten") else value, what=f"extra_logs[{name!r}]")
        for name, value in logs.items()
    }


def number(value: Any, *, what: str) -> float:
    """Return a number, or the single number of a tensor; raises AgentFault if it is not a finite number."""
    if hasattr(value, "item"):
        value = value.item()
    if not isinstance(value, (bool, int, float)) or not math.isfinite(value):
        raise AgentFault(f"{what} is {value!r}, not a finite number")
    return float(value)


def _text(value: Any, *, what: str) -> str:
    if not isinstance(value, str):
        raise AgentFault(f"{what} is a {type(value).__name__}, not text")
    return value
