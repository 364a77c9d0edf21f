"""Environments, which answer the turns of a policy: their interface, environments by name, and deadlines for their calls."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import queue
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from lmm_r1 import dotted
from lmm_r1.config.resolve import check_thought
from lmm_r1.config.shared import ThoughtConfig
from lmm_r1.data.messages import ImagePart, Message, Part, Row, TextPart
from lmm_r1.data.sample import CallOutcome
from lmm_r1.errors import UserError
from lmm_r1.files.user_code import load_user_file

if TYPE_CHECKING:
    from vllm import SamplingParams


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One turn of the policy."""

    text: str
    """The generated text without the end token, preceded by the text with which the turn begins."""
    number: int
    """Index of the turn in the episode, from 0."""
    ended: bool
    """Whether the policy ended it itself; False if it reached its limit of tokens."""
    begun: str = ""
    """The beginning of the text, which the policy has not generated."""
    parameters: SamplingParams | None = None
    """The sampling parameters, for environments with raw text (`Environment.raw`)."""


@dataclass(frozen=True, kw_only=True)
class RawText:
    """Text that is tokenized unchanged, including the special tokens of the chat template.

    It is tokenized once, by itself, and appended to the ids so far. It must close the policy's turn and open the next one.
    """

    text: str
    """Images are marked as the model's chat template marks them."""
    images: tuple[ImagePart, ...] = ()
    """The images, in the order of their marks."""


@dataclass(frozen=True, kw_only=True)
class TurnOptions:
    """How one turn of the policy is sampled; unset options are those of the environment and the run.

    Raises UserError for options that contradict one another.
    """

    stops: tuple[str, ...] | None = None
    """Texts that end the turn, and belong to it; None uses the environment's."""
    max_tokens: int | None = None
    """Longest turn in tokens, within the run's limits; None uses the run's."""
    thought: ThoughtConfig | None = None
    """Budget forcing of this turn; None uses `--agent.thought.*`."""

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 1:
            raise UserError(f"TurnOptions: max_tokens {self.max_tokens} must be at least 1")
        if self.thought is not None:
            check_thought(self.thought, prefix="TurnOptions: thought.")


@dataclass(frozen=True, kw_only=True)
class Answered:
    """An environment's answer to one turn."""

    shown: tuple[Part, ...] = ()
    """The content of the next message to the policy; empty if the episode is over."""
    role: str = "user"
    """The role of that message."""
    prefill: str = ""
    """The beginning of the policy's next turn, which the policy does not generate."""
    options: TurnOptions = field(default_factory=TurnOptions)
    """How the policy's next turn is sampled."""
    raw: RawText | None = None
    """All text between this turn and the next, instead of `shown`, role and prefill."""
    parameters: SamplingParams | None = None
    """Sampling parameters of later turns, changed as training needs; None keeps the current ones."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Named parts of the reward for this turn; they are summed over an episode."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """Counts that are logged but not rewarded: tool calls, malformed calls, steps."""
    calls: tuple[CallOutcome, ...] = ()
    """The outcomes of the calls in the turn, for people."""
    logs: Mapping[str, float] = field(default_factory=dict)
    """Values logged as `agent/NAME`, under undeclared names; the last ones of an episode count."""
    score: float | None = None
    """How correct the episode was so far, for filtering groups; None uses its rewards."""

    @property
    def is_over(self) -> bool:
        """Whether the episode is over."""
        return not self.shown and self.raw is None


class Episode(ABC):
    """The state of an environment for one sample."""

    async def open(self, prompt: str) -> str:
        """Return the text with which a raw environment begins: the row as rendered by the chat template, or another text.

        It must contain the marks of the row's images. An exception means that the environment is broken, as in `answer`.
        """
        return prompt

    @abstractmethod
    async def answer(self, turn: Turn) -> Answered:
        """Return the environment's answer to a turn.

        Malformed output of a policy is not an error: answer and count it. An exception means that the environment is
        broken; it ends the episode, is logged with the row, and is counted.
        """

    def branch(self) -> Episode:
        """Return an independent copy in the same state; its environment and its row stay the same objects.

        Override it for an episode that holds a process or a connection, which cannot be copied.
        """
        return deepcopy(self, {id(value): value for value in vars(self).values() if isinstance(value, Row)})

    async def close(self) -> None:  # noqa: B027 - few episodes hold anything
        """Release the episode's resources; called once, however it has ended."""


class Environment(ABC):
    """Begins episodes; one instance serves all rows of a run, from several tasks of one event loop."""

    name: ClassVar[str]
    """Its name on the command line: `crop`."""
    stops: ClassVar[tuple[str, ...]] = ()
    """Texts that end a turn when the policy writes them; they belong to the turn."""
    rewards: ClassVar[tuple[str, ...]] = ()
    """The names of all parts of the reward; missing parts are 0."""
    counts: ClassVar[tuple[str, ...]] = ()
    """The names of all counts."""
    raw: ClassVar[bool] = False
    """Whether its episodes are raw text: they `open`, and may begin with rows of plain text."""
    waits: ClassVar[bool] = False
    """Whether `shown_row` may block; it then runs in a thread, within the deadline of an answer."""

    @property
    def call_tags(self) -> tuple[str, ...]:
        """The tags of its tool calls, for `turn_format`; none by default."""
        return ()

    def derived(self, counts: Mapping[str, float]) -> Mapping[str, float]:
        """Return further values to log, computed from an episode's counts; every episode must have the same names.

        Like counts, they do not affect the reward unless `--reward.part_weights` names them.
        """
        return {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Environment:
        # Environments have no state of an episode, so copies of an episode share them.
        return self

    def shown_row(self, row: Row) -> Row:
        """Return the row as shown to the policy, with the environment's instructions; unchanged by default."""
        return row

    def first_turn(self, row: Row) -> TurnOptions:
        """Return how the first turn of an episode is sampled; the row that is shown may begin it (`Row.prefill`)."""
        return TurnOptions()

    @abstractmethod
    def begin(self, row: Row, *, seed: int) -> Episode:
        """Return a new episode.

        Args:
            row: the original row, not the one that is shown.
            seed: differs between the samples of a group, and is the same in a resumed run.
        """


def with_parts(row: Row, parts: tuple[Part, ...]) -> Row:
    """Return the row with parts added to its last user turn; raises UserError if it has none."""
    places = [place for place, message in enumerate(row.messages) if message.role == "user"]
    if not places:
        raise UserError(
            f"{row.location}: the prompt has no user turn, to which this environment adds its instructions; write one"
        )
    last = row.messages[places[-1]]
    changed = replace(last, parts=last.parts + parts)
    return replace(row, messages=(*row.messages[: places[-1]], changed, *row.messages[places[-1] + 1 :]))


def demonstration_of(
    environment: Environment, row: Row, turns: Sequence[str], *, seed: int = 0
) -> tuple[Message, ...]:
    """Return the messages of an episode with the given turns of the policy, as in a rollout.

    Args:
        turns: the policy's turns, each with its prefill.
        seed: the episode's seed.

    Raises:
        UserError: the episode ends before the last turn or continues after it, or a turn lacks its prefill.
    """
    return _loop().run_until_complete(_played(environment, row, turns, seed=seed))


# One for all demonstrations, so that an environment's clients stay usable.
_loop = cache(asyncio.new_event_loop)


async def _played(environment: Environment, row: Row, turns: Sequence[str], *, seed: int) -> tuple[Message, ...]:
    messages = list(environment.shown_row(row).messages)
    place = f"{row.location}, environment {environment.name}"
    episode = environment.begin(row, seed=seed)
    answered = Answered()
    try:
        for number, text in enumerate(turns):
            if number:
                if answered.is_over:
                    raise UserError(f"{place}: the episode is over with turn {number} of the {len(turns)} worked ones")
                messages.append(Message(role=answered.role, parts=tuple(answered.shown)))
            if not text.startswith(answered.prefill):
                raise UserError(
                    f"{place}: turn {number + 1} must begin with {answered.prefill!r}, the prefill of the environment"
                )
            messages.append(Message(role="assistant", parts=(TextPart(text),)))
            answered = await episode.answer(Turn(text=text, number=number, ended=True))
    finally:
        await episode.close()
    if not answered.is_over:
        raise UserError(f"{place}: the episode continues after the {len(turns)} worked turns")
    return tuple(messages)


@dataclass(frozen=True, kw_only=True)
class SingleTurn(Environment):
    """One turn over any row, which `--reward.remote_url` judges."""

    name: ClassVar[str] = "single"

    def begin(self, row: Row, *, seed: int) -> Episode:
        return _Once()


class _Once(Episode):
    async def answer(self, turn: Turn) -> Answered:
        return Answered()


# Module and class; imported on use.
ENVIRONMENTS: dict[str, str] = {
    "crop": "lmm_r1.agents.tool_environment:CropEnvironment",
    "tool": "lmm_r1.agents.tool_environment:ToolEnvironment",
    "sokoban": "lmm_r1.agents.sokoban:SokobanSteps",
    "sokoban-plan": "lmm_r1.agents.sokoban:SokobanPlan",
    "gymnasium": "lmm_r1.agents.gymnasium:GymnasiumEnvironment",
    "single": "lmm_r1.agents.environment:SingleTurn",
}
TOOLS = "TOOLS"
"""The variable with the tools of a file without an environment."""
_FILE = re.compile(r"(?P<path>.+\.py)(?::(?P<name>\w+))?")


def load_environment(source: str, *, options: Mapping[str, Any] | None = None) -> Environment:
    """Return an environment by its name, or from a user's file.

    Args:
        source: a name; `FILE.py`, which defines one subclass or instance of `Environment`, or a list `TOOLS` of functions;
            or `FILE.py:NAME`, a class or an instance in it.
        options: arguments of the class's constructor.

    Raises:
        UserError: there is no such environment, or it cannot be created with these options.
    """
    options = options or {}
    if file := _FILE.fullmatch(source):
        return _from_file(file["path"], name=file["name"], options=options, source=source)
    if source not in ENVIRONMENTS:
        near = dotted.nearest(source, known=ENVIRONMENTS)
        hint = f"did you mean {near}? " if near else ""
        raise UserError(
            f"no environment {source!r}; {hint}Known are {', '.join(ENVIRONMENTS)}, and FILE.py with your own"
        )
    return _made(_shipped(source), options=options, source=source)


def _shipped(name: str) -> Callable[..., Environment]:
    module, _, class_name = ENVIRONMENTS[name].partition(":")
    return getattr(importlib.import_module(module), class_name)


def _made(made: Callable[..., Environment], *, options: Mapping[str, Any], source: str) -> Environment:
    known = list(inspect.signature(made).parameters)
    if unknown := [name for name in options if name not in known]:
        raise UserError(f"environment {source}: no option {unknown[0]!r}; known are {', '.join(known) or 'none'}")
    try:
        return made(**options)
    except UserError as error:
        raise UserError(f"environment {source}: {error}") from error
    except Exception as error:  # the user's own code, which may raise anything
        raise UserError(
            f"environment {source}: it cannot be created with the options {dict(options)} ({type(error).__name__}: {error})"
        ) from error


def _from_file(path: str, *, name: str | None, options: Mapping[str, Any], source: str) -> Environment:
    module = load_user_file(path, name=f"agent_file_{Path(path).stem}", what="environment")
    if name is None:
        found = _candidates(module)
        if not found and isinstance(getattr(module, TOOLS, None), (list, tuple)):
            return _made(partial(_shipped("tool"), getattr(module, TOOLS)), options=options, source=source)
        if not found:
            raise UserError(
                f"{path}: the file defines no Environment, and no list TOOLS of functions; subclass "
                "lmm_r1.agents.environment.Environment"
            )
        if len(found) > 1:
            raise UserError(f"{path}: the file defines {', '.join(found)}; say which: {path}:{found[0]}")
        name = found[0]
    chosen = getattr(module, name, None)
    if isinstance(chosen, Environment):
        if options:
            raise UserError(f"{path}: {name} is an instance and takes no options; name a class instead")
        return chosen
    if not isinstance(chosen, type) or not issubclass(chosen, Environment):
        raise UserError(f"{path}: {name} is not an Environment; subclass lmm_r1.agents.environment.Environment")
    return _made(chosen, options=options, source=source)


def _candidates(module: ModuleType) -> list[str]:
    """Return the names of a file's own environments: the instances, or else the classes."""
    values = vars(module).items()
    if made := [name for name, value in values if isinstance(value, Environment)]:
        return made
    return [
        name
        for name, value in values
        if isinstance(value, type)
        and issubclass(value, Environment)
        and value.__module__ == module.__name__
        and not inspect.isabstract(value)
    ]


Outcome = TypeVar("Outcome")


class DeadlinePassed(Exception):
    """Some work did not finish in time."""


def start_thread(function: Callable[[], Outcome], *, name: str) -> tuple[asyncio.Future[Outcome], threading.Thread]:
    """Run a function in its own thread and return a future of its result, and the thread.

    A process can end while such a thread runs; threads of a pool would block its exit.
    """
    answer: Future[Outcome] = Future()
    thread = threading.Thread(target=_run_for, args=(answer, function), name=name, daemon=True)
    thread.start()
    return asyncio.wrap_future(answer), thread


class OwnThread:
    """Runs functions one after the other in one thread, for libraries that require that.

    The thread starts with the first function, and ends with `end` or with the process.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._waiting: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def run(self, function: Callable[[], Outcome]) -> asyncio.Future[Outcome]:
        """Return a future of the function's result; functions run in order."""
        answer: Future[Outcome] = Future()
        self._waiting.put((answer, function))
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
        return asyncio.wrap_future(answer)

    def end(self) -> None:
        """End the thread after its last function, without waiting for it."""
        self._waiting.put(None)

    def _work(self) -> None:
        while (task := self._waiting.get()) is not None:
            _run_for(*task)


def _run_for(answer: Future[Outcome], function: Callable[[], Outcome]) -> None:
    if not answer.set_running_or_notify_cancel():
        return
    try:
        answer.set_result(function())
    except BaseException as error:  # whatever a user's code raises, SystemExit included
        answer.set_exception(passable(error))


def passable(error: BaseException) -> Exception:
    """Return an error that an event loop can carry: neither SystemExit nor StopIteration."""
    if isinstance(error, Exception) and not isinstance(error, (StopIteration, StopAsyncIteration)):
        return error
    return RuntimeError(f"{type(error).__name__}: {error}")


async def within(deadline_s: float, work: Awaitable[Outcome]) -> Outcome:
    """Return the result of some work.

    Raises:
        DeadlinePassed: it did not finish within the deadline. It is cancelled, but a task that ignores this is abandoned.
        RuntimeError: it has cancelled itself.
    """
    task = asyncio.ensure_future(work)
    # Otherwise asyncio reports the error of an abandoned task.
    task.add_done_callback(lambda task: task.cancelled() or task.exception())
    try:
        done, _ = await asyncio.wait({task}, timeout=deadline_s)
    finally:
        task.cancel()
    if not done:
        raise DeadlinePassed
    if task.cancelled():
        raise RuntimeError("it was cancelled")
    return task.result()
