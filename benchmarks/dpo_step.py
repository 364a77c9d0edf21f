"""Seconds of an update of `train_dpo`, its reference's pass included, with what a pair has in common computed once and with
both responses apart; JSON on the last line.

python benchmarks/dpo_step.py [--model DIR] [--kinds text image] [--pairs 2] [--output benchmarks/results/dpo_step.json]

The ways are padded batches, packed sequences in which each response has its own prompt and images, and packed sequences
with shared prefixes. The learning rate is 0, so that all keep the same weights.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from machine import machine_name

from lmm_r1 import cpu

if TYPE_CHECKING:
    from lmm_r1.supervised.dpo import DPORun
    from lmm_r1.supervised.preferences import PairSample

# By kind: tokens of text in the prompt, and the side of its image (28 x 28 tokens for the Qwen-VL kits).
KINDS: dict[str, tuple[int, int | None]] = {"text": (1024, None), "image": (1024, 784)}
RESPONSES = (64, 128)
WAYS: dict[str, dict[str, object]] = {
    "padded": {"train.shared_prefix_enable": False},
    "apart": {"train.shared_prefix_enable": False, "ds.packing_samples": True},
    "shared": {"train.shared_prefix_enable": True},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="checkpoint folder; without it a tiny Qwen2.5-VL is made")
    parser.add_argument("--hidden-size", type=int, default=256, help="width of the tiny model")
    parser.add_argument("--layers", type=int, default=4, help="layers of the tiny model")
    parser.add_argument(
        "--kinds", nargs="+", choices=list(KINDS), default=list(KINDS), help="what the prompts are like"
    )
    parser.add_argument("--pairs", type=int, default=2, help="pairs of an update, in one pass")
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
    """Return what the ways take for every kind of prompts."""
    import torch
    from train_batches import build_tiny_checkpoint

    from lmm_r1.host.strategy import default_to_one_process
    from lmm_r1.lmm_kits import Checkpoint, get_kit

    if arguments.model is None:
        build_tiny_checkpoint(
            get_kit("qwen2_5_vl"), folder, hidden_size=arguments.hidden_size, layers=arguments.layers
        )
    else:
        folder = arguments.model
    checkpoint = Checkpoint(str(folder))
    default_to_one_process()
    kinds = {
        kind: pairs_of(checkpoint, kind, count=arguments.pairs, scale=arguments.scale) for kind in arguments.kinds
    }
    runs = {
        way: made_run(checkpoint, way, filler=kinds[arguments.kinds[0]][0].filler, pairs=arguments.pairs)
        for way in WAYS
    }
    # The first step makes the optimizer's state, for which no measured one shall pay.
    small = pairs_of(checkpoint, "text", count=arguments.pairs, scale=0.1)
    for run in runs.values():
        update(run, small)
    batches = []
    for kind, pairs in kinds.items():
        measured = measure_pairs(runs, pairs, repeats=arguments.repeats)
        batches.append({"kind": kind, **measured})
        print(json.dumps({"kind": kind, "ratio": measured["ratio"]}), file=sys.stderr)
    weights = list(runs["shared"].actor.model.module.parameters())
    return {
        "benchmark": "dpo_step",
        "machine": machine_name(),
        "threads": torch.get_num_threads(),
        "model": {"type": checkpoint.kit.model_type, "parameters": sum(weight.numel() for weight in weights)},
        "ratio": min(batch["ratio"] for batch in batches),
        "batches": batches,
    }


def pairs_of(checkpoint: Any, kind: str, *, count: int, scale: float) -> list[PairSample]:
    """Return pairs of random responses to prompts that all differ."""
    import torch
    from train_batches import GroupSizes, ordinary_tokens, prompt_of

    from lmm_r1.supervised.preferences import PairSample
    from lmm_r1.supervised.samples import SFTSample

    kit, processor = checkpoint.kit, checkpoint.processor
    text, side = KINDS[kind]
    sizes = GroupSizes(
        prompt_tokens=round(scale * text),
        responses=RESPONSES,
        image_side=None if side is None else max(56, round(scale**0.5 * side)),
    )
    noise, generator = random.Random(0), torch.Generator().manual_seed(0)
    ordinary = ordinary_tokens(kit, processor, checkpoint.config)
    pairs = []
    for _ in range(count):
        prompt = prompt_of(kit, processor, sizes, noise=noise)
        sides = []
        for length in RESPONSES:
            tokens = max(1, round(scale * length))
            response = ordinary[torch.randint(len(ordinary), (tokens,), generator=generator)].tolist()
            mask = [False] * len(prompt.token_ids) + [True] * tokens
            sides.append(SFTSample(token_ids=[*prompt.token_ids, *response], loss_mask=mask, media=prompt.media))
        pairs.append(PairSample(chosen=sides[0], rejected=sides[1]))
    return pairs


def made_run(checkpoint: Any, way: str, *, filler: PairSample, pairs: int) -> DPORun:
    """Return a run of one of the ways, in single precision, with a reference model of its own."""
    from lmm_r1 import dotted
    from lmm_r1.config import DPOConfig, resolve
    from lmm_r1.host.strategy import make_strategy
    from lmm_r1.lifecycle.stopping import StopRequests
    from lmm_r1.records.run_folder import RunFolder
    from lmm_r1.records.trackers import Trackers
    from lmm_r1.supervised.dpo import DPORun
    from lmm_r1.supervised.models import Session
    from lmm_r1.supervised.preferences import PairEncoder

    flags: dict[str, object] = {
        "model.model_name_or_path": checkpoint.path,
        "data.dataset": "none",
        "data.max_len": 512,
        "train.batch_size": pairs,
        "train.micro_batch_size": pairs,
        "ds.param_dtype": "fp32",
        "adam.lr": 0.0,
    }
    config = resolve(dotted.replace(DPOConfig(), flags | WAYS[way]))
    strategy = make_strategy(config)
    strategy.setup_distributed()
    session = Session(
        config=config,
        checkpoint=checkpoint,
        strategy=strategy,
        folder=RunFolder(path=Path(config.ckpt.output_dir), name=config.logger.stage_name, kind=DPORun.kind),
        stops=StopRequests(),
        trackers=Trackers(),
        steps=1,
    )
    encode = PairEncoder.of(config, kit=checkpoint.kit, processor=checkpoint.processor)
    run = DPORun.of(session, rows=[], encode=encode, filler=filler)
    run.actor.train()
    return run


def update(run: DPORun, pairs: Sequence[PairSample]) -> dict[str, float]:
    """Make an update and return what is logged of it."""
    loss, _ = run._update([run.collate(pairs)])
    return {"loss": loss, **run.means}


def measure_pairs(runs: dict[str, DPORun], pairs: Sequence[PairSample], *, repeats: int) -> dict[str, Any]:
    """Return sizes, seconds and differences of all ways for one batch of pairs."""
    ways: dict[str, dict[str, Any]] = {}
    logged = {}
    for way, run in runs.items():
        run.actor.computed_tokens = 0
        logged[way] = update(run, pairs)
        ways[way] = {"tokens_computed": run.actor.computed_tokens}
    times: list[dict[str, float]] = []
    for repeat in range(repeats):
        names = list(runs)
        row = {}
        for way in [*names[repeat % len(names) :], *names[: repeat % len(names)]]:
            began = time.perf_counter()
            update(runs[way], pairs)
            row[way] = time.perf_counter() - began
        times.append(row)
    for way, found in ways.items():
        found["seconds"] = round(statistics.median(row[way] for row in times), 4)
    # Of two updates one after the other, so that what slows the machine down for a while hits both.
    ratios = {way: statistics.median(row[way] / row["shared"] for row in times) for way in ("padded", "apart")}
    masks = [sample.chosen.loss_mask for sample in pairs]
    return {
        "pairs": len(pairs),
        "prompt_tokens": [mask.index(True) for mask in masks],
        "response_tokens": [sum(pairs[0].chosen.loss_mask), sum(pairs[0].rejected.loss_mask)],
        "ways": ways,
        "ratio": round(ratios["apart"], 2),
        "ratio_to_padded": round(ratios["padded"], 2),
        "max_difference": {
            name: max(abs(logged[way][name] - logged["shared"][name]) for way in runs) for name in logged["shared"]
        },
    }


if __name__ == "__main__":
    main()
