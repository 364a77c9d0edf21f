"""Users' reward functions: the calling conventions of OpenRLHF, TRL, verl and EasyR1, and what scores by them."""

from __future__ import annotations

import asyncio
import inspect
import pickle
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

from lmm_r1.config.rewards import RewardFunction
from lmm_r1.data.messages import Row, TextPart, to_chat, to_json
from lmm_r1.errors import UserError
from lmm_r1.files.user_code import advice, failure, load_user_file
from lmm_r1.files.user_process import FunctionFailed, Served, Steps, UserProcess, called
from lmm_r1.scoring import Moment, ScoredResponse, images_of_rows
from remote_rm.verifier import Score

OPENRLHF_PARAMETERS = ("queries", "prompts", "labels")
BATCH, SEQUENTIAL = "batch", "sequential"
OVERALL = "overall"
"""The key of the reward in the result of a function of EasyR1's."""

COMPLETIONS = "completions"
"""The parameter that identifies a function of TRL's: the responses, as messages."""
SOLUTION = "solution_str"
"""The parameter that identifies a function of verl's: one response."""
_VERL_SCORE = "score"
REWARD_INPUT = "reward_input"
"""EasyR1's name for the one response that a function without a `REWARD_TYPE` is called with."""
ACCEPTED = (
    "accepted are reward_func(queries, prompts, labels) of OpenRLHF; f(responses, labels) and other lists of "
    "docs/reward_functions.md; f(completions, **kwargs) of TRL; compute_score(data_source, solution_str, ground_truth, "
    "extra_info) of verl; compute_score(reward_inputs) or compute_score(reward_input) of EasyR1"
)
"""The signatures of reward functions, for messages."""

_OWN_PARAMETERS = (*OPENRLHF_PARAMETERS, "responses", "response_lengths", "images", "image_scales")
_MOMENT_PARAMETERS = tuple(item.name for item in fields(Moment))
LISTS = (*_OWN_PARAMETERS, "datasources")
"""Parameter names for which a function is given a list with one entry per response."""
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
# What reading any kind of result may raise, including for numbers too large for a float and tensors of several values.
_UNREADABLE = (ValueError, KeyError, IndexError, TypeError, AttributeError, OverflowError, RuntimeError)


class FunctionProtocol(ABC):
    """A function with its settings and its parameters: how it is called, and how its result is read."""

    columns: frozenset[str] = frozenset()
    """The columns that every row must have."""

    def __init__(
        self, function: Callable[..., Any], *, name: str, settings: RewardFunction, calls_at_once: int | None
    ) -> None:
        """Args: calls_at_once: how many threads may call it at a time; None calls it in the main thread."""
        self.calls_at_once = calls_at_once
        self._function = function
        self.name = name
        self._settings = settings
        self._parameters = list(inspect.signature(function).parameters.values())
        self._takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in self._parameters)

    @abstractmethod
    def __call__(self, batch: Sequence[ScoredResponse]) -> Steps:
        """Return one `Score` per response, in their order; yields what the function awaits."""

    def _required_of(self, parameters: Sequence[inspect.Parameter]) -> set[str]:
        """Return the parameters without a default and without a value in the settings."""
        return {one.name for one in parameters if one.default is one.empty} - self._settings.arguments.keys()

    def _unusable(self, reason: object, reply: object, *, wanted: str) -> UserError:
        return UserError(
            f"{self._settings.told}: {self.name} gave no usable reward ({reason}) in {str(reply)[:200]}; {wanted}"
        )


class OpenRLHFFunction(FunctionProtocol):
    """`reward_func(queries, prompts, labels)`, and further parameters by name.

    A function without further parameters is called as by OpenRLHF: with one response at a time and the prompt's text. With
    further parameters it gets all responses to a prompt at once, and the prompt as messages in JSON. With
    `positional=False` it gets only what it has parameters for: `right(responses, labels)`.
    """

    def __init__(self, function: Callable[..., Any], *, positional: bool = True, **settings: Any) -> None:
        super().__init__(function, **settings)
        try:
            inspect.signature(function).bind_partial(*OPENRLHF_PARAMETERS if positional else ())
        except TypeError as error:
            raise UserError(
                f"{self._settings.told}: {self.name}{inspect.signature(function)} does not take queries, prompts and "
                f"labels; {ACCEPTED}"
            ) from error
        self._positional = positional
        named = self._parameters[len(OPENRLHF_PARAMETERS) :] if positional else self._parameters
        more = [parameter for parameter in named if parameter.kind not in _VARIADIC]
        self._optional = {parameter.name for parameter in more if parameter.default is not parameter.empty}
        self._required = self._required_of(more)
        self.columns = frozenset(self._required.difference(LISTS, _MOMENT_PARAMETERS))
        self._one_at_a_time = positional and not more

    def __call__(self, batch: Sequence[ScoredResponse]) -> Steps:
        scores: list[Score] = []
        for part in [[item] for item in batch] if self._one_at_a_time else [batch]:
            scores += yield from self._scored(part)
        return scores

    def _scored(self, batch: Sequence[ScoredResponse]) -> Steps:
        named = self._named(batch)
        first = [named.pop(name) for name in OPENRLHF_PARAMETERS] if self._positional else []
        reply = yield from called(self._function, *first, **named)
        try:
            return self._scores(reply, count=len(batch))
        except _UNREADABLE as error:
            wanted = (
                f"return {{'rewards': [...]}} with one number for each of the {len(batch)} responses, and the same for "
                "scores and extra_logs"
            )
            raise self._unusable(f"{type(error).__name__}: {error}", reply, wanted=wanted) from error

    def _named(self, batch: Sequence[ScoredResponse]) -> dict[str, object]:
        rows = [item.row for item in batch]
        own: dict[str, list[Any]] = {
            "queries": [item.query for item in batch],
            "prompts": [item.prompt if self._one_at_a_time else to_json(item.row.messages) for item in batch],
            "labels": [row.answer for row in rows],
            "responses": [item.response for item in batch],
            "response_lengths": [item.num_tokens for item in batch],
            "images": images_of_rows(rows),
            "image_scales": [item.image_scales for item in batch],
        }
        columns = [_available(row) for row in rows]
        names = {name: None for available in columns for name in available}
        asked = self._required | self._optional | set(OPENRLHF_PARAMETERS if self._positional else ())
        further: dict[str, object] = {
            name: own.get(name) or [available.get(name) for available in columns]
            for name in names
            if self._takes_all or name in asked
        }
        # Values that are the same for all responses are not lists; outside of a run, there are none.
        moment = dict.fromkeys(self._required) if batch[0].moment is None else asdict(batch[0].moment)
        same = {
            name: moment[name] for name in _MOMENT_PARAMETERS if name in moment and (self._takes_all or name in asked)
        }
        return {**further, **same, **self._settings.arguments}

    def _scores(self, reply: Any, *, count: int) -> list[Score]:
        # OpenRLHF before 0.8 expected only the rewards.
        if not isinstance(reply, Mapping):
            reply = {"rewards": _numbers(reply, count=count)}
        rewards = _numbers(reply["rewards"], count=count)
        logs = {
            str(name): _numbers(value, count=count, of=f"extra_logs[{name!r}]: ")
            for name, value in (reply.get("extra_logs") or {}).items()
        }
        parts = [{name: values[index] for name, values in logs.items()} for index in range(count)]
        key = self._settings.score_key
        if key is not None and key not in logs:
            raise KeyError(f"--reward.score_key {key} is not in extra_logs: {', '.join(logs) or 'empty'}")
        scores = _numbers(reply.get("scores", rewards), count=count, of="scores: ") if key is None else logs[key]
        return [
            Score.of_reply(reward=reward, score=score, extra_logs=own)
            for reward, score, own in zip(rewards, scores, parts, strict=True)
        ]


class EasyR1Function(FunctionProtocol):
    """`compute_score` for a list of dicts, or for one (`REWARD_TYPE = "sequential"`); or for responses and ground truths."""

    def __init__(self, function: Callable[..., Any], *, name: str, settings: RewardFunction, kind: object) -> None:
        if kind not in (BATCH, SEQUENTIAL):
            raise UserError(f"{settings.told}: REWARD_TYPE {kind!r} must be {BATCH!r} or {SEQUENTIAL!r}")
        super().__init__(function, name=name, settings=settings, calls_at_once=None)
        self._kind = kind
        keywords = (*_VARIADIC, inspect.Parameter.KEYWORD_ONLY)
        texts = self._required_of([parameter for parameter in self._parameters if parameter.kind not in keywords])
        if len(texts) not in (1, 2):
            raise UserError(
                f"{settings.told}: {name}{inspect.signature(function)} has the signature of no known reward function; "
                f"{ACCEPTED}. Constants for other parameters come from --reward.function_kwargs"
            )
        self._takes_texts = len(texts) == 2

    def __call__(self, batch: Sequence[ScoredResponse]) -> Steps:
        replies: list[Any] = []
        for arguments in self._calls(batch):
            replies += yield from self._replies(arguments)
        if len(replies) != len(batch):
            raise self._refusal(f"{len(replies)} scores for {len(batch)} responses", replies)
        scores = [self._score(reply) for reply in replies]
        for reply, score in zip(replies, scores, strict=True):
            if differing := sorted(score.parts.keys() ^ scores[0].parts.keys()):
                raise self._refusal(f"{', '.join(differing)} not for every response", reply)
        return scores

    def _calls(self, batch: Sequence[ScoredResponse]) -> Iterator[tuple[object, ...]]:
        """Yield the positional arguments of each call."""
        inputs = [
            {
                **item.row.columns,
                "response": item.response,
                "response_length": item.num_tokens,
                "ground_truth": item.row.answer,
                "prompt": to_json(item.row.messages),
                "images": own,
                **({} if item.moment is None else asdict(item.moment)),
            }
            for item, own in zip(batch, images_of_rows([item.row for item in batch]), strict=True)
        ]
        texts = [(item.response, item.row.answer) for item in batch]
        if self._kind == SEQUENTIAL:
            yield from texts if self._takes_texts else ((one,) for one in inputs)
        elif self._takes_texts:
            yield [response for response, _ in texts], [truth for _, truth in texts]
        else:
            yield (inputs,)

    def _replies(self, arguments: tuple[object, ...]) -> Steps:
        reply = yield from called(self._function, *arguments, **self._settings.arguments)
        if self._kind == SEQUENTIAL:
            return [reply]
        if not isinstance(reply, (list, tuple)):
            raise self._refusal("no list of scores", reply)
        return list(reply)

    def _score(self, reply: Any) -> Score:
        key = self._settings.score_key
        try:
            values = {str(name): float(value) for name, value in reply.items()}
            reward = values.pop(OVERALL)
            score = reward if key in (None, OVERALL) else values[str(key)]
        except _UNREADABLE as error:
            raise self._refusal(f"{type(error).__name__}: {error}", reply) from error
        return Score.of_reply(reward=reward, score=score, extra_logs=values)

    def _refusal(self, reason: str, reply: object) -> UserError:
        key = f", and {self._settings.score_key} for --reward.score_key" if self._settings.score_key else ""
        wanted = (
            f"with REWARD_TYPE {self._kind!r} return a dict of numbers with {OVERALL!r}{key} for each response, with the "
            "same names in all"
        )
        return self._unusable(reason, reply, wanted=wanted)


def _available(row: Row) -> dict[str, Any]:
    """Return a row's values for parameters, by name; our own names hide columns of the same name."""
    columns = {name: value for name, value in row.columns.items() if name not in _MOMENT_PARAMETERS}
    return {**columns, **dict.fromkeys(_OWN_PARAMETERS), "datasources": row.datasource}


def _numbers(values: Any, *, count: int, of: str = "") -> list[float]:
    """Return one number per response from numbers, lists or tensors; raises ValueError for another count.

    Args:
        of: the prefix of that error.
    """
    if isinstance(values, Mapping):
        raise TypeError(f"{of}a dict is not a number")
    if hasattr(values, "flatten"):
        values = values.flatten().tolist()
    listed = [values] if isinstance(values, (int, float, str)) else list(values)
    if len(listed) != count:
        raise ValueError(f"{of}{len(listed)} values for {'one response' if count == 1 else f'{count} responses'}")
    return [float(item.item() if hasattr(item, "item") else item) for item in listed]


class _NamedFunction(FunctionProtocol):
    """A function that is called with keyword arguments."""

    own_names: ClassVar[frozenset[str]]
    """Parameters that are not columns."""

    def __init__(self, function: Callable[..., Any], **settings: Any) -> None:
        super().__init__(function, **settings)
        named = [parameter for parameter in self._parameters if parameter.kind not in _VARIADIC]
        self._names = {parameter.name for parameter in named}
        self._required = self._required_of(named)
        self.columns = frozenset(self._required - self.own_names)

    def _call(self, values: Mapping[str, object]) -> Steps:
        given = {name: value for name, value in values.items() if self._takes_all or name in self._names}
        return called(self._function, **{**given, **self._settings.arguments})


@dataclass(frozen=True, kw_only=True)
class TRLTrainerState:
    """What functions of TRL get of the state of a training."""

    global_step: int
    """The number of steps before the one that trains on the responses."""


class TRLFunction(_NamedFunction):
    """`accuracy(completions, solution, **kwargs)`: all responses to a prompt, and columns by name.

    As in TRL, prompts and responses are text for a row whose `prompt` is text, and messages for other rows.
    """

    own_names = frozenset(("prompts", COMPLETIONS, "completion_ids", "trainer_state", "images"))

    def __call__(self, batch: Sequence[ScoredResponse]) -> Steps:
        rows = [item.row for item in batch]
        values: dict[str, object] = {name: [row.columns.get(name) for row in rows] for name in rows[0].columns}
        values |= {
            "prompts": [
                (
                    "".join(part.text for part in row.messages[-1].parts if isinstance(part, TextPart))
                    if row.text_prompt
                    else to_chat(row.messages)
                )
                for row in rows
            ],
            COMPLETIONS: [
                item.response if item.row.text_prompt else [{"role": "assistant", "content": item.response}]
                for item in batch
            ],
            "completion_ids": [list(item.token_ids) for item in batch],
            "images": images_of_rows(rows),
        }
        if (moment := batch[0].moment) is not None or "trainer_state" in self._required:
            values["trainer_state"] = TRLTrainerState(global_step=moment.step - 1 if moment is not None else 0)
        reply = yield from self._call(values)
        wanted = f"return a list with one number for each of the {len(batch)} completions"
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

    def __call__(self, batch: Sequence[ScoredResponse]) -> Steps:
        scores = []
        for item in batch:
            scores.append((yield from self._scored(item)))
        return scores

    def _scored(self, item: ScoredResponse) -> Steps:
        row = item.row
        judged = row.columns.get("reward_model")
        values = {
            **row.columns,
            "data_source": row.datasource,
            SOLUTION: item.response,
            "ground_truth": judged.get("ground_truth", row.answer) if isinstance(judged, Mapping) else row.answer,
            "extra_info": row.columns.get("extra_info"),
        }
        reply = yield from self._call(values)
        try:
            if not isinstance(reply, Mapping):
                return Score.of_reply(reward=float(reply), score=float(reply), extra_logs={})
            reward = float(reply[_VERL_SCORE])
            score = float(reply.get("acc", reward))
            # Its other values may be text, for verl's own table of samples.
            logs = {str(name): float(value) for name, value in reply.items() if isinstance(value, bool | int | float)}
        except (TypeError, ValueError, KeyError, OverflowError) as error:
            raise self._unusable(error, reply, wanted="return a number, or a dict with one as `score`") from error
        del logs[_VERL_SCORE]
        return Score.of_reply(reward=reward, score=score, extra_logs=logs)


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
