"""Operators and bytes of an update of Qwen2.5-VL-3B's shape, on no device: tensors without memory. JSON on the last line.

python benchmarks/update_operations.py [--ways plain fused] [--samples 16] [--output FILE]

One group of one image of 1,024 tokens and responses of 1,024 tokens, with shared prefix, checkpointing and log-probs in
chunks, as `gpu_check.py --stages c` measures on a GPU. Each operator of PyTorch that computes or copies counts as one, as
does each call of a fused kernel: Liger's, attention's. A GPU starts some operators as several kernels. `plain` is the model
without Liger's kernels, `fused` with them. Bytes are those of all inputs and outputs, each read or written once.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from machine import ROOT
from measuring import parser_of, publish

# The repository's own packages, on a machine where they are not installed.
sys.path.append(str(ROOT))

if TYPE_CHECKING:
    from gpu_stages.record import Result

WAYS = ("plain", "fused")


def main(argv: list[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="what is counted")
    parser.add_argument("--samples", type=int, default=16, help="responses of the group")
    parser.add_argument("--scale", type=float, default=1.0, help="below 1: a smaller model and shorter responses")
    arguments = parser.parse_args(argv)
    result = {"benchmark": "update_operations", "samples": arguments.samples, "scale": arguments.scale, "ways": {}}
    for way in arguments.ways:
        began = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            result["ways"][way] = counted(way, Path(folder), samples=arguments.samples, scale=arguments.scale)
        print(f"{way}: {time.perf_counter() - began:.0f} s", file=sys.stderr)
    publish(result, arguments.output)


def counted(way: str, folder: Path, *, samples: int, scale: float) -> Result:
    """Return what one pass of the update, forwards and backwards, starts and moves."""
    from dataclasses import replace

    import torch
    from gpu_stages.operators import OperatorCount, stand_in_attention, stand_in_liger, update_without_values
    from gpu_stages.setting import Device
    from gpu_stages.subject import GROUP, Shape, make_subject

    from lmm_r1.models.liger import fuse

    device = Device(place=torch.device("meta"), name="none", peak=None)
    subject = make_subject(Shape().scaled(scale), folder / "subject", device, dtype=torch.bfloat16, checkpointing=True)
    # The batch is made on the CPU.
    banned = subject.policy.kit.media_token_ids(subject.policy.model.config, subject.processor.tokenizer)
    sampler = replace(subject.policy.sampler, banned_token_ids=torch.tensor(sorted(banned)))
    subject = replace(subject, policy=replace(subject.policy, sampler=sampler))
    batch = subject.batch(GROUP.scaled(scale), samples=samples)
    count = OperatorCount()
    modules: dict[str, int] = {}
    # Some of Liger's functions are imported by the pass.
    with stand_in_attention(count), stand_in_liger(count):
        if way == "fused":
            modules = dict(fuse(subject.policy.model))
        with count:
            update_without_values(subject, batch)
    return {**count.result(), "fused_modules": modules, "unique_tokens": batch.unique_tokens}


if __name__ == "__main__":
    main()
