"""What packed training does on a GPU, in stages of less than ten minutes; the JSON is whole after every result.

python benchmarks/gpu_check.py --stages a b --output gpu_check.json
python benchmarks/gpu_check.py --stages c --output gpu_check.json
python benchmarks/gpu_check.py --stages d --output gpu_check.json
python benchmarks/gpu_check.py --stages e --output gpu_check.json

The stages:
    a  what the device copies and multiplies at most; every kit's passes in fp32 and bf16 against fp32 on the CPU
    b  full width, 4 layers: log-probs, and gradients of the keys and values of a prompt that responses share
    c  Qwen2.5-VL-3B's shape, random weights, checkpointing, an image of 1,024 tokens, 16 responses of 1,024: padded, packed
       and shared prefix, logits whole or in chunks, the vision tower in a loop or in one call: seconds, use, memory, kernels
    d  passes of 8k, 16k and 32k tokens, and the most tokens on a card of 80 GB
    e  6 GB of weights to another process by CUDA IPC; optimizer steps; whole updates under ZeRO-2 and ZeRO-3

Each command ends within `--budget_s` (540 s), and writes into the file what it left out: give it again for the rest. Results
in the file are not measured again, failures included (out of memory, a missing package, a kernel's error), unless `--again`
is given.

Utilisation is the operations that the unique tokens need (`gpu_stages/operations.py`), of the device's dense bf16 peak.
Needs PyTorch, transformers, Pillow and this repository, which need not be installed; only stage e uses OpenRLHF and
DeepSpeed, if they are installed. `--device cpu --scale 0.03` tries the stages on a CPU. Ends with code 1 if a kit's passes
disagree or fail.
"""

from __future__ import annotations

import argparse
import inspect
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from machine import ROOT, machine_facts
from measuring import parser_of

# The repository's own packages, on a machine where they are not installed.
sys.path.append(str(ROOT))

if TYPE_CHECKING:
    from gpu_stages.record import Clock, Record
    from gpu_stages.setting import Device

STAGES = ("a", "b", "c", "d", "e")


def main(argv: list[str] | None = None) -> None:
    began = time.perf_counter()
    arguments = parse(argv)
    # After the flags, so that --help is quick, and what importing takes counts.
    from gpu_stages.record import Clock, Record
    from gpu_stages.setting import Device

    from lmm_r1.errors import UserError

    try:
        device = Device.of(arguments.device, peak_tflops=arguments.peak_tflops)
        header = {**facts(device), "scale": arguments.scale}
        record = Record(arguments.output, header=header, again=arguments.again)
    except UserError as error:
        raise SystemExit(str(error)) from None
    with tempfile.TemporaryDirectory() as folder:
        measure(arguments, record, Clock(began=began, budget=arguments.budget_s), device, Path(folder))
    print(json.dumps(record.content))
    if not agrees(record):
        raise SystemExit(1)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES), help="in the order given")
    parser.add_argument("--budget_s", type=float, default=540.0, help="seconds within which this command shall end")
    parser.add_argument("--again", action="store_true", help="measure what the file holds already, too")
    parser.add_argument("--device", default="cuda", help="cuda or cpu")
    parser.add_argument("--scale", type=float, default=1.0, help="below 1: smaller models, lengths and buffers")
    parser.add_argument("--repeats", type=int, default=3, help="times that each way is measured; the median counts")
    parser.add_argument("--kits", nargs="*", help="kits whose passes are compared; all without it")
    parser.add_argument("--peak-tflops", type=float, help="the device's dense bf16 peak; known for H200, H100, A100")
    return parser.parse_args(argv)


def measure(arguments: argparse.Namespace, record: Record, clock: Clock, device: Device, folder: Path) -> None:
    """Run the stages that were asked for; each one's models are gone before the next begins."""
    import torch
    from gpu_stages import ceilings, optimizers, parity, prefix_gradients, transfer, updates
    from gpu_stages.record import free_memory
    from gpu_stages.setting import Setting

    from lmm_r1.lmm_kits import KITS

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    setting = Setting(
        device=device,
        scale=arguments.scale,
        repeats=arguments.repeats,
        kits=tuple(KITS if arguments.kits is None else arguments.kits),
        folder=folder,
    )
    stages = {
        "a": (ceilings.tasks, parity.tasks),
        "b": (prefix_gradients.tasks,),
        "c": (updates.way_tasks,),
        "d": (updates.pass_tasks,),
        "e": (transfer.tasks, optimizers.tasks),
    }
    for stage in arguments.stages:
        record.run(stage, [task for tasks in stages[stage] for task in tasks(setting)], clock=clock)
        free_memory()


def facts(device: Device) -> dict[str, Any]:
    """Return what the results depend on: the machine, its versions, and what the attention kernel takes."""
    import torch

    total = torch.cuda.get_device_properties(device.place).total_memory if device.is_cuda else None
    return {
        **machine_facts(),
        "device": device.name,
        "device_gib": None if total is None else round(total / 2**30, 1),
        "peak_tflops": None if device.peak is None else device.peak / 1e12,
        "cuda": torch.version.cuda,
        "varlen_attn": varlen_parameters(),
    }


def varlen_parameters() -> list[str] | None:
    """Return the names of what PyTorch's kernel for sequences of varying length takes; None where there is none."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return list(inspect.signature(varlen_attn).parameters)


def agrees(record: Record) -> bool:
    """Whether each kit's passes that were compared agree with the CPU's."""
    results = record.content["stages"].get("a", {"results": {}})["results"]
    parity = [result for name, result in results.items() if name.startswith("parity/")]
    return all(result.get("judgement") == "agrees" for result in parity)


if __name__ == "__main__":
    main()
