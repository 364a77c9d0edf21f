"""What the loops gain on held-out digits, for several seeds; JSON on the last line.

python benchmarks/loops.py --seeds 1 2 [--output benchmarks/results/loops.json]

Accuracy is the share of right responses to held-out rows, two responses a row sampled at temperature 1, judged by the rule. The
loops of one seed start from the same cold start. A gain is the mean difference of the rows' accuracies from the start's, with a
95 % interval by a bootstrap over rows; of distillation, from the student's that learned the same rows without a teacher's
distributions.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from machine import ROOT, machine_name
from measuring import parser_of, publish

SCRIPTS = ROOT / "examples/scripts"
# The script of each, and its variables.
LOOPS: dict[str, tuple[str, dict[str, str]]] = {
    "iterative_dpo": ("train_iterative_dpo.sh", {}),
    "rejection_sampling": ("train_rejection_sampling.sh", {}),
    "rm": ("train_rm.sh", {}),
    "rm_mixed": ("train_rm.sh", {"KIND": "mixed"}),
    "kd": ("train_kd.sh", {}),
}
# What loops of a seed have in common, and the first of them makes; the prompts are each one's own.
START = (
    "tiny",
    *(f"data/{name}" for name in ("first_solutions", "then_solutions", "text_test", "image_test")),
    "cold_start",
    "measured/start.json",
    "measured/start.responses.jsonl",
)
# And those that need a better reader than the start.
READER = ("data/more_solutions", "reader")
READING = ("rm_mixed", "kd")
# Of a normal distribution: 95 % lie within so many standard deviations.
_SIGMAS = 1.96


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2], help="each is all loops, some minutes each")
    parser.add_argument("--loops", nargs="+", default=[*LOOPS], choices=[*LOOPS])
    parser.add_argument("--folder", type=Path, help="keep the runs here, where finished ones are not made again")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (arguments.folder or Path(temporary)).absolute()
        runs = [run(loop, seed, folder / str(seed)) for seed in arguments.seeds for loop in arguments.loops]
    publish({"benchmark": "loops", "machine": machine_name(), "runs": runs}, arguments.output)


def run(loop: str, seed: int, folder: Path) -> dict:
    """Run one loop from the seed's cold start, and return what it came to; a finished one is not run again."""
    output, clock = folder / loop, folder / f"{loop}.seconds"
    script, own = LOOPS[loop]
    variables = {**os.environ, **own, "SEED": str(seed), "PYTHON": sys.executable, "OUTPUT": str(output)}
    if not clock.exists():
        for other in LOOPS:
            _copy(START, folder / other, output)
            if loop in READING:
                _copy(READER, folder / other, output)
        began = time.time()
        subprocess.run(["bash", str(SCRIPTS / script)], check=True, env=variables, stdout=sys.stderr)
        clock.write_text(f"{time.time() - began:.1f}\n")
    evaluation = json.loads((output / "evaluation.json").read_text())
    return {
        "seed": seed,
        "loop": loop,
        "threads": os.environ.get("OMP_NUM_THREADS", "all cores"),
        "seconds": float(clock.read_text()),
        "baseline": evaluation["baseline"],
        "stages": stages(output),
        "accuracies": {one["name"]: accuracies(one["files"]) for one in evaluation["checkpoints"]},
        "gains": {
            name: {one["file"]: gain(one) for one in evaluation["comparisons"] if one["checkpoint"] == name}
            for name in dict.fromkeys(one["checkpoint"] for one in evaluation["comparisons"])
        },
    } | ranking(output / "rm")


def _copy(names: Sequence[str], other: Path, output: Path) -> None:
    """Give a loop what another one of the seed has finished; a stage that was stopped is left to its own loop."""
    for name in names:
        made, place = other / name, output / name
        stopped = (made / "metrics.jsonl").exists() and not (made / "stage.json").exists()
        if made.exists() and not stopped and not place.exists():
            place.parent.mkdir(parents=True, exist_ok=True)
            (shutil.copytree if made.is_dir() else shutil.copy)(made, place)


def stages(output: Path) -> dict[str, dict[str, float]]:
    """Return updates and seconds of each trained stage, in the order in which they ended."""
    records = [json.loads(file.read_text()) for file in output.glob("*/stage.json")]
    records.sort(key=lambda record: record["finished_at"])
    return {record["name"]: {"steps": record["steps"], "seconds": record["seconds"]} for record in records}


def accuracies(files: dict) -> dict[str, dict[str, float]]:
    """Return the accuracy on each file with its 95 % interval."""
    found = {}
    for name, scores in files.items():
        share, half = scores["accuracy"], _SIGMAS * scores["accuracy_standard_error"]
        found[name] = {"share": round(share, 4), "low": round(share - half, 4), "high": round(share + half, 4)}
    return found


def gain(comparison: dict) -> dict[str, float]:
    """Return a difference from the baseline in points, with its 95 % interval."""
    return {name: round(100 * comparison[name], 2) for name in ("difference", "low", "high")} | {
        "p_value": comparison["p_value"]
    }


def ranking(reward_model: Path) -> dict[str, dict[str, float]]:
    """Return how often a loop's reward model ranks held-out pairs rightly, by kind of question too, where it has one."""
    file = reward_model / "metrics.jsonl"
    if not file.exists():
        return {}
    evaluated = [line for line in map(json.loads, file.read_text().splitlines()) if "eval_pair_accuracy" in line]
    kept = ("step", "eval_calibration_error", "eval_reward_margin")
    found = {name: value for name, value in evaluated[-1].items() if name in kept or name.endswith("pair_accuracy")}
    return {"held_out_pairs": found}


if __name__ == "__main__":
    main()
