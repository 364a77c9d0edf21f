"""Seconds a step, and what is learnt, of runs that generate and train in turn and at the same time; JSON on the last line.

python benchmarks/async_training.py [--seeds 1] [--steps 12] [--output benchmarks/results/async_training.json]

All runs of a seed start from one cold start on the task `digits` in images and text, and learn from the same prompts, as many
samples each. One row in twelve is about eight to fourteen digits, the others about three: the long tail of the responses. Runs
in turn have all cores for each side; those at the same time a half for each. Accuracy is that of one response to each held-out
row of three digits at temperature 1, behind the last step, with its 95 % interval (Wilson's).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from machine import machine_name
from visual_search import estimate

from lmm_r1.tasks.digits import DigitsTask, Page

MODULE = [sys.executable, "-m"]
SFT = Path(__file__).resolve().parents[1] / "examples/scripts/lmm_r1/configs/demo/cold_start.yaml"
MODES: dict[str, list[str]] = {
    "in_turn": [],
    "async": ["--train.async_enable"],
    "partial": ["--train.async_enable", "--train.partial_rollout_enable"],
    "partial_2": ["--train.async_enable", "--train.partial_rollout_enable", "--train.async_queue_size", "2"],
}
PROMPTS, SAMPLES, HELD_OUT = 32, 8, 400
# Their solutions take 60 to 130 tokens, where those of three digits take some 30.
LONG_ROWS, LONG_TASK = 12, DigitsTask(min_digits=8, max_digits=14, page=Page(cells=14))
# Of a run: engines and models have just started.
SKIPPED_STEPS = 2
_LOGGED = (
    "timing/generation",
    "timing/ppo_train",
    "timing/trainer_waits",
    "timing/engines_wait",
    "async/staleness_mean",
    "async/partial_samples",
    "truncated_rate",
    "rollout/response_length_mean",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    parser.add_argument("--cold_start_rows", type=int, default=9600, help="of the supervised start, once each")
    parser.add_argument("--folder", type=Path, help="keep the runs here, where finished ones are not made again")
    parser.add_argument("--output", type=Path, help="also write the JSON to this file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (arguments.folder or Path(temporary)).absolute()
        runs = []
        for seed in arguments.seeds:
            own = folder / str(seed)
            prepare(own, seed=seed, rows=arguments.cold_start_rows, prompts=arguments.steps * PROMPTS)
            runs += [run(mode, own, seed=seed, steps=arguments.steps) for mode in arguments.modes]
    result = {
        "benchmark": "async_training",
        "machine": machine_name(),
        "threads": os.environ.get("OMP_NUM_THREADS", "all cores"),
        "steps": arguments.steps,
        "samples_per_step": PROMPTS * SAMPLES,
        "runs": runs,
        "faster_than_in_turn": {
            mode: round(median_of(runs, "in_turn") / median_of(runs, mode), 2)
            for mode in arguments.modes
            if "in_turn" in arguments.modes
        },
    }
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))


def prepare(folder: Path, *, seed: int, rows: int, prompts: int) -> None:
    """Make the seed's rows and its cold start, unless they are there."""
    folder.mkdir(parents=True, exist_ok=True)
    task = ("make_task", "digits", "--modality", "mixed", "--seed", str(seed))
    if not (folder / "tiny").exists():
        command("make_tiny_model", "--arch", "qwen2_5_vl", "--seed", str(seed), "--output", "tiny", folder=folder)
    for name, split, count, more in (
        ("solutions", "train", rows, ("--solutions", "--min-digits", "2")),
        ("prompts", "train", prompts, ()),
        ("test", "test", HELD_OUT, ()),
    ):
        if not (folder / name).exists():
            command(*task, "--split", split, "--rows", str(count), "--output", name, *more, folder=folder)
            if split == "train":
                lengthen(folder / name / "rows.jsonl", seed=seed, solution="--solutions" in more)
    if not (folder / "start/stage.json").exists():
        paths = ("--model.model_name_or_path", "tiny", "--data.dataset", "solutions", "--ckpt.output_dir", "start")
        command("train_sft", "--config", str(SFT), *paths, folder=folder)


def lengthen(file: Path, *, seed: int, solution: bool) -> None:
    """Let one row in twelve be about many digits, in text."""
    lines = file.read_text().splitlines()
    places = range(0, len(lines), LONG_ROWS)
    made = LONG_TASK.generate(split="train", modality="text", rows=len(places), seed=seed)
    for place, row in zip(places, made, strict=True):
        lines[place] = json.dumps(row.record(solution=solution))
    file.write_text("\n".join(lines) + "\n")


def run(mode: str, folder: Path, *, seed: int, steps: int) -> dict:
    """Make one run, unless it is there, and return what it came to."""
    flags = {
        "--actor.model_name_or_path": "start",
        "--actor.adam.lr": "1.5e-4",
        "--actor.lr_scheduler": "constant",
        "--data.prompt_dataset": "prompts",
        "--data.max_len": "512",
        "--reward": "math",
        "--rollout.batch_size": str(PROMPTS),
        "--rollout.n_samples_per_prompt": str(SAMPLES),
        "--rollout.max_new_tokens": "200",
        "--rollout.micro_batch_size": "128",
        "--train.batch_size": "64",
        "--train.micro_batch_size": "64",
        "--train.seed": str(seed),
        "--algo.advantage.estimator": "group_norm",
        "--algo.kl.init_coef": "0",
        "--ds.param_dtype": "fp32",
        "--eval.dataset": "test",
        "--eval.steps": str(steps),
        "--eval.n_samples_per_prompt": "1",
        "--eval.temperature": "1.0",
        "--ckpt.output_dir": mode,
        "--ckpt.save_steps": str(steps),
    }
    if not (folder / mode / "stage.json").exists():
        arguments = [part for pair in flags.items() for part in pair]
        command("train_ppo_ray", *arguments, *MODES[mode], folder=folder)
    lines = [json.loads(line) for line in (folder / mode / "metrics.jsonl").read_text().splitlines()]
    before, *made = [line for line in lines if "timing/step_total" in line][SKIPPED_STEPS - 1 :]
    evaluated = {name: value for line in lines for name, value in line.items() if name.endswith("_pass1")}
    return {
        "seed": seed,
        "mode": mode,
        "seconds_per_step": round((made[-1]["seconds"] - before["seconds"]) / len(made), 3),
        "response_tokens": lengths(folder / mode / "rollouts.jsonl"),
        "accuracy": estimate(held_out_share(evaluated, folder=folder), rows=HELD_OUT),
        "means": {
            name: round(statistics.fmean(line[name] for line in made), 3) for name in _LOGGED if name in made[0]
        },
    }


def lengths(file: Path) -> dict[str, float]:
    """Return the tokens of responses that were recorded in training, in percentiles."""
    made = [json.loads(line) for line in file.read_text().splitlines()]
    tokens = [row["response_tokens"] for row in made if not row["held_out"]]
    cuts = statistics.quantiles(tokens, n=100)
    return {"50 %": cuts[49], "90 %": cuts[89], "99 %": cuts[98], "longest": max(tokens)}


def held_out_share(evaluated: dict[str, float], *, folder: Path) -> float:
    """Return the share of right responses to all held-out rows of what was logged for each kind of them."""
    rows = Counter(json.loads(line)["datasource"] for line in (folder / "test/rows.jsonl").read_text().splitlines())
    return sum(evaluated[f"eval_{kind}_pass1"] * count for kind, count in rows.items()) / rows.total()


def median_of(runs: list[dict], mode: str) -> float:
    return statistics.median(entry["seconds_per_step"] for entry in runs if entry["mode"] == mode)


def command(name: str, *arguments: str, folder: Path) -> None:
    argv = [*MODULE, f"lmm_r1.cli.{name}", *arguments]
    subprocess.run(argv, check=True, cwd=folder, stdout=sys.stderr)


if __name__ == "__main__":
    main()
