"""An engine that says what a test wants it to, and groups that are played on it with a kit whose tokens are characters."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from helpers.character_kit import END, PATCHES, PLACEHOLDER, CharacterKit
from helpers.samples import media_ref

from lmm_r1.config.ppo import AgentConfig
from lmm_r1.data.messages import Row
from lmm_r1.data.sample import MediaRef, Sample
from lmm_r1.generation.codec import PromptCodec
from lmm_r1.generation.engine import SamplingSettings
from lmm_r1.generation.group import GroupRollout, GroupSettings

SETTINGS = GroupSettings(
    sampling=SamplingSettings(n_samples=1, temperature=1.0, top_p=1.0, max_new_tokens=4),
    max_len=80,
    logprobs=True,
    ignore_eos=False,
    overlong_prompts="error",
    media=True,
)
LIMITS = AgentConfig(max_turns=4, max_images=2, answer_s=5.0, overturn="mask", overturn_penalty=0.5)


class TalkingEngine:
    """Says its turns one after the other, each with the end token behind it; a turn of bytes has none, and is cut off."""

    def __init__(self, *turns: str | bytes) -> None:
        self.turns = list(turns)
        self.requests: list[tuple[Any, Any]] = []

    async def generate(self, request: Any, parameters: Any, request_id: str) -> AsyncIterator[SimpleNamespace]:
        self.requests.append((request, parameters))
        turn = self.turns.pop(0)
        cut_off = isinstance(turn, bytes)
        token_ids = list(turn) if isinstance(turn, bytes) else [*turn.encode(), END]
        part = SimpleNamespace(
            index=0,
            token_ids=token_ids,
            text=bytes(token_ids if cut_off else token_ids[:-1]).decode(),
            logprobs=[{token: SimpleNamespace(logprob=-float(token))} for token in token_ids],
            finish_reason="length" if cut_off else "stop",
            stop_reason=None,
        )
        read = [token for token in request["prompt_token_ids"] for _ in range(PATCHES if token == PLACEHOLDER else 1)]
        yield SimpleNamespace(outputs=[part], prompt_token_ids=read)

    @property
    def prompts(self) -> list[list[int]]:
        """The tokens that each turn was asked for with."""
        return [list(request["prompt_token_ids"]) for request, _ in self.requests]


def play_group(
    make: Callable[..., GroupRollout],
    engine: TalkingEngine,
    prompt: Row,
    *,
    n_samples: int = 1,
    settings: GroupSettings = SETTINGS,
    limits: AgentConfig = LIMITS,
    scorer: Any = None,
    stored: list[Any] | None = None,
    processor: Any = None,
    groups: int = 1,
    beside: GroupSettings | None = None,
) -> Sequence[Sample]:
    """Return the samples of the last of the groups that one rollout plays.

    Args:
        make: returns the rollout of what a `GroupRollout` takes, and limits.
        stored: gets the media that are put aside for training.
        beside: of a further group that is played at the same time as each, whose samples come behind.
    """
    kept = [] if stored is None else stored

    def store(media: Any) -> MediaRef:
        kept.append(media)
        return media_ref(f"object {len(kept)}")

    rollout = make(
        limits=limits,
        codec=PromptCodec(kit=CharacterKit(), processor=processor, banned_token_ids=()),
        scorer=scorer,
        in_thread=asyncio.to_thread,
        store=store,
    )
    asked = replace(settings, sampling=replace(settings.sampling, n_samples=n_samples))

    async def run() -> Sequence[Sample]:
        for _ in range(groups):
            played = [rollout.run(engine, prompt, one, weight_version=7) for one in (asked, beside) if one is not None]
            samples = await asyncio.wait_for(asyncio.gather(*played), timeout=20)
        return [sample for group in samples for sample in group]

    return asyncio.run(run())
