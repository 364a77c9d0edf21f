"""Seconds and tokens of an update of `train_prm` on solutions of a few prompts: rows shuffled, and the rows of a prompt
together (`--train.group_prompts_enable`), both packed; JSON on the last line.

python benchmarks/prm_step.py [--kinds text image] [--prompts 64] [--output benchmarks/results/prm_step.json]

The learning rate is 0, so that both keep the same weights.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from machine import machine_name

from lmm_r1 import cpu

if TYPE_CHECKING:
    from lmm_r1.data.preferences import StepRow
    from lmm_r1.supervised.prm import PRMRun

# By kind: words of text in the prompt, and the side of its image (28 x 28 pixels to a token).
KINDS: dict[str, tuple[int, int | None]] = {"text": (60, None), "image": (60, 560)}
STEPS, WORDS = 4, 30
SOLUTIONS = 8
WAYS: dict[str, dict[str, object]] = {"shuffled": {}, "grouped": {"train.group_prompts_enable": True}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden-size", type=int, default=256, help="width of the tiny Qwen2.5-VL")
    parser.add_argument("--layers", type=int, default=4, help="its layers")
    parser.add_argument(
        "--kinds", nargs="+", choices=list(KINDS), default=list(KINDS), help="what the prompts are like"
    )
    parser.add_argument("--prompts", type=int, default=64, help=f"prompts, each with {SOLUTIONS} solutions")
    parser.add_argument("--batch", type=int, default=16, help=f"rows of an update, in passes of {SOLUTIONS}")
    parser.add_argument("--repeats", type=int, default=3, help="updates that are measured, in turns")
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
    """Return what both ways take for every kind of prompts."""
    import torch
    from train_batches import build_tiny_checkpoint

    from lmm_r1.host.strategy import default_to_one_process
    from lmm_r1.lmm_kits import get_kit

    build_tiny_checkpoint(get_kit("qwen2_5_vl"), folder, hidden_size=arguments.hidden_size, layers=arguments.layers)
    default_to_one_process()
    kinds = []
    for kind in arguments.kinds:
        rows = rows_of(kind, prompts=arguments.prompts)
        runs = {way: made_run(folder, way, rows, batch=arguments.batch) for way in WAYS}
        kinds.append({"kind": kind, **measure_runs(runs, repeats=arguments.repeats)})
        print(json.dumps(kinds[-1]), file=sys.stderr)
    return {
        "benchmark": "prm_step",
        "machine": machine_name(),
        "threads": torch.get_num_threads(),
        "solutions": SOLUTIONS,
        "prompts": arguments.prompts,
        "rows": arguments.batch,
        "kinds": kinds,
    }


def rows_of(kind: str, *, prompts: int) -> list[StepRow]:
    """Return the solutions of prompts that all differ, in random words."""
    from PIL import Image

    from lmm_r1.data.messages import ImagePart, Message, TextPart
    from lmm_r1.data.preferences import StepRow

    noise = random.Random(0)
    words, side = KINDS[kind]

    def text(count: int) -> str:
        return " ".join(str(noise.randrange(10)) for _ in range(count))

    rows = []
    for number in range(prompts):
        image = () if side is None else (ImagePart(Image.new("RGB", (side, side), (number, 3 * number, 128))),)
        asked = Message(role="user", parts=(*image, TextPart(text(words))))
        rows += [
            StepRow(
                messages=(asked,),
                steps=tuple(text(noise.randrange(WORDS // 2, WORDS)) for _ in range(STEPS)),
                labels=tuple(float(noise.random() < 0.5) for _ in range(STEPS)),
                location=f"prompt {number}",
            )
            for _ in range(SOLUTIONS)
        ]
    return rows


def made_run(folder: Path, way: str, rows: list[StepRow], *, batch: int) -> PRMRun:
    """Return a run of one of the ways, in single precision."""
    from lmm_r1 import dotted
    from lmm_r1.config import PRMConfig, resolve
    from lmm_r1.host.strategy import make_strategy
    from lmm_r1.lifecycle.stopping import StopRequests
    from lmm_r1.lmm_kits import Checkpoint
    from lmm_r1.records.run_folder import RunFolder
    from lmm_r1.records.trackers import Trackers
    from lmm_r1.supervised.models import Session
    from lmm_r1.supervised.prm import PRMRun, StepEncoder

    flags: dict[str, object] = {
        "model.model_name_or_path": str(folder),
        "model.placeholder_token": "*",
        "data.dataset": "none",
        "train.batch_size": batch,
        "train.micro_batch_size": SOLUTIONS,
        "ds.param_dtype": "fp32",
        "ds.packing_samples": True,
        "adam.lr": 0.0,
    }
    config = resolve(dotted.replace(PRMConfig(), flags | WAYS[way]))
    checkpoint = Checkpoint(str(folder))
    strategy = make_strategy(config)
    strategy.setup_distributed()
    session = Session(
        config=config,
        checkpoint=checkpoint,
        strategy=strategy,
        folder=RunFolder(path=Path(config.ckpt.output_dir), name=config.logger.stage_name, kind=PRMRun.kind),
        stops=StopRequests(),
        trackers=Trackers(),
        steps=1,
    )
    encode = StepEncoder.of(config, kit=checkpoint.kit, processor=checkpoint.processor)
    first = encode(rows[0])
    assert first is not None, "shorter than --data.max_len"
    run = PRMRun.of(session, rows=rows, encode=encode, filler=first.filler)
    run.actor.train()
    # The first update makes the optimizer's state, for which no measured one shall pay.
    run._update([run.collate([first])])
    return run


def measure_runs(runs: dict[str, PRMRun], *, repeats: int) -> dict[str, Any]:
    """Return tokens and seconds of updates, encoding apart."""
    seconds: dict[str, list[float]] = {way: [] for way in runs}
    tokens: dict[str, list[int]] = {way: [] for way in runs}
    given: dict[str, list[int]] = {way: [] for way in runs}
    for step in range(repeats):
        for way, run in runs.items():
            batches = run._micro_batches(step)
            given[way].append(sum(int(batch.tokens.attention_mask.sum()) for batch in batches))
            run.actor.computed_tokens = 0
            began = time.perf_counter()
            run._update(batches)
            seconds[way].append(time.perf_counter() - began)
            tokens[way].append(run.actor.computed_tokens)
    ways = {
        way: {
            "tokens_of_rows": round(statistics.mean(given[way])),
            "tokens_computed": round(statistics.mean(tokens[way])),
            "seconds": round(statistics.median(seconds[way]), 3),
        }
        for way in runs
    }
    pairs = zip(seconds["shuffled"], seconds["grouped"], strict=True)
    return {"ways": ways, "ratio": round(statistics.median(one / other for one, other in pairs), 2)}


if __name__ == "__main__":
    main()
