"""Trajectories of environments as a run makes them, with media that a test can look at, and batches of them."""

from __future__ import annotations

import asyncio
import bisect
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

from helpers.conversations import message
from helpers.environments import CASES, Case
from helpers.packed_batches import Sample as PackedSample
from helpers.tiny_models import encode
from PIL import Image

from lmm_r1.agents.environment import Answered, Environment, Episode, Turn
from lmm_r1.config.ppo import AgentConfig
from lmm_r1.data.messages import Row, TextPart
from lmm_r1.data.sample import MediaRef, PlacedMedia, Sample
from lmm_r1.generation.codec import PromptCodec
from lmm_r1.generation.engine import SamplingSettings, TokenEngine
from lmm_r1.generation.episodes import EpisodeRollout
from lmm_r1.generation.group import GroupSettings
from lmm_r1.lmm_kits import LmmKit, Media, TinyModelSpec


@dataclass(frozen=True)
class Spoken:
    """One turn as the engine has made it."""

    read: tuple[int, ...]
    """What it was shown, placeholders expanded."""
    images: tuple[Image.Image, ...]
    generated: tuple[int, ...]
    log_probs: tuple[float, ...]
    ended_by: str
    """`token`, `text` or `length`."""


class RandomPolicy:
    """A `TokenEngine` whose turns are random tokens, or what `turn` says, and which notes all that it is shown.

    Samples that have been shown the same now and then say the same, as branches of one episode do. What comes of a
    conversation follows from the seed and from what was shown, whatever the order of requests.
    """

    def __init__(self, kit: LmmKit, processor: Any, config: Any, *, turn: Callable[[Random], str], seed: int) -> None:
        self.kit, self.processor, self.turn, self.seed = kit, processor, turn, seed
        self.tokenizer = kit.tokenizer_of(processor)
        self.placeholders = kit.placeholder_ids(processor)
        self.banned = frozenset(kit.banned_token_ids(config, self.tokenizer))
        ends = {self.tokenizer.eos_token_id, self.tokenizer.pad_token_id}
        self.ordinary = [token for token in range(len(self.tokenizer)) if token not in self.banned | ends]
        # As text they are no special tokens: nothing keeps a policy from spelling them.
        banned = sorted(self.banned & set(range(len(self.tokenizer))))
        self.spelt = [*self.tokenizer.convert_ids_to_tokens(banned), "<|image_1|>"]
        self.spoken: list[Spoken] = []
        self._asked: Counter[int] = Counter()
        self._expansions: dict[tuple[int, int], list[int]] = {}

    async def generate(self, prompt: Any, parameters: Any, request_id: str) -> AsyncIterator[SimpleNamespace]:
        assert parameters.logit_bias is None, "the workers ban tokens"
        ids = prompt["prompt_token_ids"]
        images = tuple(prompt.get("multi_modal_data", {}).get("image", ()))
        asked = zlib.crc32(repr((self.seed, ids, [zlib.crc32(image.tobytes()) for image in images])).encode())
        self._asked[asked] += 1
        alike = Random(asked).random() < 0.3
        draw = Random(repr((asked, 0 if alike else self._asked[asked])))
        generated, ended_by = self._ended(self._tokens(draw), parameters, draw)
        read = self._expanded(ids, images)
        given = Random(repr((read, generated)))
        log_probs = [-given.expovariate(1.0) for _ in generated]
        self.spoken.append(Spoken(tuple(read), images, tuple(generated), tuple(log_probs), ended_by))
        part = SimpleNamespace(
            index=0,
            token_ids=generated,
            logprobs=[
                {token: SimpleNamespace(logprob=value)} for token, value in zip(generated, log_probs, strict=True)
            ],
            finish_reason="length" if ended_by == "length" else "stop",
            stop_reason=self._stop_in(generated, parameters.stop) if ended_by == "text" else None,
        )
        yield SimpleNamespace(outputs=[part], prompt_token_ids=read)

    def _tokens(self, draw: Random) -> list[int]:
        noise = draw.choices(self.ordinary, k=draw.choice((0, 0, 1, 3, 12)))
        if draw.random() < 0.25:
            return noise + draw.choices(self.ordinary, k=draw.randint(0, 8))
        text = self.turn(draw)
        if draw.random() < 0.1:
            text = text.replace(">", f">{draw.choice(self.spelt)}", 1)
        ids = [token for piece in _broken(text, self.spelt) for token in self._plain(piece)]
        return noise + [token for token in ids if token not in self.banned]

    def _plain(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"] if text else []

    def _ended(self, ids: list[int], parameters: Any, draw: Random) -> tuple[list[int], str]:
        """Return a turn as vLLM ends it: behind the first text that ends turns, at the limit, or by the end token."""
        end = self.tokenizer.eos_token_id
        ids = [token for token in ids if token != end]
        if self._stop_in(ids, parameters.stop):
            # Whether one stands in so many tokens: no, no, ..., yes, yes.
            holds = [*range(1, len(ids) + 1)]
            first = bisect.bisect_left(
                holds, True, key=lambda count: bool(self._stop_in(ids[:count], parameters.stop))
            )
            ids = ids[: holds[first]]
            if len(ids) <= parameters.max_tokens:
                return ids, "text"
        if len(ids) >= parameters.max_tokens:
            return ids[: parameters.max_tokens], "length"
        return [*ids, end], "token"

    def _stop_in(self, ids: Sequence[int], stops: Sequence[str]) -> str | None:
        text = self.tokenizer.decode(ids, skip_special_tokens=False)
        return next((stop for stop in stops if stop in text), None)

    def _expanded(self, ids: Sequence[int], images: Sequence[Image.Image]) -> list[int]:
        """Return a prompt with what the kit writes for each image by itself in the place of its placeholder."""
        expansions = iter([self._expansion_of(image) for image in images])
        read = [token for one in ids for token in (next(expansions) if one in self.placeholders else [one])]
        assert next(expansions, None) is None, "more images than placeholders"
        return read

    def _expansion_of(self, image: Image.Image) -> list[int]:
        if image.size not in self._expansions:
            alone = encode(self.kit, self.processor, [message("user", image)])
            (start,) = (place for place, token in enumerate(alone.engine_token_ids) if token in self.placeholders)
            behind = len(alone.engine_token_ids) - start - 1
            self._expansions[image.size] = alone.token_ids[start : len(alone.token_ids) - behind]
        return self._expansions[image.size]


def _broken(text: str, words: Sequence[str]) -> list[str]:
    """Return a text in pieces, none of which holds one of the words whole."""
    for word in words:
        text = text.replace(word, f"{word[0]}\0{word[1:]}")
    return text.split("\0")


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
