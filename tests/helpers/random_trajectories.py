"""Trajectories of environments as a run makes them, with media that a test can look at, and batches of them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

from helpers.environment_cases import CASES, Case
from helpers.packed_batches import Sample as PackedSample

from lmm_r1.agents.environment import Answered, Environment, Episode, Turn
from lmm_r1.config.ppo import AgentConfig
from lmm_r1.data.messages import Row, TextPart
from lmm_r1.data.sample import MediaRef, PlacedMedia, Sample
from lmm_r1.generation.codec import PromptCodec
from lmm_r1.generation.engine import SamplingSettings, TokenEngine
from lmm_r1.generation.episodes import EpisodeRollout
from lmm_r1.generation.group import GroupSettings
from lmm_r1.lmm_kits import LmmKit, Media, TinyModelSpec

GROUP = 4
MAX_LEN = 4096
LIMITS = AgentConfig(max_turns=4, max_images=3, answer_s=60.0, overturn="keep")


def build_checkpoint(kit: LmmKit, folder: Path) -> None:
    """Write a tiny checkpoint whose tokenizer knows the words of the environments, which makes trajectories short."""
    spec = TinyModelSpec(hidden_size=64, layers=2, seed=0, tie_embeddings=False)
    kit.build_tiny(spec, list(_corpus()), folder)


def _corpus() -> Iterator[str]:
    draw = Random(0)
    for case in CASES.values():
        environment = case.environment(False)
        for row in islice(case.rows(seed=0, images=False), 2):
            shown = environment.shown_row(row)
            yield from (part.text for one in shown.messages for part in one.parts if isinstance(part, TextPart))
        yield from (case.turn(draw) for _ in range(10))


class Overheard(Environment):
    """Another environment that hears a case's turns in the place of what the policy says: a random model calls nothing."""

    name = "overheard"

    def __init__(self, case: Case, *, images: bool) -> None:
        self.inner, self.turn = case.environment(images), case.turn
        self.stops, self.rewards, self.counts = self.inner.stops, self.inner.rewards, self.inner.counts

    def shown_row(self, row: Row) -> Row:
        return self.inner.shown_row(row)

    def begin(self, row: Row, *, seed: int) -> Episode:
        return _OverheardEpisode(self.inner.begin(row, seed=seed), self.turn, Random(seed))


class _OverheardEpisode(Episode):
    def __init__(self, inner: Episode, turn: Any, draw: Random) -> None:
        self.inner, self.turn, self.draw = inner, turn, draw

    async def answer(self, turn: Turn) -> Answered:
        return await self.inner.answer(replace(turn, text=self.turn(self.draw)))

    async def close(self) -> None:
        await self.inner.close()


@dataclass(kw_only=True)
class Rollouts:
    """Plays groups of an environment's episodes, and keeps the media of their segments."""

    environment: Environment
    codec: PromptCodec
    media: dict[str, Media] = field(default_factory=dict)

    def play(
        self, engine: TokenEngine, rows: Sequence[Row], *, seed: int, max_new_tokens: Sequence[int]
    ) -> list[Sample]:
        """Return the samples of all rows, whose limits are drawn from the seed."""
        return asyncio.run(self.played(engine, rows, seed=seed, max_new_tokens=max_new_tokens))

    async def played(
        self, engine: TokenEngine, rows: Sequence[Row], *, seed: int, max_new_tokens: Sequence[int]
    ) -> list[Sample]:
        rollout = EpisodeRollout(
            environment=self.environment,
            limits=LIMITS,
            codec=self.codec,
            scorer=None,
            in_thread=in_turn(),
            store=self._store,
        )
        draw = Random(seed)
        groups = [
            rollout.run(engine, row, self._settings(row, draw, draw.choice(max_new_tokens)), weight_version=0)
            for row in rows
        ]
        return [sample for group in await asyncio.gather(*groups) for sample in group]

    def _settings(self, row: Row, draw: Random, new_tokens: int) -> GroupSettings:
        """Return a group's settings; now and then there is room for a turn or two only."""
        max_len = MAX_LEN
        if draw.random() < 0.2:
            prompt = self.codec.encode(self.environment.shown_row(row))
            max_len = min(MAX_LEN, len(prompt.token_ids) + new_tokens + draw.randint(0, 150))
        return GroupSettings(
            sampling=SamplingSettings(n_samples=GROUP, temperature=1.0, top_p=1.0, max_new_tokens=new_tokens),
            max_len=max_len,
            logprobs=True,
            ignore_eos=False,
            overlong_prompts="error",
            media=True,
        )

    def _store(self, media: Media) -> MediaRef:
        key = f"object {len(self.media)}"
        self.media[key] = media
        return MediaRef(key=key, stored=None, nbytes=0)


def in_turn() -> Any:
    """Return what runs functions in the event loop, as the CPU's engine does between two steps."""

    async def run(function: Any, *arguments: Any) -> Any:
        return function(*arguments)

    return run


def packed_sample(sample: Sample, media: Mapping[str, Media]) -> PackedSample:
    """Return a trajectory as tests of packing take it, with its media in place."""
    prompt, ids = sample.segments[0], sample.token_ids
    start = len(prompt.token_ids)
    return PackedSample(
        prompt=tuple(ids[:start]),
        response=tuple(ids[start:]),
        loss_mask=tuple(sample.loss_mask[start:]),
        media=tuple(PlacedMedia(item.start, media[item.ref.key], ref_key=item.ref.key) for item in sample.media),
    )
