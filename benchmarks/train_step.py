"""Seconds and memory of the policy's update and of its pass without gradients, in four ways; JSON on the last line.

python benchmarks/train_step.py [--model DIR] [--kinds text image mixed] [--samples 4 8 16] \\
    [--output benchmarks/results/train_step.json]

The ways are OpenRLHF's own actor on the padded batch, ours on the padded batch, ours on packed sequences, and ours on packed
sequences with shared prefixes. A batch is one group: of text or with an image-heavy prompt; or one of each.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from machine import machine_name
from measuring import median_ratio, medians, parser_of, publish, times_in_turns
from memory import peak_bytes

from lmm_r1 import cpu
from lmm_r1.data.sample import placed

if TYPE_CHECKING:
    from policy_updates import PolicyUpdate
    from train_batches import GroupBatch

KINDS = ("text", "image", "mixed")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", type=Path, help="checkpoint folder; without it a tiny Qwen2.5-VL is made")
    parser.add_argument("--hidden-size", type=int, default=256, help="width of the tiny model")
    parser.add_argument("--layers", type=int, default=4, help="layers of the tiny model")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="what the groups are like")
    parser.add_argument("--samples", type=int, nargs="+", default=[4, 8, 16], help="responses per prompt")
    parser.add_argument("--repeats", type=int, default=5, help="times that each way is measured, in turns")
    parser.add_argument("--scale", type=float, default=1.0, help="lengths and image sides are multiplied by it")
    arguments = parser.parse_args()
    # Before anything imports torch or DeepSpeed.
    cpu.prepare_process()
    with tempfile.TemporaryDirectory() as folder:
        result = measure(arguments, Path(folder) / "model")
    publish(result, arguments.output)


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return what the ways take for every kind of groups and number of samples."""
    import torch
    from policy_updates import load_updates
    from train_batches import build_tiny_checkpoint, groups_of, make_batch

    from lmm_r1.lmm_kits import Checkpoint, get_kit

    sizes = {"hidden_size": arguments.hidden_size, "layers": arguments.layers}
    checkpoint = Checkpoint(str(arguments.model or build_tiny_checkpoint(get_kit("qwen2_5_vl"), folder, **sizes)))
    kit, processor, config = checkpoint.kit, checkpoint.processor, checkpoint.config
    updates = load_updates(kit, Path(checkpoint.path))

    def batch_of(kind: str, samples: int, scale: float) -> GroupBatch:
        return make_batch(kit, processor, config, groups=groups_of(kind, scale=scale), samples=samples)

    # First steps make the optimizers' states, which none of the measured batches shall pay for.
    for way in updates:
        small = batch_of("text", 1, 0.1)
        way.update(small, old=torch.zeros(small.action_mask.shape), advantages=torch.ones(small.action_mask.shape))
    batches = []
    for kind in arguments.kinds:
        for samples in arguments.samples:
            batch = batch_of(kind, samples, arguments.scale)
            measured = measure_batch(updates, batch, repeats=arguments.repeats)
            batches.append({"kind": kind, "samples": samples, **measured})
            print(json.dumps({"kind": kind, "samples": samples, **measured["speedup_of_shared"]}), file=sys.stderr)
    weights = updates[0].actor.model.module
    return {
        "benchmark": "train_step",
        "machine": machine_name(),
        "threads": torch.get_num_threads(),
        "model": {
            "type": kit.model_type,
            "parameters": sum(weight.numel() for weight in weights.parameters()),
            "of_vision_tower": sum(
                weight.numel()
                for name, weight in weights.named_parameters()
                if kit.vision_prefixes and name.startswith((*kit.vision_prefixes, *kit.projector_prefixes))
            ),
        },
        "batches": batches,
    }


def measure_batch(updates: Sequence[PolicyUpdate], batch: GroupBatch, *, repeats: int) -> dict[str, Any]:
    """Return sizes, seconds, memory and differences of all ways for one batch."""
    import torch

    generator = torch.Generator().manual_seed(0)
    # One advantage per sample, as rules of reward give it.
    advantages = torch.randn(len(batch.sequences), 1, generator=generator).expand(batch.action_mask.shape)
    old = updates[0].log_probs(batch)
    old += 0.1 * torch.randn(old.shape, generator=generator)

    def update(way: PolicyUpdate) -> float:
        return way.update(batch, old=old, advantages=advantages)

    def log_probs(way: PolicyUpdate) -> torch.Tensor:
        return way.log_probs(batch)

    losses: list[float] = []

    def noted_update(way: PolicyUpdate) -> None:
        losses.append(update(way))

    ways = {}
    for way in updates:
        peak = peak_bytes(partial(noted_update, way))
        ways[way.way] = {**counts_of(way, batch), "update_peak_mib": round(peak / 2**20)}
    speedups = {}
    runs: dict[str, Callable[[PolicyUpdate], object]] = {"update": update, "no_grad": log_probs}
    for name, run in runs.items():
        times = times_in_turns({way.way: partial(run, way) for way in updates}, repeats=repeats)
        for label, seconds in medians(times).items():
            ways[label][f"{name}_seconds"] = round(seconds, 4)
        *others, shared = ([row[way.way] for row in times] for way in updates)
        for way, theirs in zip(updates, others, strict=False):
            speedups[f"{name}_over_{way.way}"] = median_ratio(theirs, shared)
    return {
        "prompt_tokens": list(batch.prompt_lengths),
        "response_tokens": [min(batch.response_lengths), max(batch.response_lengths)],
        "padded_to": batch.sequences.shape[1],
        "unique_tokens": batch.unique_tokens,
        "ways": ways,
        "speedup_of_shared": speedups,
        "max_difference": differences_of(updates, batch, advantages=advantages, losses=losses),
    }


def counts_of(way: PolicyUpdate, batch: GroupBatch) -> dict[str, Any]:
    """Return what reached the model's forward: tokens, patches and bytes of media for each group with an image."""
    tokens = way.passed["input_ids"].numel()
    names = {name for row in batch.media for item in placed(row) for name in item.tensors} & way.passed.keys()
    media = [way.passed[name] for name in sorted(names)]
    groups = len({id(item) for item in batch.media if item is not None})
    return {
        "tokens_computed": tokens,
        "share_of_limit": round(batch.unique_tokens / tokens, 4),
        "patches_computed": sum(len(tensor) for tensor in media if tensor.is_floating_point()),
        "media_bytes_per_group": sum(tensor.nbytes for tensor in media) // max(1, groups),
    }


def differences_of(
    updates: Sequence[PolicyUpdate], batch: GroupBatch, *, advantages: Any, losses: Sequence[float]
) -> dict[str, float]:
    """Return how far any way is from the first: log-probs, the loss, and gradients relative to all of them."""
    first, *others = updates
    log_probs, gradients = first.log_probs(batch), first.gradients(batch, advantages=advantages)
    found: dict[str, list[float]] = {"log_probs": [], "gradients": []}
    for way in others:
        found["log_probs"].append(float((way.log_probs(batch) - log_probs).abs().max()))
        difference = way.gradients(batch, advantages=advantages) - gradients
        found["gradients"].append(float(difference.norm() / gradients.norm()))
    found["policy_loss"] = [abs(loss - losses[0]) for loss in losses[1:]]
    return {name: max(values) for name, values in found.items()}


if __name__ == "__main__":
    main()
