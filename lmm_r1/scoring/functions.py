"""Rewards by a user's Python function: OpenRLHF's `reward_func`, or EasyR1's `compute_score`, given whole groups."""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, overload

from PIL import Image

from lmm_r1.config.reward_source import RewardFunction
from lmm_r1.data.images import load_image
from lmm_r1.data.messages import Row, images_of, to_json
from lmm_r1.errors import UserError
from remote_rm.verifier import Score

OPENRLHF_PARAMETERS = ("queries", "prompts", "labels")
OPENRLHF_NAME, EASYR1_NAME = "reward_func", "compute_score"
BATCH, SEQUENTIAL = "batch", "sequential"
OVERALL = "overall"
"""The reward, in what a function of EasyR1's returns."""


@dataclass(frozen=True, kw_only=True)
class ScoredResponse:
    """One response as a reward function is given it."""

    row: Row
    query: str
    """Prompt and response as the model reads and writes them, special tokens included."""
    response: str
    """The response's text, without its end token."""
    num_tokens: int
    """Of the response; the end token counts."""


class RowImages(Sequence[Image.Image]):
    """The images of a row, each decoded when it is first looked at."""

    def __init__(self, row: Row) -> None:
        self._parts = images_of(row.messages)
        self._location = row.location
        self._decoded: dict[int, Image.Image] = {}

    def __len__(self) -> int:
        return len(self._parts)

    @overload
    def __getitem__(self, index: int) -> Image.Image: ...

    @overload
    def __getitem__(self, index: slice) -> list[Image.Image]: ...

    def __getitem__(self, index: int | slice) -> Image.Image | list[Image.Image]:
        places = range(len(self._parts))[index]
        if isinstance(places, range):
            return [self[place] for place in places]
        if places not in self._decoded:
            self._decoded[places] = load_image(self._parts[places], location=self._location)
        return self._decoded[places]


class RewardProtocol(Protocol):
    """How one kind of function is called, and what it returns."""

    def check_row(self, row: Row) -> None:
        """Raise UserError for a row that lacks a column that the function asks for."""

    def __call__(self, batch: Sequence[ScoredResponse]) -> list[Score]: ...


class FunctionScorer:
    """A function from a file, run in a thread: one call for all responses to one prompt."""

    def __init__(self, function: RewardFunction) -> None:
        """Import the file; raises UserError where it cannot be used."""
        self.path = function.path
        self._protocol = _protocol(function)

    def check_rows(self, rows: Sequence[Row]) -> None:
        """Raise UserError for the first row that lacks a column that the function asks for."""
        for row in rows:
            self._protocol.check_row(row)

    async def rewards(self, batch: Sequence[ScoredResponse]) -> list[Score]:
        """Return what the function says of the responses, in their order; its own errors are not caught.

        Raises:
            UserError: it returns something else than a reward for each response.
        """
        return await asyncio.to_thread(self._protocol, batch)

    async def check_health(self) -> None:
        """Nothing can be down: the file was loaded."""

    async def close(self) -> None:
        """Nothing is held open."""


def _protocol(function: RewardFunction) -> RewardProtocol:
    module = _loaded(function.path)
    known = (OPENRLHF_NAME, EASYR1_NAME) if function.name is None else (function.name,)
    name = next((name for name in known if callable(getattr(module, name, None))), None)
    if name is None:
        wanted = function.name or f"{OPENRLHF_NAME}({', '.join(OPENRLHF_PARAMETERS)}) and no {EASYR1_NAME}"
        raise UserError(
            f"--reward.remote_url {function.path}: the file defines no {wanted}; add one, or name another function behind "
            f"a colon, as in {function.path}:NAME"
        )
    called = getattr(module, name)
    first = tuple(inspect.signature(called).parameters)[: len(OPENRLHF_PARAMETERS)]
    if name == OPENRLHF_NAME or first == OPENRLHF_PARAMETERS:
        return _OpenRLHF(called, name=name, settings=function)
    return _EasyR1(called, name=name, settings=function, kind=getattr(module, "REWARD_TYPE", BATCH))


def _loaded(path: str) -> ModuleType:
    if not Path(path).is_file():
        raise UserError(f"--reward.remote_url {path}: no such file; check the path")
    spec = importlib.util.spec_from_file_location("reward_function", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and pickles of the file's own look their module up by its name.
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # the user's own code, which may raise anything
        raise UserError(
            f"--reward.remote_url {path}: the file cannot be imported ({type(error).__name__}: {error}); correct it"
        ) from error
    return module


class _OpenRLHF:
    """`reward_func(queries, prompts, labels)`, with whatever else it has parameters for."""

    def __init__(self, function: Callable[..., Any], *, name: str, settings: RewardFunction) -> None:
        self._function = function
        self._name = name
        self._settings = settings
        parameters = list(inspect.signature(function).parameters.values())
        self._takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        more = [parameter for parameter in parameters[3:] if parameter.kind not in _VARIADIC]
        self._optional = {parameter.name for parameter in more if parameter.default is not parameter.empty}
        self._required = {parameter.name for parameter in more} - self._optional - settings.arguments.keys()

    def check_row(self, row: Row) -> None:
        if missing := sorted(self._required - _available(row).keys()):
            found = ", ".join(row.columns) or "none"
            raise UserError(
                f"{row.location}: {self._name} in --reward.remote_url {self._settings.path} asks for "
                f"{', '.join(missing)}, which the row has no column for (found: {found})"
            )

    def __call__(self, batch: Sequence[ScoredResponse]) -> list[Score]:
        reply = self._function(
            [item.query for item in batch],
            [to_json(item.row.messages) for item in batch],
            [item.row.answer for item in batch],
            **self._further(batch),
        )
        try:
            return self._scores(reply, count=len(batch))
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise UserError(
                f"--reward.remote_url {self._settings.path}: {self._name} gave no usable reward "
                f"({type(error).__name__}: {error}) in {str(reply)[:200]}; return {{'rewards': [...]}} with one number "
                f"for each of the {len(batch)} responses, and scores and extra_logs alike"
            ) from error

    def _further(self, batch: Sequence[ScoredResponse]) -> dict[str, object]:
        rows = [item.row for item in batch]
        for row in rows:
            self.check_row(row)
        own: dict[str, list[Any]] = {
            "responses": [item.response for item in batch],
            "response_lengths": [item.num_tokens for item in batch],
            "images": _images(rows),
        }
        columns = [_available(row) for row in rows]
        names = {name: None for available in columns for name in available}
        wanted = [name for name in names if self._takes_all or name in self._required | self._optional]
        further = {name: own.get(name) or [available.get(name) for available in columns] for name in wanted}
        for name in OPENRLHF_PARAMETERS:
            further.pop(name, None)
        return {**further, **self._settings.arguments}

    def _scores(self, reply: Any, *, count: int) -> list[Score]:
        # Versions of OpenRLHF before 0.8 took the rewards alone.
        if not isinstance(reply, Mapping):
            reply = {"rewards": _numbers(reply, count=count)}
        rewards = _numbers(reply["rewards"], count=count)
        logs = {name: _numbers(value, count=count) for name, value in (reply.get("extra_logs") or {}).items()}
        parts = [{name: values[index] for name, values in logs.items()} for index in range(count)]
        key = self._settings.score_key
        if key is not None and key not in logs:
            raise KeyError(f"--reward.score_key {key} is not in extra_logs: {', '.join(logs) or 'empty'}")
        scores = _numbers(reply.get("scores", rewards), count=count) if key is None else logs[key]
        return [
            Score.of_reply(reward=reward, score=score, extra_logs=own)
            for reward, score, own in zip(rewards, scores, parts, strict=True)
        ]


class _EasyR1:
    """`compute_score`: of a list of dicts, or of one (`REWARD_TYPE = "sequential"`); or of responses and ground truths."""

    def __init__(self, function: Callable[..., Any], *, name: str, settings: RewardFunction, kind: object) -> None:
        if kind not in (BATCH, SEQUENTIAL):
            raise UserError(
                f"--reward.remote_url {settings.path}: REWARD_TYPE {kind!r} must be {BATCH!r} or {SEQUENTIAL!r}"
            )
        self._function = function
        self._name = name
        self._settings = settings
        self._kind = kind
        given = settings.arguments.keys()
        parameters = inspect.signature(function).parameters.values()
        open_parameters = [
            parameter
            for parameter in parameters
            if parameter.kind not in (*_VARIADIC, inspect.Parameter.KEYWORD_ONLY)
            and parameter.default is parameter.empty
            and parameter.name not in given
        ]
        if len(open_parameters) not in (1, 2):
            raise UserError(
                f"--reward.remote_url {settings.path}: {name}{inspect.signature(function)} takes neither a reward input "
                "nor a response and its ground truth; give its other arguments with --reward.function_kwargs"
            )
        self._takes_texts = len(open_parameters) == 2
        # Such a function is never called twice at once where it comes from.
        self._one_at_a_time = threading.Lock()

    def check_row(self, row: Row) -> None:
        """All columns are in its inputs, and it is not known which it reads."""

    def __call__(self, batch: Sequence[ScoredResponse]) -> list[Score]:
        with self._one_at_a_time:
            given = list(self._calls(batch))
            replies: Any = [reply for arguments in given for reply in self._replies(arguments)]
        if len(replies) != len(batch):
            raise self._unusable(f"{len(replies)} scores for {len(batch)} responses", replies)
        return [self._score(reply) for reply in replies]

    def _calls(self, batch: Sequence[ScoredResponse]) -> Iterator[tuple[object, ...]]:
        """Yield the positional arguments of each call."""
        images = _images([item.row for item in batch])
        inputs = [
            {
                **item.row.columns,
                "response": item.response,
                "response_length": item.num_tokens,
                "ground_truth": item.row.answer,
                "prompt": to_json(item.row.messages),
                "images": own,
            }
            for item, own in zip(batch, images, strict=True)
        ]
        texts = [(item.response, item.row.answer) for item in batch]
        if self._kind == SEQUENTIAL:
            yield from texts if self._takes_texts else ((one,) for one in inputs)
        elif self._takes_texts:
            yield [response for response, _ in texts], [truth for _, truth in texts]
        else:
            yield (inputs,)

    def _replies(self, arguments: tuple[object, ...]) -> list[Any]:
        reply = self._function(*arguments, **self._settings.arguments)
        if self._kind == SEQUENTIAL:
            return [reply]
        if not isinstance(reply, (list, tuple)):
            raise self._unusable("no list of scores", reply)
        return list(reply)

    def _score(self, reply: Any) -> Score:
        try:
            values = {str(name): float(value) for name, value in reply.items()}
            reward = values.pop(OVERALL)
            key = self._settings.score_key
            score = reward if key in (None, OVERALL) else values[str(key)]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise self._unusable(f"{type(error).__name__}: {error}", reply) from error
        return Score.of_reply(reward=reward, score=score, extra_logs=values)

    def _unusable(self, reason: str, reply: object) -> UserError:
        key = f", and {self._settings.score_key} for --reward.score_key" if self._settings.score_key else ""
        return UserError(
            f"--reward.remote_url {self._settings.path}: {self._name} gave no usable reward ({reason}) in "
            f"{str(reply)[:200]}; with REWARD_TYPE {self._kind!r} return a dict of numbers with {OVERALL!r}{key} for each "
            "response"
        )


_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _available(row: Row) -> dict[str, Any]:
    """Return what a row has for parameters by their names; a name of ours hides a column of the same name."""
    ours = dict.fromkeys(("responses", "response_lengths", "images"))
    return {**row.columns, **ours, "datasources": row.datasource}


def _images(rows: Sequence[Row]) -> list[RowImages]:
    """Return the images of each row; those of one row are decoded once."""
    by_row = {id(row): RowImages(row) for row in rows}
    return [by_row[id(row)] for row in rows]


def _numbers(values: Any, *, count: int) -> list[float]:
    """Return one number per response from numbers, lists or tensors; raises ValueError for another count."""
    if isinstance(values, Mapping):
        raise TypeError("a dict is no number")
    if hasattr(values, "flatten"):
        values = values.flatten().tolist()
    listed = [values] if isinstance(values, (int, float, str)) else list(values)
    if len(listed) != count:
        raise ValueError(f"{len(listed)} values for {'one response' if count == 1 else f'{count} responses'}")
    return [float(item.item() if hasattr(item, "item") else item) for item in listed]
