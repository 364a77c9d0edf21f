"""Seconds of the policy's update on episodes that branch, in three ways; JSON on the last line.

python benchmarks/trees.py [--model DIR] [--kinds text crops] [--branches 16] [--output benchmarks/results/trees.json]

The ways are every branch by itself, packed; with the prompt in common alone; and with the turns in common, too. The branches
of an episode of four turns have three of them in common, with what they are shown behind them: text, or pictures.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from machine import machine_name
from memory import peak_bytes
from train_step import times_of

from lmm_r1 import cpu
from lmm_r1.data.prefix_tree import PrefixNode, TreeSample

if TYPE_CHECKING:
    from branch_batches import BranchBatch
    from policy_updates import PolicyUpdate

WAYS = ("separate", "prompt", "tree")


@dataclass(frozen=True, kw_only=True)
class Way:
    """One of the ways to compute branches."""

    way: str
    own: PolicyUpdate
    prompt_alone: bool
    """Whether branches share their prompt and no turns."""

    def run(self, compute: Callable[[PolicyUpdate], Any]) -> Any:
        """Return what is computed in this way."""
        with _prompts_shared() if self.prompt_alone else nullcontext():
            return compute(self.own)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="checkpoint folder; without it a tiny Qwen2.5-VL is made")
    parser.add_argument("--hidden-size", type=int, default=256, help="width of the tiny model")
    parser.add_argument("--layers", type=int, default=4, help="layers of the tiny model")
    parser.add_argument("--kinds", nargs="+", choices=("text", "crops"), default=["text", "crops"])
    parser.add_argument("--branches", type=int, default=16, help="branches of the episode")
    parser.add_argument("--turns", type=int, default=4, help="turns of each branch")
    parser.add_argument("--shared-turns", type=int, default=3, help="how many of them are in common")
    parser.add_argument("--repeats", type=int, default=5, help="times that each way is measured, in turns")
    parser.add_argument(
        "--scale", type=float, default=1.0, help="lengths and the areas of pictures are multiplied by it"
    )
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
    """Return what the ways take for every kind of episodes."""
    import torch
    from branch_batches import branches_of, sizes_of
    from policy_updates import load_updates
    from train_batches import build_tiny_checkpoint

    from lmm_r1.lmm_kits import get_kit, kit_of

    if arguments.model is None:
        kit = get_kit("qwen2_5_vl")
        build_tiny_checkpoint(kit, folder, hidden_size=arguments.hidden_size, layers=arguments.layers)
    else:
        folder = arguments.model
        kit = kit_of(str(folder), trust_remote_code=False)
    processor = kit.load_processor(str(folder), trust_remote_code=False)
    config = kit.load_config(str(folder), trust_remote_code=False)
    updates = {update.way: update for update in load_updates(kit, folder)}
    ways = [
        Way(way=way, own=updates["packed" if way == "separate" else "shared"], prompt_alone=way == "prompt")
        for way in WAYS
    ]
    episodes = []
    for kind in arguments.kinds:
        batch = branches_of(
            kit,
            processor,
            config,
            sizes_of(kind, scale=arguments.scale),
            branches=arguments.branches,
            turns=arguments.turns,
            shared_turns=arguments.shared_turns,
        )
        episodes.append({"kind": kind, **measure_batch(ways, batch, repeats=arguments.repeats)})
        print(json.dumps({"kind": kind, **episodes[-1]["speedup_of_tree"]}), file=sys.stderr)
    weights = ways[0].own.actor.model.module
    return {
        "benchmark": "trees",
        "machine": machine_name(),
        "threads": torch.get_num_threads(),
        "model": {"type": kit.model_type, "parameters": sum(weight.numel() for weight in weights.parameters())},
        "branches": arguments.branches,
        "turns": arguments.turns,
        "shared_turns": arguments.shared_turns,
        "episodes": episodes,
    }


def measure_batch(ways: Sequence[Way], batch: BranchBatch, *, repeats: int) -> dict[str, Any]:
    """Return tokens, patches, seconds, memory and differences of all ways for one batch of branches."""
    import torch

    generator = torch.Generator().manual_seed(0)
    advantages = torch.randn(len(batch.sequences), 1, generator=generator).expand(batch.action_mask.shape)
    old = ways[0].run(lambda own: own.log_probs(batch))
    old = old + 0.1 * torch.randn(old.shape, generator=generator)

    def update(way: Way) -> float:
        return way.run(lambda own: own.update(batch, old=old, advantages=advantages))

    def log_probs(way: Way) -> torch.Tensor:
        return way.run(lambda own: own.log_probs(batch))

    for way in ways:
        # The first step makes the optimizer's state.
        update(way)
    found: dict[str, dict[str, float]] = {}
    for way in ways:
        peak = peak_bytes(partial(update, way))
        passed = way.own.passed
        found[way.way] = {
            "tokens_computed": passed["input_ids"].numel(),
            "patches_computed": sum(len(tensor) for tensor in passed.values() if tensor.is_floating_point()),
            "update_peak_mib": round(peak / 2**20),
        }
    speedups = {}
    for name, run in (("update", update), ("no_grad", log_probs)):
        times = times_of(ways, run, repeats=repeats)
        for way in ways:
            found[way.way][f"{name}_seconds"] = round(statistics.median(row[way.way] for row in times), 4)
        for way in ways[:-1]:
            ratio = statistics.median(row[way.way] / row[ways[-1].way] for row in times)
            speedups[f"{name}_over_{way.way}"] = round(ratio, 2)
    return {
        "prompt_tokens": batch.prompt_lengths[0],
        "turn_tokens": list(batch.turn_lengths),
        "unique_tokens": batch.unique_tokens,
        "ways": found,
        "speedup_of_tree": speedups,
        "max_difference": differences_of(ways, batch, advantages=advantages),
    }


def differences_of(ways: Sequence[Way], batch: BranchBatch, *, advantages: Any) -> dict[str, float]:
    """Return how far any way is from separate branches: log-probs, and gradients relative to all of them."""
    log_probs, gradients = [], []
    for way in ways:
        log_probs.append(way.run(lambda own: own.log_probs(batch)))
        gradients.append(way.run(lambda own: own.gradients(batch, advantages=advantages)))
    return {
        "log_probs": max(float((other - log_probs[0]).abs().max()) for other in log_probs[1:]),
        "gradients": max(float((other - gradients[0]).norm() / gradients[0].norm()) for other in gradients[1:]),
    }


@contextmanager
def _prompts_shared() -> Iterator[None]:
    """Let samples of one prompt have that in common and nothing else."""
    from lmm_r1.models.packed import packing

    def prompt_and_responses(samples: Sequence[TreeSample], *, known: int) -> tuple[PrefixNode, ...]:
        root = PrefixNode(start=0, end=known, parent=None, samples=tuple(range(len(samples))))
        return (
            root,
            *(
                PrefixNode(start=known, end=len(sample.token_ids), parent=0, samples=(number,))
                for number, sample in enumerate(samples)
            ),
        )

    whole = packing.prefix_tree
    packing.prefix_tree = prompt_and_responses
    try:
        yield
    finally:
        packing.prefix_tree = whole


if __name__ == "__main__":
    main()
