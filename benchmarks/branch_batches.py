"""Branches of an episode as the policy's update gets them: the same first turns, and others behind them."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from train_batches import SENTENCE, GroupBatch, GroupSizes, noise_picture, ordinary_tokens, prompt_of

from lmm_r1.data.messages import ImagePart, Message, Part, TextPart
from lmm_r1.data.sample import PlacedMedia, SampleMedia
from lmm_r1.lmm_kits import EncodedPrompt, LmmKit
from lmm_r1.lmm_kits.checkpoint import encode_turn


@dataclass(frozen=True, kw_only=True)
class TurnSizes:
    """What the turns of an episode are like."""

    prompt: GroupSizes
    generated: int
    """Tokens of each turn of the policy."""
    sentences: int
    """How many sentences it is shown between two of them."""
    image_side: int | None
    """Pixels of each side of the picture that it is shown there; None for text alone."""


@dataclass(frozen=True, kw_only=True)
class BranchBatch(GroupBatch):
    """The branches of one episode as one padded batch."""

    turn_lengths: tuple[int, ...]
    """Tokens of each turn with what is shown behind it."""
    shared_turns: int

    @property
    def unique_tokens(self) -> int:
        """How many tokens there are where what the branches have in common counts once."""
        own = sum(self.turn_lengths[self.shared_turns :])
        return self.prompt_lengths[0] + sum(self.turn_lengths[: self.shared_turns]) + len(self.sequences) * own


def sizes_of(kind: str, *, scale: float) -> TurnSizes:
    """Return what turns are like that are shown `text` or `crops`, with all lengths multiplied by `scale`."""
    side = round(scale**0.5 * 280) if kind == "crops" else None
    return TurnSizes(
        prompt=GroupSizes(prompt_tokens=round(128 * scale), responses=(1, 1), image_side=side),
        generated=max(1, round(64 * scale)),
        sentences=max(1, round((2 if kind == "crops" else 10) * scale)),
        image_side=side,
    )


def branches_of(
    kit: LmmKit, processor: Any, config: Any, sizes: TurnSizes, *, branches: int, turns: int, shared_turns: int
) -> BranchBatch:
    """Return branches of an episode that have the prompt and their first turns in common."""
    noise, generator = random.Random(0), torch.Generator().manual_seed(0)
    ordinary = ordinary_tokens(kit, processor, config)
    prompt = prompt_of(kit, processor, sizes.prompt, noise=noise)
    shown = [_shown(kit, processor, sizes, noise=noise) for _ in range(turns - 1)]

    def generated() -> list[int]:
        return ordinary[torch.randint(len(ordinary), (sizes.generated,), generator=generator)].tolist()

    common = [generated() for _ in range(shared_turns)]
    rows, masks = [], []
    media: list[SampleMedia] = []
    for _ in range(branches):
        own = [*common, *(generated() for _ in range(turns - shared_turns))]
        ids, mask = list(prompt.token_ids), [0] * len(prompt.token_ids)
        placed = [] if prompt.media is None else [PlacedMedia(0, prompt.media, end=len(ids))]
        for number, tokens in enumerate(own):
            ids, mask = ids + tokens, mask + [1] * len(tokens)
            if number < len(shown):
                seen = shown[number]
                if seen.media is not None:
                    placed.append(PlacedMedia(len(ids), seen.media, end=len(ids) + len(seen.token_ids)))
                ids, mask = ids + seen.token_ids, mask + [0] * len(seen.token_ids)
        rows.append(ids)
        masks.append(mask)
        media.append(tuple(placed) or None)
    sequences = torch.tensor(rows)
    return BranchBatch(
        sequences=sequences,
        attention_mask=torch.ones_like(sequences),
        action_mask=torch.tensor(masks)[:, 1:].bool(),
        media=media,
        prompt_lengths=(len(prompt.token_ids),),
        response_lengths=(len(rows[0]) - len(prompt.token_ids),) * branches,
        turn_lengths=tuple(
            sizes.generated + (len(shown[number].token_ids) if number < len(shown) else 0) for number in range(turns)
        ),
        shared_turns=shared_turns,
    )


def _shown(kit: LmmKit, processor: Any, sizes: TurnSizes, *, noise: random.Random) -> EncodedPrompt:
    images = [] if sizes.image_side is None else [noise_picture(sizes.image_side, noise=noise)]
    parts: list[Part] = [*(ImagePart(image) for image in images), TextPart(SENTENCE * sizes.sentences)]
    return encode_turn(kit, processor, Message(role="user", parts=tuple(parts)), images=images)
