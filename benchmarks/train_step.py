"""Seconds and memory of the policy's update and of its pass without gradients, in four ways; JSON on the last line.

python benchmarks/train_step.py [--model DIR] [--kinds text image mixed] [--samples 4 8 16] \\
    [--output benchmarks/results/train_step.json]

The ways are OpenRLHF's own actor on the padded batch, ours on the padded batch, ours on packed sequences, and ours on packed
sequences with shared prefixes. A batch is one group: of text or with an image-heavy prompt; or one of each.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from machine import machine_name
from memory import peak_bytes

from lmm_r1 import cpu
from lmm_r1.data.sample import placed

if TYPE_CHECKING:
    from policy_updates import PolicyUpdate
    from train_batches import GroupBatch

KINDS = ("text", "image", "mixed")


class Named(Protocol):
    """What one of the ways is called."""

    @property
    def way(self) -> str: ...


WayT = TypeVar("WayT", bound=Named)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="checkpoint folder; without it a tiny Qwen2.5-VL is made")
    parser.add_argument("--hidden-size", type=int, default=256, help="width of the tiny model")
    parser.add_argument("--layers", type=int, default=4, help="layers of the tiny model")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="what the groups are like")
    parser.add_argument("--samples", type=int, nargs="+", default=[4, 8, 16], help="responses per prompt")
    parser.add_argument("--repeats", type=int, default=5, help="times that each way is measured, in turns")
    parser.add_argument("--scale", type=float, default=1.0, help="lengths and image sides are multiplied by it")
    parser.add_argument("--output", type=Path, help="also write the JSON to this file")
    arguments = parser.parse_args()
    # Before anything imports torch or DeepSpeed.
    cpu.prepare_process()
    with tempfile.TemporaryDirectory() as folder:
        result = measure(arguments, Path(folder) / "model")
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return what the ways take for every kind of groups and number of samples."""
    import torch
    from policy_updates import load_updates
    from train_batches import build_tiny_checkpoint, groups_of, make_batch

    from lmm_r1.lmm_kits import get_kit, kit_of

    if arguments.model is None:
        kit = get_kit("qwen2_5_vl")
        build_tiny_checkpoint(kit, folder, hidden_size=arguments.hidden_size, layers=arguments.layers)
    else:
        folder = arguments.model
        kit = kit_of(str(folder), trust_remote_code=False)
    processor = kit.load_processor(str(folder), trust_remote_code=False)
    updates = load_updates(kit, folder)
    config = kit.load_config(str(folder), trust_remote_code=False)

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
    for name, run in (("update", update), ("no_grad", log_probs)):
        times = times_of(updates, run, repeats=repeats)
        for way in updates:
            ways[way.way][f"{name}_seconds"] = round(statistics.median(row[way.way] for row in times), 4)
        for way in updates[:-1]:
            # Of two runs one after the other, so that what slows the machine down for a while hits both.
            ratio = statistics.median(row[way.way] / row[updates[-1].way] for row in times)
            speedups[f"{name}_over_{way.way}"] = round(ratio, 2)
    return {
        "prompt_tokens": list(batch.prompt_lengths),
        "response_tokens": [min(batch.response_lengths), max(batch.response_lengths)],
        "padded_to": batch.sequences.shape[1],
        "unique_tokens": batch.unique_tokens,
        "ways": ways,
        "speedup_of_shared": speedups,
        "max_difference": differences_of(updates, batch, advantages=advantages, losses=losses),
    }


def times_of(ways: Sequence[WayT], run: Callable[[WayT], object], *, repeats: int) -> list[dict[str, float]]:
    """Return the seconds of all ways, in turns, beginning with another one each time."""
    times = []
    for repeat in range(repeats):
        first = repeat % len(ways)
        row = {}
        for way in [*ways[first:], *ways[:first]]:
            began = time.perf_counter()
            run(way)
            row[way.way] = time.perf_counter() - began
        times.append(row)
    return times


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
