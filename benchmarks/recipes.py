"""What the shipped algorithms gain on held-out digits with equal budgets, for several seeds; a table, and JSON on the last line.

python benchmarks/recipes.py --seeds 1 2 3 --folder runs/recipes [--output benchmarks/results/recipes.json]

All runs of a seed start from the same cold start and get the same prompts, each once, with four responses each, at the same
learning rate: the demo's settings with an algorithm's of examples/scripts/lmm_r1/configs/algorithms on top. DAPO makes fewer
updates of them, as it leaves groups out, and ReMax generates one greedy response a prompt besides: both are counted. Accuracy is the share of right responses to held-out rows,
two a row sampled at temperature 1. The gain of a seed is from the cold start's; intervals are 95 % ones, of a seed by a bootstrap
over rows, of all by Student's t over seeds. With a folder, what is finished there is not done again and what was stopped goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean, stdev

from machine import machine_name

SCRIPTS = Path(__file__).resolve().parents[1] / "examples/scripts/lmm_r1"
CONFIGS = SCRIPTS / "configs"
ALGORITHMS = ("reinforce_plus_plus_baseline", "grpo", "rloo", "dr_grpo", "remax", "ppo", "dapo", "gspo")
FILES = ("text", "image")
# What an algorithm needs at the size of the digits: a critic with a rate for a tiny model, and a fifth of 40 new tokens.
OWN_FLAGS = {
    "ppo": ["--critic.num_gpus_per_node", "1", "--critic.adam.lr", "3e-4"],
    "dapo": ["--reward.overlong_buffer_len", "8"],
}
START = """
set -euo pipefail
source "$1/common.sh"
ROOT=$2 SEED=$3
source "$SCRIPTS/digits.sh"
digits
rows prompts --modality mixed --split train --rows "$4"
MODEL=$ROOT/tiny DATA=$SFT_DATA CONFIG=$SCRIPTS/configs/demo/cold_start.yaml OUTPUT=$ROOT/cold_start \\
  supervised_stage train_sft cold_start --train.seed "$SEED" "${@:5}"
"""
# Of Student's t, by the number of seeds: 95 % lie within so many standard errors.
WITHIN = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="each is all algorithms")
    parser.add_argument("--algorithms", nargs="+", default=list(ALGORITHMS), choices=_known(), metavar="NAME")
    parser.add_argument("--steps", type=int, default=24, help="rollouts that the prompts are for")
    parser.add_argument("--prompts", type=int, default=64, help="of a rollout, with four responses each")
    parser.add_argument("--folder", type=Path, help="keep the runs here, where finished ones are not made again")
    parser.add_argument("--output", type=Path, help="also write the JSON to this file")
    parser.add_argument("--start-flags", default="", help="further flags of the cold start, in one argument")
    parser.add_argument("--flags", default="", help="further flags of all RL runs, in one argument")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (arguments.folder or Path(temporary)).absolute()
        runs = [run for seed in arguments.seeds for run in _runs_of_seed(seed, folder / str(seed), arguments)]
    result = {
        "benchmark": "recipes",
        "machine": machine_name(),
        "threads": os.environ.get("OMP_NUM_THREADS", "all cores"),
        "steps": arguments.steps,
        "prompts": arguments.prompts,
        "flags": {"start": arguments.start_flags, "rl": arguments.flags},
        "runs": runs,
        "gains": {name: gains([run for run in runs if run["algorithm"] == name]) for name in arguments.algorithms},
    }
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=2) + "\n")
    print(table(result))
    print(json.dumps(result))


def _known() -> list[str]:
    return sorted(path.stem for path in (CONFIGS / "algorithms").glob("*.yaml"))


def _runs_of_seed(seed: int, folder: Path, arguments: argparse.Namespace) -> list[dict]:
    """Make a seed's cold start and what goes on from it, and return what each run came to."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = str(arguments.steps * arguments.prompts)
    start = ["bash", "-c", START, "start", str(SCRIPTS), str(folder), str(seed), rows, *arguments.start_flags.split()]
    _call(start, PYTHON=sys.executable)
    measured = [_measured(folder, "cold_start")]
    for name in arguments.algorithms:
        _train(name, seed, folder, arguments)
        measured.append(_measured(folder, name))
    comparison = folder / "evaluation.json"
    _call([*_cli("evaluate"), "--compare", *measured, "--output", str(comparison)])
    evaluation = json.loads(comparison.read_text())
    return [_run(name, seed, folder, evaluation, arguments.prompts) for name in arguments.algorithms]


def _train(name: str, seed: int, folder: Path, arguments: argparse.Namespace) -> None:
    output = folder / name
    if (output / "stage.json").exists():
        return
    flags = {
        "actor.model_name_or_path": folder / "cold_start",
        "data.prompt_dataset": folder / "data/prompts",
        "data.max_samples": arguments.steps * arguments.prompts,
        "rollout.batch_size": arguments.prompts,
        "ckpt.output_dir": output,
        "logger.stage_name": name,
        "train.seed": seed,
    }
    configs = [CONFIGS / "demo/mgt.yaml", CONFIGS / f"algorithms/{name}.yaml"]
    _call(
        [
            *_cli("train_ppo_ray"),
            *(part for config in configs for part in ("--config", str(config))),
            *(part for flag, value in flags.items() for part in (f"--{flag}", str(value))),
            *OWN_FLAGS.get(name, []),
            *arguments.flags.split(),
        ]
    )


def _measured(folder: Path, name: str) -> str:
    """Measure a checkpoint on the held-out rows, unless that was done, and return it as `evaluate --compare` takes it."""
    file = folder / f"measured/{name}.json"
    if not file.exists():
        files = [f"{kind}={folder / f'data/{kind}_test'}" for kind in FILES]
        asked = ["--checkpoints", f"{name}={folder / name}", "--files", *files, "--output", str(file)]
        _call([*_cli("evaluate"), "--config", str(CONFIGS / "demo/evaluate.yaml"), *asked])
    return f"{name}={file}"


def _cli(command: str) -> list[str]:
    return [sys.executable, "-m", f"lmm_r1.cli.{command}"]


def _call(command: list[str], **variables: str) -> None:
    subprocess.run(command, check=True, env={**os.environ, **variables}, stdout=sys.stderr)


def _run(name: str, seed: int, folder: Path, evaluation: dict, prompts: int) -> dict:
    steps = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    steps = [step for step in steps if "reward" in step]
    (scores,) = (one["files"] for one in evaluation["checkpoints"] if one["name"] == name)
    return {
        "seed": seed,
        "algorithm": name,
        "steps": len(steps),
        "seconds": json.loads((folder / name / "stage.json").read_text())["seconds"],
        "generated": generated(steps, prompts=prompts),
        "accuracy": {kind: round(scores[kind]["accuracy"], 4) for kind in FILES},
        "gain": {one["file"]: gain(one) for one in evaluation["comparisons"] if one["checkpoint"] == name},
    }


def generated(steps: list[dict], *, prompts: int, samples: int = 4) -> int:
    """Return how many responses a run's steps took: those that are learnt from, greedy ones, and those of left-out groups."""
    whole = sum(int(step["filtered_groups"]) + prompts for step in steps) * samples
    return whole + sum(prompts for step in steps if "greedy_reward" in step)


def gain(comparison: dict) -> dict[str, float]:
    """Return a difference from the cold start in points, with its 95 % interval."""
    return {name: round(100 * comparison[name], 2) for name in ("difference", "low", "high")}


def gains(runs: list[dict]) -> dict[str, dict[str, float | None]]:
    """Return the mean gain of an algorithm's seeds on each file in points; with one seed there is no interval."""
    found: dict[str, dict[str, float | None]] = {}
    for kind in FILES:
        values = [run["gain"][kind]["difference"] for run in runs]
        half = WITHIN[len(values)] * stdev(values) / len(values) ** 0.5 if len(values) > 1 else None
        mean = fmean(values)
        found[kind] = {
            "mean": round(mean, 2),
            "low": None if half is None else round(mean - half, 2),
            "high": None if half is None else round(mean + half, 2),
        }
    return found


def table(result: dict) -> str:
    """Return the mean gains in points as a Markdown table."""
    lines = ["| algorithm | text | image | responses | seconds |", "|---|---|---|---|---|"]
    for name, found in result["gains"].items():
        runs = [run for run in result["runs"] if run["algorithm"] == name]
        cells = [_told(found[kind]) for kind in FILES]
        cost = [f"{fmean(run[what] for run in runs):,.0f}" for what in ("generated", "seconds")]
        lines.append("| " + " | ".join((name, *cells, *cost)) + " |")
    return "\n".join(lines)


def _told(found: dict[str, float | None]) -> str:
    between = "" if found["low"] is None else f" ({found['low']:+.1f} to {found['high']:+.1f})"
    return f"{found['mean']:+.1f}{between}"


if __name__ == "__main__":
    main()
