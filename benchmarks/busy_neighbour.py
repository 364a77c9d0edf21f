"""Tokens a second of SFT and batch inference alone and beside a process that keeps a core busy, by how threads wait; JSON.

python benchmarks/busy_neighbour.py [--repeats 3] [--output benchmarks/results/busy_neighbour.json]

Threads that share an operator wait for one another asleep, awake for some microseconds or a millisecond, or as the commands
choose by themselves (`cpu.choose_waiting`). The fair share beside a neighbour on two cores is half of the rate alone.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from machine import machine_name

MODULE = [sys.executable, "-m"]
# By the variables of GNU's OpenMP.
POLICIES = {
    "chosen": {},
    "microseconds": {"GOMP_SPINCOUNT": "3000"},
    "asleep": {"GOMP_SPINCOUNT": "0"},
    "millisecond": {"GOMP_SPINCOUNT": "300000"},
}
THREADS = {"OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}
SFT_ROWS = 320
PROMPTS = 512
# After which a command is ended: what it has told of its rate by then counts.
LIMIT_SECONDS = 60
# Of an SFT run: the first ones load code.
SKIPPED_STEPS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--policies", nargs="+", default=list(POLICIES), choices=POLICIES)
    parser.add_argument("--output", type=Path, help="also write the JSON to this file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = measure(Path(folder), repeats=arguments.repeats, policies=arguments.policies)
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))


def measure(folder: Path, *, repeats: int, policies: list[str]) -> dict:
    """Return medians of tokens a second, by command, policy and neighbour."""
    _run("make_tiny_model", "--arch", "qwen2_5_vl", "--output", "tiny", folder=folder)
    task = ("make_task", "digits", "--modality", "mixed")
    _run(*task, "--rows", str(SFT_ROWS), "--solutions", "--output", "rows", folder=folder)
    _run(*task, "--rows", str(PROMPTS), "--output", "prompts", folder=folder)
    rates: dict[str, list[float]] = {}
    commands: dict[str, Callable[..., float]] = {"train_sft": sft_rate, "batch_inference": inference_rate}
    for number in range(repeats):
        for command, rate in commands.items():
            for policy in policies:
                for place, beside in {"alone": alone, "neighbour": neighbour}.items():
                    name = f"{command} {policy} {place}"
                    with beside():
                        rates.setdefault(name, []).append(
                            rate(folder, f"{command}_{policy}_{place}_{number}", policy=policy)
                        )
                    print(f"{name}: {rates[name][-1]:,.0f} tokens/s", file=sys.stderr)
    medians = {name: statistics.median(values) for name, values in rates.items()}
    # The best rate alone is what there is to share.
    shares = {
        f"{command} {policy}": medians[f"{command} {policy} neighbour"]
        / (max(medians[f"{command} {other} alone"] for other in policies) / 2)
        for command in commands
        for policy in policies
    }
    return {
        "machine": machine_name(),
        "tokens_per_second": {name: round(value) for name, value in medians.items()},
        "of_fair_share": {name: round(value, 2) for name, value in shares.items()},
        "chosen_against": {
            f"{command} {policy} {place}": round(
                medians[f"{command} chosen {place}"] / medians[f"{command} {policy} {place}"], 2
            )
            for command in commands
            for policy in policies
            if "chosen" in policies and policy != "chosen"
            for place in ("alone", "neighbour")
        },
        "repeats": repeats,
    }


@contextmanager
def alone() -> Iterator[None]:
    """Nothing of this benchmark beside the command."""
    yield


@contextmanager
def neighbour() -> Iterator[None]:
    """A process that keeps a core busy."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def sft_rate(folder: Path, name: str, *, policy: str) -> float:
    """Return the tokens a second of the median step of an SFT run."""
    flags = {
        "--model.model_name_or_path": "tiny",
        "--data.dataset": "rows",
        "--data.max_len": "512",
        "--train.batch_size": "16",
        "--train.micro_batch_size": "8",
        "--train.max_epochs": "1",
        "--ds.param_dtype": "fp32",
        "--ckpt.output_dir": name,
    }
    arguments = [part for pair in flags.items() for part in pair]
    _run("train_sft", *arguments, "--ds.packing_samples", folder=folder, policy=policy)
    lines = map(json.loads, (folder / name / "metrics.jsonl").read_text().splitlines())
    rates = [line["tokens_per_second"] for line in lines]
    return statistics.median(rates[SKIPPED_STEPS:] or rates)


def inference_rate(folder: Path, name: str, *, policy: str) -> float:
    """Return the tokens a second that batch inference tells last."""
    flags = ("--model", "tiny", "--data", "prompts", "--output", f"{name}.jsonl", "--max_new_tokens", "64")
    told = _run("batch_inference", *flags, folder=folder, policy=policy)
    *_, last = re.finditer(r"([\d,]+) tokens/s", told)
    return float(last[1].replace(",", ""))


def _run(command: str, *arguments: str, folder: Path, policy: str = "chosen") -> str:
    """Run a command with the threads that it takes by itself, and return what it prints."""
    environment = {name: value for name, value in os.environ.items() if name not in THREADS}
    process = subprocess.Popen(
        [*MODULE, f"lmm_r1.cli.{command}", *arguments],
        cwd=folder,
        env=environment | POLICIES[policy],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        told, _ = process.communicate(timeout=LIMIT_SECONDS)
        assert process.returncode == 0, told
    except subprocess.TimeoutExpired:
        process.kill()
        told, _ = process.communicate()
    return told


if __name__ == "__main__":
    main()
