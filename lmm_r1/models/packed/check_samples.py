"""The samples of the check at start-up: random text and the kit's filler images, as long as the run's samples may be."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import torch
import torch.distributed as dist
from transformers import PretrainedConfig

from lmm_r1 import cpu
from lmm_r1.lmm_kits import Media
from lmm_r1.models.actor import KitActor
from lmm_r1.models.kit_module import KitModule

# At least so many tokens of text around each image, in the two responses behind them, and in the other sample.
AROUND, RESPONSES, OTHER_PROMPT, OTHER_RESPONSE = 4, (6, 3), 5, 4
# The longest sample has as many tokens in front of its response as in it. Of these, the second response and both parts
# of the other sample have this share: that they are there is what counts, and their tokens take time.
OTHERS = 1 / 4
IMAGES = 2
# Share of the free memory that a forward of the check may take; all ranks take the length of the one with the least.
MEMORY_SHARE = 1 / 4


@dataclass(frozen=True, kw_only=True)
class CheckSample:
    prompt: list[int]
    response: list[int]
    media: Media | None


def check_samples(model: KitModule, *, longest: int) -> list[CheckSample]:
    """Return two samples of one prompt, with images where the model takes any, and one of another between them.

    Args:
        longest: tokens of the longest sample, which are more where its images and the least text need more.
    """
    # Log-probs of banned tokens lie far from all others.
    banned = model.banned_token_ids.tolist() if isinstance(model, KitActor) else []
    text = text_ids(model.model_config, banned=banned)
    ids, media = model.kit.filler_media(model.model_config) or ([], None)
    room = longest // 2
    images = 0 if media is None else max(1, min(IMAGES, room // (len(ids) + 2 * AROUND)))
    around = max(AROUND, (room - images * len(ids)) // (images + 1))
    prompt = text(around)
    for _ in range(images):
        prompt += [*ids, *text(around)]
    if media is not None and images > 1:
        media = model.kit.merge_media([media] * images)
    less = int(OTHERS * room)
    lengths = (max(RESPONSES[0], room), max(RESPONSES[1], less))
    first, second = (CheckSample(prompt=prompt, response=text(length), media=media) for length in lengths)
    other_prompt, other_response = text(max(OTHER_PROMPT, less)), text(max(OTHER_RESPONSE, less))
    return [first, CheckSample(prompt=other_prompt, response=other_response, media=None), second]


def longest_that_fits(model: KitModule, *, tokens: int) -> int:
    """Return `tokens`, halved until a sample of so many is sure to fit into this device's free memory, and every rank's.

    Counted are the logits, once in half and twice in single precision; a mask as bits and as numbers; and 64 numbers
    per hidden unit for what a layer computes. The weights are there already, and no gradient is computed.
    """
    if not tokens:
        return 0
    text = model.model_config.get_text_config()
    free = _free_memory() * MEMORY_SHARE
    length = tokens
    while length * (10 * text.vocab_size + 64 * 4 * text.hidden_size + 5 * length) > free:
        length //= 2
    if dist.is_initialized():
        lengths: list[int] = [0] * dist.get_world_size()
        dist.all_gather_object(lengths, length)
        length = min(lengths)
    return length


def _free_memory() -> int:
    """Return the bytes that this process may still take of its GPU, or its share of the machine's memory."""
    if cpu.has_cuda():
        cached = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        return torch.cuda.mem_get_info()[0] + cached
    return psutil.virtual_memory().available // (dist.get_world_size() if dist.is_initialized() else 1)


def text_ids(config: PretrainedConfig, *, banned: Sequence[int]) -> Callable[[int], list[int]]:
    """Return a function from a number to as many random ids of text, which are the same on every rank."""
    # An id that means more than text to a model stands in its config.
    special = torch.tensor(sorted({*banned, *_numbers(config.to_dict())}))
    vocabulary = torch.arange(config.get_text_config().vocab_size)
    ordinary = vocabulary[~torch.isin(vocabulary, special)]
    generator = torch.Generator().manual_seed(0)
    return lambda count: ordinary[torch.randint(len(ordinary), (count,), generator=generator)].tolist()


def _numbers(value: Any) -> set[int]:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return set().union(*map(_numbers, value))
    return {value} if isinstance(value, int) else set()
