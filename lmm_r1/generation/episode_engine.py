"""A checkpoint whose responses are episodes: it plays them with an environment on vLLM, outside of training."""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import time
import zlib
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, cast

from lmm_r1.agents.environment import Answered, Environment, Episode, Turn
from lmm_r1.agents.tools import told
from lmm_r1.data.images import encoded_image, load_image
from lmm_r1.data.messages import ImagePart, Row, kind_of
from lmm_r1.data.sample import Completion, Sample
from lmm_r1.errors import UserError
from lmm_r1.generation.codec import PromptCodec, TextStream
from lmm_r1.generation.engine import EpisodeSettings, Outcome, SamplingSettings, TokenEngine
from lmm_r1.generation.episodes import EpisodeRollout
from lmm_r1.generation.group import BrokenOff, GroupSettings

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt
    from vllm.outputs import CompletionOutput, RequestOutput

    from lmm_r1.generation.vllm_engine import VllmEngine

SMALL_SIDE = 480
"""Pixels on the longer side of pictures that people alone look at."""

logger = logging.getLogger(__name__)


class EpisodeWatcher(Protocol):
    """Is told of an episode while it is played."""

    def begin_turn(self) -> None:
        """The model begins a turn."""

    def write(self, piece: str) -> None:
        """The turn has grown by a piece of text."""

    def end_turn(self) -> None:
        """The turn is whole."""

    def answered(self, answered: Answered) -> None:
        """The environment has answered it."""


class EpisodeEngine:
    """Plays episodes with a checkpoint in this process; many rows at a time, as it gives single responses."""

    def __init__(self, engine: VllmEngine, settings: EpisodeSettings) -> None:
        """Load the environment; raises UserError if that fails, or if the chat template has no turns."""
        self.engine = engine
        self.settings = settings
        self.environment = settings.environment()
        self._problems: dict[str, str] = {}
        """Why the environment has failed, by the row's place."""
        self._rollout = self._rollout_told(None)

    def respond(self, rows: Iterable[tuple[int, Row]], sampling: SamplingSettings) -> Iterator[Outcome]:
        """Yield how each (index, row) went, in the order in which they end; of a row, all episodes or none."""
        return self.engine.outcomes(
            rows, partial(self._outcome, sampling=sampling), responses_per_row=sampling.n_samples
        )

    def play(
        self, row: Row, sampling: SamplingSettings, *, watcher: EpisodeWatcher, should_stop: Callable[[], bool]
    ) -> Completion:
        """Return one episode, which `watcher` is told of; one that is stopped is its last turn as far as that came.

        It is drawn from the engine's own seed: asked for again, it is another one.

        Raises UserError for a row that cannot be taken, and where the environment fails.
        """
        self._problems.clear()
        spoken = _Spoken(watcher, self.engine.codec)
        rollout = self._rollout_told(spoken)
        engine = cast(TokenEngine, _PlayedEngine(self.engine.engine, seed=None, spoken=spoken))
        samples: list[Sample] = []

        async def played() -> None:
            samples.extend(await rollout.run(engine, row, self._group(sampling), weight_version=0))

        self.engine.run(played(), should_stop=should_stop)
        if not samples:
            spoken.end_turn()
            return Completion(text=spoken.text, num_tokens=spoken.tokens, finish_reason="aborted")
        self._check(row, samples)
        return self._completion(samples[0])

    def close(self) -> None:
        """Stop the engine and free its memory."""
        self.engine.close()

    def _rollout_told(self, spoken: _Spoken | None) -> EpisodeRollout:
        limits = self.settings.limits
        told_of = _PlayedEnvironment(
            self.environment, problems=self._problems, answer_s=limits.answer_s, spoken=spoken
        )
        return EpisodeRollout(
            environment=cast(Environment, told_of),
            limits=limits,
            codec=self.engine.codec,
            scorer=None,
            in_thread=self.engine.in_thread,
            store=_stores_nothing,
            guesses=self.engine.guesses,
        )

    def _group(self, sampling: SamplingSettings) -> GroupSettings:
        return GroupSettings(
            sampling=sampling,
            max_len=self.engine.codec.max_len,
            logprobs=False,
            ignore_eos=False,
            # The codec has refused a prompt that leaves no room at all.
            overlong_prompts="take",
            media=False,
            pictures=True,
        )

    async def _outcome(self, index: int, row: Row, *, sampling: SamplingSettings) -> Outcome:
        began = time.perf_counter()
        engine = cast(TokenEngine, _PlayedEngine(self.engine.engine, seed=self.settings.seed))
        try:
            samples = await self._rollout.run(engine, row, self._group(sampling), weight_version=0)
            self._check(row, samples)
            completions = sorted(map(self._completion, samples), key=_number)
            # Encoding pictures takes long, and other rows' turns do not wait for it.
            made = await asyncio.to_thread(
                Outcome(index=index, row=row, completions=tuple(completions)).with_images, self._kept
            )
        except BrokenOff:
            return Outcome(index=index, row=row, reason=f"{row.location}: vLLM broke a turn of an episode off")
        except UserError as error:
            return Outcome(index=index, row=row, reason=str(error))
        return replace(made, seconds=time.perf_counter() - began)

    def _check(self, row: Row, samples: Sequence[Sample]) -> None:
        """Raise UserError if the environment has failed."""
        problem = self._problems.pop(row.location, "what it gave cannot be taken; the log says why")
        failed = sum(sample.played is not None and sample.played.end == "failed" for sample in samples)
        if failed:
            what = "" if len(samples) == 1 else f" in {failed} of {len(samples)} episodes"
            raise UserError(f"{row.location}: the environment {self.environment.name} failed{what}: {problem}")

    def _completion(self, sample: Sample) -> Completion:
        played = sample.played
        assert played is not None, "an episode was played"
        assert sample.finish_reason in ("stop", "length"), "a turn that came whole has ended"
        environment = self.environment
        return Completion(
            text=sample.response,
            num_tokens=sample.generated_tokens,
            finish_reason="stop" if sample.finish_reason == "stop" else "length",
            image_scales=sample.image_scales,
            played=replace(
                played,
                rewards={name: float(played.rewards.get(name, 0.0)) for name in environment.rewards},
                counts={name: played.counts.get(name, 0) for name in environment.counts},
                shown=played.shown if self.settings.pictures == "whole" else (),
            ),
        )

    def _kept(self, part: ImagePart) -> ImagePart:
        """Return a picture as encoded bytes, which are small and can be written unchanged; paths and URLs stay."""
        location = f"a picture of the environment {self.environment.name}"
        if self.settings.pictures == "whole":
            is_file = kind_of(part.source) in ("path", "url")
            return part if is_file else replace(part, source=encoded_image(part, location=location))
        image = load_image(part, location=location)
        image.thumbnail((SMALL_SIDE, SMALL_SIDE))
        buffer = io.BytesIO()
        image.save(buffer, "WEBP", quality=85)
        return replace(part, source=buffer.getvalue())


def _number(completion: Completion) -> int:
    """Return its number among the row's episodes, whatever the order in which they end."""
    assert completion.played is not None, "an episode was played"
    return completion.played.number


def _stores_nothing(media: Any) -> NoReturn:
    raise AssertionError("media are for training alone")


class _Spoken:
    """The turns so far, as a watcher is told of them."""

    def __init__(self, watcher: EpisodeWatcher, codec: PromptCodec) -> None:
        self.watcher, self._codec = watcher, codec
        self._stream: TextStream | None = None
        self.text = ""
        """Of the last turn."""
        self.tokens = 0
        """Of all turns."""

    def go_on(self) -> None:
        """Begin a turn, or a further piece of it."""
        if self._stream is None:
            self.watcher.begin_turn()
            self.text = ""
        self._stream = TextStream(self._codec.tokenizer)

    def add(self, part: CompletionOutput) -> None:
        """Hand on what a turn has grown by."""
        assert self._stream is not None, "a turn begins before it grows"
        written = list(part.token_ids)
        self.tokens += len(written)
        # An end token is no text, and ends a turn that no text has ended.
        ended = part.finish_reason == "stop" and not isinstance(part.stop_reason, str)
        self._write(self._stream.add(self._codec.words(written, ended=ended)))
        if part.finish_reason is not None:
            self._write(self._stream.rest())

    def end_turn(self) -> None:
        """End the turn, where one is under way."""
        if self._stream is not None:
            self._write(self._stream.rest())
            self._stream = None
            self.watcher.end_turn()

    def _write(self, piece: str) -> None:
        if piece:
            self.text += piece
            self.watcher.write(piece)


@dataclass
class _Playing:
    """The episode that a task plays."""

    seed: int
    requests: int = 0
    """How many it has sent to the engine."""


_PLAYING: ContextVar[_Playing] = ContextVar("episode")


class _Wrapped:
    """Forwards to an object everything that the subclass does not define."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class _PlayedEngine(_Wrapped):
    """An engine whose requests are pieces of turns; each has its own seed, and may be watched token by token."""

    def __init__(self, engine: TokenEngine, *, seed: int | None, spoken: _Spoken | None = None) -> None:
        """Args:
        seed: with those of the episodes it decides what is sampled; None draws from the engine's own.
        """
        super().__init__(engine)
        self._seed, self._spoken = seed, spoken

    async def generate(
        self, prompt: TokensPrompt, sampling_params: SamplingParams, request_id: str
    ) -> AsyncGenerator[RequestOutput, None]:
        playing = _PLAYING.get()
        if self._seed is not None and sampling_params.temperature > 0:
            sampling_params.seed = zlib.crc32(f"{self._seed} {playing.seed} {playing.requests}".encode())
        playing.requests += 1
        if self._spoken is not None:
            sampling_params.stream_interval = None
            self._spoken.go_on()
        async with aclosing(self._inner.generate(prompt, sampling_params, request_id)) as outputs:
            async for output in outputs:
                if self._spoken is not None:
                    for part in output.outputs:
                        self._spoken.add(part)
                yield output


class _PlayedEnvironment(_Wrapped):
    """An environment that keeps its error, and whose answers may be watched."""

    def __init__(
        self, environment: Environment, *, problems: dict[str, str], answer_s: float, spoken: _Spoken | None
    ) -> None:
        super().__init__(environment)
        self._problems, self._answer_s, self._spoken = problems, answer_s, spoken

    def shown_row(self, row: Row) -> Row:
        with self._naming(row):
            return self._inner.shown_row(row)

    def begin(self, row: Row, *, seed: int) -> Episode:
        # In the task that goes on to play it.
        _PLAYING.set(_Playing(seed))
        with self._naming(row):
            episode = self._inner.begin(row, seed=seed)
        return cast(Episode, _PlayedEpisode(episode, partial(self._answered, row)))

    async def _answered(self, row: Row, episode: Episode, turn: Turn) -> Answered:
        if self._spoken is not None:
            self._spoken.end_turn()
        try:
            answered = await episode.answer(turn)
        except asyncio.CancelledError:
            self._problems[row.location] = f"it gave no answer in {self._answer_s:g} s"
            raise
        except Exception as error:  # the user's own code, which may raise anything
            self._problems[row.location] = f"it raised {told(error)}"
            raise
        if self._spoken is not None:
            self._spoken.watcher.answered(answered)
        return answered

    @contextlib.contextmanager
    def _naming(self, row: Row) -> Iterator[None]:
        """Raise the environment's error for a row as a UserError that names both."""
        try:
            yield
        except UserError:
            raise
        except Exception as error:  # the user's own code, which may raise anything
            place = f"{row.location}, environment {self._inner.name}"
            logger.exception("%s: it failed", place)
            raise UserError(f"{place}: it raised {told(error)}") from error


class _PlayedEpisode(_Wrapped):
    def __init__(self, episode: Episode, answered: Callable[[Episode, Turn], Any]) -> None:
        super().__init__(episode)
        self._answered = answered

    async def answer(self, turn: Turn) -> Answered:
        return await self._answered(self._inner, turn)
