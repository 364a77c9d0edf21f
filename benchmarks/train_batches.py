"""Checkpoints, batches of groups and optimizers as the policy's update gets them, for the benchmarks of training."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from measuring import noise_picture

from lmm_r1.data.messages import ImagePart, Message, Part, TextPart
from lmm_r1.data.sample import SampleMedia
from lmm_r1.lmm_kits import EncodedPrompt, LmmKit, TinyModelSpec
from lmm_r1.models.packed.packing import ModelSample

SENTENCE = " Then add up the digits, sort them and say which is the largest."


@dataclass(frozen=True, kw_only=True)
class GroupSizes:
    """What the samples of one group are like."""

    prompt_tokens: int
    """Sentences fill the prompt up to about as many, beside the image."""
    responses: tuple[int, int]
    """Tokens of the shortest and of the longest response."""
    image_side: int | None = None
    """Pixels of each side of the prompt's one image; None for a text prompt."""

    def scaled(self, scale: float) -> GroupSizes:
        """Return sizes with all numbers of tokens multiplied by `scale`."""
        shortest, longest = (max(1, round(scale * length)) for length in self.responses)
        return GroupSizes(
            prompt_tokens=round(scale * self.prompt_tokens),
            responses=(shortest, longest),
            image_side=None if self.image_side is None else round(scale**0.5 * self.image_side),
        )


TEXT = GroupSizes(prompt_tokens=128, responses=(32, 256))
# 19 x 19 tokens of 28 x 28 pixels for the Qwen-VL kits: an image of 361 tokens in a prompt of about 400.
IMAGE = GroupSizes(prompt_tokens=400, responses=(50, 150), image_side=532)
KINDS = {"text": (TEXT,), "image": (IMAGE,), "mixed": (TEXT, IMAGE)}


@dataclass(frozen=True, kw_only=True)
class GroupBatch:
    """Groups of samples as one padded batch: prompts and responses behind one another, padding on the right."""

    sequences: torch.Tensor  # (B, T)
    attention_mask: torch.Tensor  # (B, T)
    action_mask: torch.Tensor  # (B, T - 1)
    media: list[SampleMedia]
    """One entry per row; rows of one group hold the same object."""
    samples: int
    """Rows of each group but the last, which may have fewer."""
    prompt_lengths: tuple[int, ...]
    """One per group."""
    response_lengths: tuple[int, ...]
    """One per row."""

    @property
    def for_model(self) -> list[ModelSample]:
        """The samples as our models compute them."""
        lengths = self.attention_mask.sum(1).tolist()
        return [
            ModelSample(
                token_ids=self.sequences[row, :length],
                loss_mask=self.action_mask[row, : length - 1],
                media=self.media[row],
                group=row // self.samples,
                prompt_tokens=self.prompt_lengths[row // self.samples],
            )
            for row, length in enumerate(lengths)
        ]

    @property
    def unique_tokens(self) -> int:
        """How many tokens there are where every prompt counts once: what an update has to compute at least."""
        return sum(self.prompt_lengths) + sum(self.response_lengths)


def build_tiny_checkpoint(kit: LmmKit, folder: Path, *, hidden_size: int, layers: int) -> Path:
    spec = TinyModelSpec(hidden_size=hidden_size, layers=layers, seed=0, tie_embeddings=False)
    kit.build_tiny(spec, (f"user\n{SENTENCE}", "assistant\n<think>12 + 34 = 46</think><answer>46</answer>"), folder)
    return folder


def optimizer_settings(args: SimpleNamespace, *, steps: int) -> dict[str, Any]:
    """Return the policy's optimizer and its schedule, as the strategy takes them."""
    names = ("optim", "lr_scheduler", "lr_warmup_ratio", "min_lr_ratio", "max_norm")
    settings = {name: getattr(args.actor, name) for name in names}
    return settings | {"muon": vars(args.actor.muon), "adam": vars(args.actor.adam), "scheduler_steps": steps}


def groups_of(kind: str, *, scale: float = 1.0) -> list[GroupSizes]:
    """Return the groups of one of `KINDS`, with all numbers of tokens multiplied by `scale`."""
    return [sizes.scaled(scale) for sizes in KINDS[kind]]


def make_batch(
    kit: LmmKit, processor: Any, config: Any, *, groups: Sequence[GroupSizes], samples: int, seed: int = 0
) -> GroupBatch:
    """Return a batch of `samples` responses to each of several prompts, all of which differ."""
    noise = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    prompts = [prompt_of(kit, processor, sizes, noise=noise) for sizes in groups]
    ordinary = ordinary_tokens(kit, processor, config)
    rows, lengths = [], []
    for prompt, sizes in zip(prompts, groups, strict=True):
        for length in _spread(sizes.responses, samples):
            response = ordinary[torch.randint(len(ordinary), (length,), generator=generator)]
            rows.append(torch.cat([torch.tensor(prompt.token_ids), response]))
            lengths.append(length)
    sequences = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    attention_mask, action_mask = torch.zeros(2, *sequences.shape, dtype=torch.long)
    for index, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        attention_mask[index, : len(row)] = 1
        action_mask[index, len(row) - length : len(row)] = 1
    return GroupBatch(
        sequences=sequences,
        attention_mask=attention_mask,
        action_mask=action_mask[:, 1:].bool(),
        media=[prompt.media for prompt in prompts for _ in range(samples)],
        samples=samples,
        prompt_lengths=tuple(len(prompt.token_ids) for prompt in prompts),
        response_lengths=tuple(lengths),
    )


def ordinary_tokens(kit: LmmKit, processor: Any, config: Any) -> torch.Tensor:
    """Return the ids that a policy may sample and that are no special tokens."""
    tokenizer = kit.tokenizer_of(processor)
    banned = {*kit.banned_token_ids(config, tokenizer), *tokenizer.all_special_ids}
    # From 3 on: some tokenizers' special tokens stand there and are not in their list.
    return torch.tensor([token for token in range(3, len(tokenizer)) if token not in banned])


def prompt_of(kit: LmmKit, processor: Any, sizes: GroupSizes, *, noise: random.Random) -> EncodedPrompt:
    """Return a prompt of about as many tokens, with its image."""
    question = f"Question {noise.randrange(10**6)}."
    images = [] if sizes.image_side is None else [noise_picture(sizes.image_side, noise=noise)]

    def encode(text: str) -> EncodedPrompt:
        parts: list[Part] = [*(ImagePart(image) for image in images), TextPart(text)]
        message = Message(role="user", parts=tuple(parts))
        return kit.encode(processor, [message], images=images, videos=(), add_generation_prompt=True)

    bare = encode(question)
    sentence = kit.tokenizer_of(processor)(SENTENCE, add_special_tokens=False)["input_ids"]
    missing = max(0, sizes.prompt_tokens - len(bare.token_ids)) // len(sentence)
    return encode(question + SENTENCE * missing) if missing else bare


def _spread(responses: tuple[int, int], samples: int) -> Iterator[int]:
    """Yield lengths evenly from the shortest to the longest."""
    shortest, longest = responses
    for index in range(samples):
        yield shortest + (longest - shortest) * index // max(1, samples - 1)
