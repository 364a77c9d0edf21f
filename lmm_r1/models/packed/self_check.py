"""The check at start-up: three samples through the real model, in one packed sequence and one by one.

What goes wrong with packing goes wrong without an error: a model that takes a packed sequence for one sample, or counts
its positions on, just gives other results, which are off by as much as results differ from one another."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psutil
import torch
import torch.distributed as dist
from transformers import PretrainedConfig

from lmm_r1 import cpu
from lmm_r1.errors import UserError
from lmm_r1.lmm_kits import Media
from lmm_r1.models.actor import KitActor, KitModule
from lmm_r1.models.image_features import settings_of_chance
from lmm_r1.models.packed.packing import ModelSample

if TYPE_CHECKING:
    from lmm_r1.host.models import DeepSpeedEngine


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


# How far the results of a sample may be off in the mean, in standard deviations of all results. In bfloat16, rounding
# made up to 0.03 (28 layers, random weights), and a mask or positions that were wrong 0.24 and more.
SINGLE_PRECISION, HALF_PRECISION = 1e-3, 0.15
# What is off at the start of responses alone would be lost in the mean over long ones: so many tokens also count alone.
START = 8


def check_packing(
    model: KitModule, *, run: DeepSpeedEngine | None = None, group: dist.ProcessGroup | None = None, longest: int = 0
) -> None:
    """Raise UserError where a model that runs on packed sequences gives other results than for every sample by itself.

    Every rank must call it: all run the model equally often, and all of them raise or none.

    Args:
        run: what is called in the place of the model, where DeepSpeed's engine is around all of it.
        group: the ranks that share the tokens of a packed sequence.
        longest: tokens of the run's longest sample: the check's are as long where they fit into memory, see
            `longest_that_fits`. 0 takes the smallest.
    """
    if not model.packing_samples:
        return
    samples = check_samples(model, longest=longest_that_fits(model, tokens=longest))
    for mode in ("evaluation", "training"):
        with _fixed(model.model, train=mode == "training"), model.computing_images(), torch.no_grad():
            together = results(model, samples, run=run, group=group)
            model.packing_samples = False
            try:
                alone = [result for sample in samples for result in results(model, [sample], run=run)]
            finally:
                model.packing_samples = True
        _compare(model, together, alone, mode=mode)


def results(
    model: KitModule,
    samples: Sequence[CheckSample],
    *,
    run: DeepSpeedEngine | None = None,
    group: dist.ProcessGroup | None = None,
) -> list[torch.Tensor]:
    """Return what the model gives for the tokens of each sample's response, (L,) each, in one batch.

    Args:
        run, group: those of `check_packing`.
    """
    found = (model if run is None else run)(model_samples(samples), ring_attn_group=group)
    return [
        row[len(sample.prompt) - 1 :][: len(sample.response)].float()
        for row, sample in zip(found, samples, strict=True)
    ]


def model_samples(samples: Sequence[CheckSample]) -> list[ModelSample]:
    """Return the samples as a model computes them, their responses in the loss; those of one prompt are a group."""
    known = [(tuple(sample.prompt), id(sample.media)) for sample in samples]
    return [
        ModelSample(
            token_ids=torch.tensor([*sample.prompt, *sample.response]),
            loss_mask=torch.arange(1, len(sample.prompt) + len(sample.response)) >= len(sample.prompt),
            media=sample.media,
            group=known.index(prompt),
            prompt_tokens=len(sample.prompt),
        )
        for sample, prompt in zip(samples, known, strict=True)
    ]


def _compare(model: KitModule, together: Sequence[torch.Tensor], alone: Sequence[torch.Tensor], *, mode: str) -> None:
    half = next(model.model.parameters()).dtype in (torch.bfloat16, torch.float16)
    off, tolerance = _off(together, alone), HALF_PRECISION if half else SINGLE_PRECISION
    if off <= tolerance:
        return
    flags = "leave --ds.packing_samples out"
    if model.share_prefix:
        flags += " and give --train.no_shared_prefix_enable"
    raise UserError(
        f"{model.model_config.name_or_path}: {model.model_config.model_type} does not run on packed sequences here. In "
        f"{mode} mode, the results of three samples in one row are off by {off:.2g} standard deviations from those "
        f"of each sample by itself, and rounding makes less than {tolerance:g}; {flags}"
    )


def _off(results: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return how far a sample's results are off in the mean at most, on any rank, in standard deviations of the others."""
    spread = torch.cat(list(others)).std()
    errors = [(one - other).abs() for one, other in zip(results, others, strict=True)]
    means = torch.stack([part.mean() for error in errors for part in (error, error[:START])])
    # What is no number is off, whatever by.
    off = torch.nan_to_num(means.max() / spread.clamp(min=1e-30), nan=torch.inf)
    if dist.is_initialized():
        dist.all_reduce(off, op=dist.ReduceOp.MAX)
    return off


@contextmanager
def _fixed(model: torch.nn.Module, *, train: bool) -> Iterator[None]:
    """Put a model into training or evaluation mode with nothing left to chance, and take it back afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    chances = list(settings_of_chance(model))
    model.train(train)
    for _, module, name, _ in chances:
        setattr(module, name, 0.0)
    try:
        with warnings.catch_warnings():
            # The reentrant kind of checkpointing misses the gradients that are not computed here.
            warnings.filterwarnings("ignore", message="None of the inputs have requires_grad=True")
            yield
    finally:
        for _, module, name, value in chances:
            setattr(module, name, value)
        for module, training in modes:
            module.training = training
