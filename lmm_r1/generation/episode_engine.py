"""A checkpoint whose responses are episodes, played with an environment on vLLM outside of training."""

from __future__ import annotations

import asyncio
import io
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from lmm_r1.data.images import encoded_image, load_image
from lmm_r1.data.messages import ImagePart, Row, kind_of
from lmm_r1.data.sample import Completion, Sample
from lmm_r1.errors import UserError
from lmm_r1.generation.engine import EpisodeSettings, Outcome, SamplingSettings
from lmm_r1.generation.episodes import EpisodeRollout, EpisodeWatcher
from lmm_r1.generation.group import BrokenOff, GroupSettings

if TYPE_CHECKING:
    from lmm_r1.generation.vllm_engine import VllmEngine

SMALL_SIDE = 480
"""Pixels on the longer side of pictures that only people look at."""


class EpisodeEngine:
    """Plays episodes of many rows at a time with a checkpoint in this process."""

    def __init__(self, engine: VllmEngine, settings: EpisodeSettings) -> None:
        """Load the environment; raises UserError if that fails, or if the chat template has no turns."""
        self.engine = engine
        self.settings = settings
        self.environment = settings.environment()
        self._rollout = self._rollout_for(None)

    def respond(self, rows: Iterable[tuple[int, Row]], sampling: SamplingSettings) -> Iterator[Outcome]:
        """Yield the outcome of each (index, row), in the order in which they end: all episodes of a row, or none."""
        return self.engine.outcomes(
            rows, partial(self._outcome, sampling=sampling), responses_per_row=sampling.n_samples
        )

    def play(
        self, row: Row, sampling: SamplingSettings, *, watcher: EpisodeWatcher, should_stop: Callable[[], bool]
    ) -> Completion:
        """Return one episode, which `watcher` shows; a stopped one is its last turn so far.

        Raises UserError for a row that cannot be used, and if the environment fails.
        """
        samples: list[Sample] = []

        async def played() -> None:
            rollout, group = self._rollout_for(watcher), self._group(sampling)
            samples.extend(await rollout.run(self.engine.engine, row, group, weight_version=0))

        self.engine.run(played(), should_stop=should_stop)
        if not samples:
            return Completion(text=watcher.text, num_tokens=watcher.tokens, finish_reason="aborted")
        self._check(row, samples)
        return self._completion(samples[0])

    def close(self) -> None:
        """Stop the engine and free its memory."""
        self.engine.close()

    def _rollout_for(self, watcher: EpisodeWatcher | None) -> EpisodeRollout:
        return EpisodeRollout(
            environment=self.environment,
            limits=self.settings.limits,
            codec=self.engine.codec,
            scorer=None,
            in_thread=self.engine.in_thread,
            store=_stores_nothing,
            guesses=self.engine.guesses,
            watcher=watcher,
        )

    def _group(self, sampling: SamplingSettings) -> GroupSettings:
        return GroupSettings(
            sampling=sampling,
            max_len=self.engine.codec.max_len,
            logprobs=False,
            ignore_eos=False,
            # The codec refuses a prompt that leaves no room at all.
            overlong_prompts="take",
            media=False,
            pictures=True,
        )

    async def _outcome(self, index: int, row: Row, *, sampling: SamplingSettings) -> Outcome:
        began = time.perf_counter()
        # The seeds of a row's turns do not depend on the other rows.
        seed = zlib.crc32(f"{self.settings.seed} {row.location}".encode()) if sampling.temperature else None
        try:
            group = self._group(replace(sampling, seed=seed))
            samples = await self._rollout.run(self.engine.engine, row, group, weight_version=0)
            self._check(row, samples)
            completions = sorted(
                map(self._completion, samples), key=lambda one: one.played.number if one.played else 0
            )
            # Encoding pictures must not delay the turns of other rows.
            outcome = await asyncio.to_thread(
                Outcome(index=index, row=row, completions=tuple(completions)).with_images, self._kept
            )
        except BrokenOff:
            return Outcome(index=index, row=row, reason=f"{row.location}: vLLM aborted a turn of an episode")
        except UserError as error:
            return Outcome(index=index, row=row, reason=str(error))
        return replace(outcome, seconds=time.perf_counter() - began)

    def _check(self, row: Row, samples: Sequence[Sample]) -> None:
        """Raise UserError if the environment has failed."""
        problems = [
            sample.played.problem for sample in samples if sample.played is not None and sample.played.end == "failed"
        ]
        if problems:
            count = "" if len(samples) == 1 else f" in {len(problems)} of {len(samples)} episodes"
            raise UserError(f"{row.location}: the environment {self.environment.name} failed{count}: {problems[0]}")

    def _completion(self, sample: Sample) -> Completion:
        played = sample.played
        assert played is not None, "an episode was played"
        assert sample.finish_reason in ("stop", "length"), "a complete turn has ended"
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


def _stores_nothing(media: Any) -> NoReturn:
    raise AssertionError("only training stores media")
