"""Predicted memory of update passes against what the process really takes, for eleven small trainings on a CPU.

python benchmarks/plan.py [--cases NAME ...] [--output benchmarks/results/plan.json]
python benchmarks/plan.py --gpus [--output benchmarks/results/plan_gpus.json]

Each training runs in a process of its own: a model is made, loaded and given to DeepSpeed's engine by the strategy of the
trainers, then makes two optimizer steps. Measured is the peak of its resident memory in those steps, above what it had
before the model was loaded; predicted is what `lmm_r1.tools.planning` says of the same settings and batch, from the config alone.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from machine import machine_name
from measuring import parser_of, publish
from memory import forget_peak, resident_bytes, resident_peak

from lmm_r1 import cpu

if TYPE_CHECKING:
    from lmm_r1.models.loading import LoadSettings
    from lmm_r1.models.packed.packing import ModelSample
    from lmm_r1.tools.planning.pass_memory import EmptyModel, PlannedRole

STEPS = 2
MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training."""

    role: PlannedRole = "policy"
    arch: str = "qwen2_5_vl"
    hidden_size: int = 512
    layers: int = 8
    kind: str = "text"
    """Of the groups, see `train_batches`."""
    scale: float = 2.0
    """Of the groups' lengths."""
    samples: int = 4
    param_dtype: str = "fp32"
    checkpointing: bool = False
    lora_rank: int = 0
    freeze_visual_encoder: bool = False
    entropy: bool = False
    zero_stage: int = 2
    passes: int = 1
    """Of one optimizer step."""


CASES = {
    "text": Case(scale=4.0),
    "text, checkpointing": Case(checkpointing=True),
    "text, bf16, two passes": Case(param_dtype="bf16", passes=2, scale=0.25, samples=2),
    "text, 8 samples, checkpointing": Case(scale=4.0, samples=8, checkpointing=True),
    "text, wide": Case(hidden_size=1024, layers=6, scale=1.0, entropy=True),
    "image": Case(kind="image", samples=8),
    "image, bf16, checkpointing": Case(
        kind="image", scale=0.25, samples=2, layers=4, param_dtype="bf16", checkpointing=True
    ),
    "image, LoRA": Case(kind="image", lora_rank=16, hidden_size=768),
    "mixed, frozen vision tower, another architecture": Case(
        arch="gemma3", kind="mixed", freeze_visual_encoder=True, passes=2
    ),
    "critic": Case(role="critic", scale=4.0),
    "critic, ZeRO-3": Case(role="critic", zero_stage=3, checkpointing=True),
}


IMAGE = "--image_pixels 802816"
LORA = "--ds.lora.rank 64"
# Hardware, GPUs, GiB of each and of the machine; what is planned: its stage, model, what is trained, and its flags.
HARDWARE = {"1 x 24 GB": (1, 24, 128), "1 x 80 GB": (1, 80, 256), "8 x 80 GB": (8, 80, 2048)}
RL, SFT = "--actor.model_name_or_path", "train_sft --model.model_name_or_path"
PLANNED = (
    ("1 x 24 GB", RL, "Qwen/Qwen3-VL-2B-Instruct", "full", ""),
    ("1 x 24 GB", RL, "Qwen/Qwen2.5-VL-3B-Instruct", "LoRA", LORA),
    ("1 x 24 GB", SFT, "Qwen/Qwen2.5-VL-7B-Instruct", "QLoRA", f"{LORA} --ds.load_in_4bit"),
    ("1 x 80 GB", RL, "Qwen/Qwen2.5-VL-3B-Instruct", "full", ""),
    ("8 x 80 GB", RL, "Qwen/Qwen2.5-VL-3B-Instruct", "full", ""),
    ("1 x 80 GB", RL, "Qwen/Qwen2.5-VL-7B-Instruct", "LoRA", LORA),
    ("8 x 80 GB", RL, "Qwen/Qwen2.5-VL-7B-Instruct", "full", ""),
    ("1 x 80 GB", RL, "Qwen/Qwen3-VL-8B-Instruct", "LoRA", LORA),
    ("8 x 80 GB", RL, "Qwen/Qwen3-VL-8B-Instruct", "full", ""),
    ("8 x 80 GB", RL, "Qwen/Qwen2.5-VL-32B-Instruct", "full", ""),
)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--cases", nargs="+", metavar="NAME", choices=list(CASES), default=list(CASES), help="; ".join(CASES)
    )
    parser.add_argument("--gpus", action="store_true", help="plan released checkpoints on GPUs instead")
    parser.add_argument("--measure", metavar="NAME", help="only measure this case in this process, for the benchmark")
    parser.add_argument("--model", type=Path, help="the case's checkpoint")
    arguments = parser.parse_args()
    # Before anything imports torch or DeepSpeed.
    cpu.prepare_process()
    if arguments.measure:
        print(json.dumps(measure(CASES[arguments.measure], arguments.model)))
        return
    if arguments.gpus:
        plan_gpus(arguments.output)
        return
    # Cases of the file that are not run stay in it.
    results: dict[str, Any] = {}
    if arguments.output and arguments.output.exists():
        results = {entry["case"]: entry for entry in json.loads(arguments.output.read_text())["cases"]}
    for name in arguments.cases:
        results[name] = compare(name, CASES[name])
        print(json.dumps(results[name]), file=sys.stderr, flush=True)
    report = {
        "benchmark": "plan",
        "machine": machine_name(),
        "cases": [results[case] for case in CASES if case in results],
        "largest_error": max(abs(entry["ratio"] - 1) for entry in results.values()),
    }
    publish(report, arguments.output)


def plan_gpus(output: Path | None) -> None:
    """Print, and write, what `lmm-r1 plan` says of released checkpoints on GPUs."""
    entries: list[dict[str, Any]] = []
    for hardware, stage, model, trained, flags in PLANNED:
        gpus, gpu_gib, host_gib = HARDWARE[hardware]
        machine = f"--num_gpus {gpus} --gpu_memory_gib {gpu_gib} --host_memory_gib {host_gib}"
        arguments = " ".join(f"{stage} {model} {flags} {IMAGE} {machine}".split())
        code, said = planned(arguments.split())
        entry = {
            "hardware": hardware,
            "stage": "SFT" if stage == SFT else "RL",
            "model": model,
            "trained": trained,
            "command": f"lmm-r1 plan {arguments}",
            "fits": code == 0,
            **of_plan(said),
        }
        entries.append(entry)
        print(json.dumps(entry), file=sys.stderr, flush=True)
    publish({"benchmark": "plan --gpus", "machine": machine_name(), "plans": entries}, output)


def planned(arguments: list[str]) -> tuple[int, str]:
    """Return the exit code of `lmm-r1 plan` with these arguments, and what it prints."""
    from lmm_r1.cli import plan

    text = io.StringIO()
    try:
        with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
            plan.main(arguments)
    except SystemExit as end:
        return int(end.code or 0), text.getvalue()
    return 0, text.getvalue()


def of_plan(said: str) -> dict[str, Any]:
    """Return from what a plan prints: the fullest GPU, the passes, what was chosen, and why it does not fit."""
    lines = " ".join(said.split())
    peaks = re.findall(
        r"each GPU(?: of [a-z ]+)? ([\d.]+) GiB of [\d.]+ GiB \(([^)]*)\)", lines.partition("memory, predicted:")[2]
    )
    tokens = re.search(r"passes of (?:the update: |up to )([\d,]+) tokens", lines)
    chosen = re.search(r"chosen to fit: (.*?)(?= \S+: error| GPUs:| lmm-r1 |$)", lines)
    refused = re.search(r"error: (the run cannot fit.*)", lines)
    return {
        "peak_gib_per_gpu": max((float(size) for size, _ in peaks), default=None),
        "pass_tokens": int(tokens[1].replace(",", "")) if tokens else None,
        "chosen": chosen[1] if chosen else "",
        **({"refused": refused[1]} if refused else {}),
    }


def compare(name: str, case: Case) -> dict[str, Any]:
    """Return a case's settings, and its memory as predicted and as measured in a process of its own."""
    from train_batches import build_tiny_checkpoint

    from lmm_r1.lmm_kits import get_kit

    with tempfile.TemporaryDirectory() as folder:
        model = build_tiny_checkpoint(
            get_kit(case.arch), Path(folder), hidden_size=case.hidden_size, layers=case.layers
        )
        predicted, parameters = predict(case, model)
        command = [sys.executable, __file__, "--measure", name, "--model", str(model)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    measured = json.loads(done.stdout.splitlines()[-1])
    return {
        "case": name,
        **asdict(case),
        **parameters,
        "predicted_mib": round(predicted / MIB, 1),
        "measured_mib": round(measured["peak"] / MIB, 1),
        "measured_after_loading_mib": round(measured["loaded"] / MIB, 1),
        "seconds": measured["seconds"],
        "ratio": round(predicted / measured["peak"], 4),
    }


def load_settings(case: Case) -> LoadSettings:
    from lmm_r1.config.shared import LoraConfig
    from lmm_r1.models.loading import LoadSettings

    return LoadSettings(
        attn_implementation="auto",
        param_dtype=case.param_dtype,
        packing_samples=True,
        share_prefix=True,
        freeze_visual_encoder=case.freeze_visual_encoder,
        lora=LoraConfig(rank=case.lora_rank),
        max_len=16384,
    )


def batch_of(case: Case, model: Path) -> list[ModelSample]:
    from train_batches import groups_of, make_batch

    from lmm_r1.lmm_kits import Checkpoint

    checkpoint = Checkpoint(str(model))
    groups = groups_of(case.kind, scale=case.scale)
    batch = make_batch(checkpoint.kit, checkpoint.processor, checkpoint.config, groups=groups, samples=case.samples)
    return batch.for_model


def predict(case: Case, model: Path) -> tuple[int, dict[str, Any]]:
    """Return the bytes that the case will take, and the sizes of model and batch."""
    from lmm_r1.tools.planning.pass_memory import ModelSettings, ZeroSettings, empty_model, trained_states

    load, checkpointing = load_settings(case), case.checkpointing
    settings = ModelSettings(path=str(model), role=case.role, load=load, checkpointing=checkpointing)
    empty: EmptyModel = empty_model(settings)
    width = {"fp32": 4, "bf16": 2}[case.param_dtype]
    states = trained_states(
        empty.size,
        ZeroSettings(
            stage=case.zero_stage,
            ranks=1,
            offload=False,
            weight_bytes=width,
            sum_bytes=4,
            on_gpu=False,
            passes=case.passes,
        ),
    )
    batch = batch_of(case, model)
    passing = empty.pass_bytes(batch, entropy=case.entropy)
    print(json.dumps({"pass_mib": passing // MIB, **asdict(states)}), file=sys.stderr)
    sizes = {"parameters": empty.size.parameters, "trained": empty.size.trained}
    return states.peak(passing), {**sizes, "tokens": sum(len(sample.token_ids) for sample in batch)}


def measure(case: Case, model: Path) -> dict[str, float]:
    """Return how much memory this process takes for loading, and at most in optimizer steps; in bytes."""
    import torch
    from train_batches import optimizer_settings

    from lmm_r1 import dotted
    from lmm_r1.config import PPOConfig
    from lmm_r1.host.strategy import default_to_one_process, make_strategy
    from lmm_r1.models.actor import KitActor, KitValueModel

    default_to_one_process()
    settings = {
        "actor.model_name_or_path": str(model),
        "ds.param_dtype": case.param_dtype,
        "ds.zero_stage": case.zero_stage,
        "train.batch_size": case.passes,
    }
    strategy = make_strategy(dotted.replace(PPOConfig(), settings))
    args = strategy.args
    strategy.setup_distributed()
    batch = batch_of(case, model)
    # What is there before a run's first model is: the libraries' memory, which their first use makes.
    torch.nn.functional.linear(torch.ones(64, 64), torch.ones(64, 64))
    before = resident_bytes()
    given = load_settings(case)
    ds_config = strategy.get_ds_train_config()
    if case.role == "critic":
        actor: Any = KitValueModel(str(model), "critic", given, value_head_prefix="score", ds_config=ds_config)
    else:
        actor = KitActor(str(model), given, ds_config=ds_config)
    if case.checkpointing:
        actor.gradient_checkpointing_enable({"use_reentrant": False})
    actor, _, _ = strategy.prepare((actor, optimizer_settings(args, steps=STEPS)))
    forget_peak()
    loaded = resident_bytes()
    extra = {} if case.role == "critic" else {"return_entropy": case.entropy}
    actor.train()
    began = time.perf_counter()
    for _ in range(STEPS * case.passes):
        values, output = actor(batch, return_output=True, **extra)
        loss = (values + output.entropy if case.entropy else values).mean()
        del output, values
        strategy.backward(loss, actor, None)
        strategy.optimizer_step(None, actor, None)
    seconds = time.perf_counter() - began
    return {"peak": resident_peak() - before, "loaded": loaded - before, "seconds": round(seconds, 1)}


if __name__ == "__main__":
    main()
