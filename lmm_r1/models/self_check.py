"""The check at start-up: three small samples through the real model, in one packed row and one by one.

What goes wrong with packed rows goes wrong without an error: a model that takes a row for one sample, or counts its
positions on, just gives other results, which are off by as much as results differ from one another.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from transformers import PretrainedConfig

from lmm_r1.errors import UserError
from lmm_r1.lmm_kits import Media
from lmm_r1.models.actor import KitActor
from lmm_r1.models.kit_module import KitModule

# How far the results of a sample may be off in the mean, in standard deviations of all results. In bfloat16, rounding
# made up to 0.03 (28 layers, random weights), and a mask or positions that were wrong 0.24 and more.
SINGLE_PRECISION, HALF_PRECISION = 1e-3, 0.15
# Tokens of text on either side of the image, and of the two responses behind it; of the other prompt and its response.
AROUND, RESPONSES, OTHER_PROMPT, OTHER_RESPONSE = 4, (6, 3), 5, 4


@dataclass(frozen=True, kw_only=True)
class _Sample:
    prompt: list[int]
    response: list[int]
    media: Media | None


def check_packing(
    model: KitModule,
    *,
    run: Callable[..., torch.Tensor] | None = None,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Raise UserError where a model that runs on packed rows gives other results than for every sample by itself.

    Every rank must call it: all run the model equally often, and all of them raise or none.

    Args:
        run: what is called in the place of the model, where DeepSpeed's engine is around all of it.
        group: the ranks that share the tokens of a row.
    """
    if not model.packing_samples:
        return
    run = run or model
    samples = _samples(model)
    for mode in ("evaluation", "training"):
        with _fixed(model.model, train=mode == "training"), torch.no_grad():
            together = _results(model, run, samples, group=group)
            model.packing_samples = False
            try:
                alone = [result for sample in samples for result in _results(model, run, [sample], group=None)]
            finally:
                model.packing_samples = True
        _compare(model, together, alone, mode=mode)


def _samples(model: KitModule) -> list[_Sample]:
    """Return two samples of one prompt, with an image where the model takes any, and one of another between them."""
    # Log-probs of banned tokens lie far from all others.
    banned = model.banned_token_ids.tolist() if isinstance(model, KitActor) else []
    text = _text_ids(model.model_config, banned=banned)
    ids, media = ([], None) if model.kit.filler_media is None else model.kit.filler_media(model.model_config)
    prompt = [*text(AROUND), *ids, *text(AROUND)]
    first, second = (_Sample(prompt=prompt, response=text(length), media=media) for length in RESPONSES)
    return [first, _Sample(prompt=text(OTHER_PROMPT), response=text(OTHER_RESPONSE), media=None), second]


def _text_ids(config: PretrainedConfig, *, banned: Sequence[int]) -> Callable[[int], list[int]]:
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


def _results(
    model: KitModule,
    run: Callable[..., torch.Tensor],
    samples: Sequence[_Sample],
    *,
    group: dist.ProcessGroup | None,
) -> list[torch.Tensor]:
    """Return what the model gives for the tokens of each sample's response, (L,) each."""
    width = max(len(sample.prompt) + len(sample.response) for sample in samples)
    sequences, mask, wanted = torch.zeros(3, len(samples), width, dtype=torch.long)
    for row, sample in enumerate(samples):
        start, end = len(sample.prompt), len(sample.prompt) + len(sample.response)
        sequences[row, :end] = torch.tensor([*sample.prompt, *sample.response])
        mask[row, :end] = 1
        wanted[row, start:end] = 1
    wanted = wanted[:, 1:]
    # Weights may be elsewhere: an engine knows where it computes.
    device = (model.model if run is model else run).device
    results = run(
        sequences.to(device),
        wanted.to(device),
        attention_mask=mask.to(device),
        media=[sample.media for sample in samples],
        ring_attn_group=group,
    )
    return [row[learnt.bool()].float() for row, learnt in zip(results, wanted, strict=True)]


def _compare(model: KitModule, together: Sequence[torch.Tensor], alone: Sequence[torch.Tensor], *, mode: str) -> None:
    spread = torch.cat(list(alone)).std()
    errors = torch.stack([(one - other).abs().mean() for one, other in zip(together, alone, strict=True)])
    # What is no number is off, whatever by.
    off = torch.nan_to_num(errors.max() / spread.clamp(min=1e-30), nan=torch.inf)
    if dist.is_initialized():
        dist.all_reduce(off, op=dist.ReduceOp.MAX)
    half = next(model.model.parameters()).dtype in (torch.bfloat16, torch.float16)
    tolerance = HALF_PRECISION if half else SINGLE_PRECISION
    if off <= tolerance:
        return
    flags = "leave --ds.packing_samples out"
    if model.share_prefix:
        flags += " and give --train.no_shared_prefix_enable"
    raise UserError(
        f"{model.model_config.name_or_path}: {model.model_config.model_type} does not run on packed rows here. In "
        f"{mode} mode, the results of three small samples in one row are off by {off:.2g} standard deviations from those "
        f"of each sample by itself, and rounding makes less than {tolerance:g}; {flags}"
    )


@contextmanager
def _fixed(model: torch.nn.Module, *, train: bool) -> Iterator[None]:
    """Put a model into training or evaluation mode with nothing left to chance, and take it back afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    chances = [
        (module, name, value)
        for module in model.modules()
        for name, value in vars(module).items()
        if isinstance(value, float) and _is_chance(module, name)
    ]
    model.train(train)
    for module, name, _ in chances:
        setattr(module, name, 0.0)
    try:
        with warnings.catch_warnings():
            # The reentrant kind of checkpointing misses the gradients that are not computed here.
            warnings.filterwarnings("ignore", message="None of the inputs have requires_grad=True")
            yield
    finally:
        for module, name, value in chances:
            setattr(module, name, value)
        for module, training in modes:
            module.training = training


def _is_chance(module: torch.nn.Module, name: str) -> bool:
    """Whether an attribute is the probability of a dropout or the strength of a noise."""
    return any(word in name for word in ("drop", "jitter", "noise")) or (
        name == "p" and "Dropout" in type(module).__name__
    )
