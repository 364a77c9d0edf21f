"""The check at start-up: three samples through the real model, in one packed sequence and one by one.

What goes wrong with packing goes wrong without an error: a model that takes a packed sequence for one sample, or counts
its positions on, just gives other results, which are off by as much as results differ from one another.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from lmm_r1.errors import UserError
from lmm_r1.models.chances import settings_of_chance
from lmm_r1.models.kit_module import KitModule
from lmm_r1.models.packed.check_samples import CheckSample, check_samples, longest_that_fits

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

# How far the results of a sample may be off in the mean, in standard deviations of all results. In bfloat16, rounding
# made up to 0.03 (28 layers, random weights), and a mask or positions that were wrong 0.24 and more.
SINGLE_PRECISION, HALF_PRECISION = 1e-3, 0.15
# What is off at the start of responses alone would be lost in the mean over long ones: so many tokens also count alone.
START = 8
# A forward that is repeated may differ by this share of what is allowed between two that round differently.
REPEATED = 1e-2

logger = logging.getLogger(__name__)


def check_packing(
    model: KitModule,
    *,
    run: DeepSpeedEngine | None = None,
    group: dist.ProcessGroup | None = None,
    longest: int = 0,
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
    first = None
    for mode in ("evaluation", "training"):
        with _fixed(model.model, train=mode == "training"), model.computing_images(), torch.no_grad():
            if first is None:
                first = _results(model, run, samples, group=group)
            together = _results(model, run, samples, group=group)
            model.packing_samples = False
            try:
                alone = [result for sample in samples for result in _results(model, run, [sample], group=None)]
            finally:
                model.packing_samples = True
        if mode == "evaluation":
            _compare_repeated(model, first, together)
        _compare(model, together, alone, mode=mode)


def _results(
    model: KitModule,
    run: DeepSpeedEngine | None,
    samples: Sequence[CheckSample],
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
    device = (model.model if run is None else run).device
    results = (model if run is None else run)(
        sequences.to(device),
        wanted.to(device),
        attention_mask=mask.to(device),
        media=[sample.media for sample in samples],
        ring_attn_group=group,
    )
    return [row[mask.bool()].float() for row, mask in zip(results, wanted, strict=True)]


def _compare(model: KitModule, together: Sequence[torch.Tensor], alone: Sequence[torch.Tensor], *, mode: str) -> None:
    off, tolerance = _off(together, alone), _tolerance(model)
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


def _compare_repeated(model: KitModule, first: Sequence[torch.Tensor], again: Sequence[torch.Tensor]) -> None:
    """Warn where the model's first forward gave other results than the same one again."""
    off = _off(first, again)
    if off > REPEATED * _tolerance(model):
        logger.warning(
            "%s: the first forward is off by %.2g standard deviations from the same one again; what this machine "
            "computes does not repeat, and no seed makes it",
            model.model_config.name_or_path,
            off,
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


def _tolerance(model: KitModule) -> float:
    half = next(model.model.parameters()).dtype in (torch.bfloat16, torch.float16)
    return HALF_PRECISION if half else SINGLE_PRECISION


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
