"""What crops teach: success at the visual search before and after RL, and of a control without them; JSON on the last line.

python benchmarks/visual_search.py --seeds 1 2 [--output benchmarks/results/visual_search.json]

Success is the share of held-out rows that are answered rightly, one response each, sampled at temperature 1 as in training.
Both RL runs start from the same cold start, with the same rows and settings; the control's environment answers each call
that the tool is switched off. Each is compared with the cold start in its own environment.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path

from machine import machine_name

ROOT = Path(__file__).resolve().parents[1]
DEMO = ROOT / "examples/scripts/visual_search.sh"
STAGE = ROOT / "examples/scripts/lmm_r1/train_visual_search.sh"
CONFIG = ROOT / "examples/scripts/lmm_r1/configs/visual_search/rl.yaml"
CONTROL = ROOT / "benchmarks/tool_off.py"
# Of a normal distribution: 95 % lie within so many standard deviations.
_SIGMAS = 1.96
_LOGGED = ("reward", "turns", "tool_calls", "malformed_calls", "over_turn")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2], help="each is two RL runs of some minutes")
    parser.add_argument("--folder", type=Path, help="keep the runs here, where finished ones are not made again")
    parser.add_argument("--output", type=Path, help="also write the JSON to this file")
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="further flags of both RL runs, last")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (arguments.folder or Path(temporary)).absolute()
        for seed in arguments.seeds:
            learn(seed, folder / str(seed), flags=arguments.flags)
        runs = [compared(seed, folder / str(seed), flags=arguments.flags) for seed in arguments.seeds]
    result = {
        "benchmark": "visual_search",
        "machine": machine_name(),
        "threads": os.environ.get("OMP_NUM_THREADS", "all cores"),
        "flags": arguments.flags,
        "chance": 0.1,
        "runs": runs,
        "least_gain": min(entry["crop"]["gain_points"] for entry in runs),
        "most_gain_of_control": max(entry["control"]["gain_points"] for entry in runs),
        "most_rl_seconds": max(entry["crop"]["seconds"] for entry in runs),
    }
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))


def learn(seed: int, folder: Path, *, flags: list[str]) -> None:
    """Run cold start and RL of one seed, and keep in the file `seconds` how long it took from the end of the cold start."""
    cold_start = folder / "cold_start/stage.json"
    continued, began = cold_start.exists(), time.time()
    subprocess.run(["bash", str(DEMO), str(folder), *flags], check=True, env=variables(seed), stdout=sys.stderr)
    ended = finished(folder / "visual_search")
    if ended > began:
        # The command's start is in it.
        seconds = ended - (began if continued else finished(folder / "cold_start"))
        (folder / "seconds").write_text(f"{seconds:.1f}\n")


def compared(seed: int, folder: Path, *, flags: list[str]) -> dict:
    """Run the control of one seed, and return what it and the seed's RL show."""
    control = folder.with_name(f"{folder.name}_control")
    of_stage = variables(seed) | {
        "MODEL": str(folder / "cold_start"),
        "OUTPUT": str(control),
        "DATA": str(folder / "data/prompts"),
        "CONFIG": str(CONFIG),
        "NUM_GPUS": "",
    }
    own = ["--train.agent", str(CONTROL), "--train.seed", str(seed), "--logger.stage_name", "control"]
    own += ["--eval.dataset", str(folder / "data/test"), "--eval.before_training", "--eval.steps", "20"]
    if not (control / "stage.json").exists():
        subprocess.run(["bash", str(STAGE), *own, *flags], check=True, env=of_stage, stdout=sys.stderr)
    rows = sum(1 for _ in (folder / "data/test/rows.jsonl").open())
    cold_start = json.loads((folder / "cold_start/stage.json").read_text())
    crop = summary(folder / "visual_search", rows=rows) | {"seconds": float((folder / "seconds").read_text())}
    return {
        "seed": seed,
        "held_out_rows": rows,
        "cold_start": {"seconds": cold_start["seconds"], "steps": cold_start["steps"]},
        "crop": crop,
        "control": summary(control, rows=rows),
    }


def variables(seed: int) -> dict[str, str]:
    return {**os.environ, "SEED": str(seed), "PYTHON": sys.executable}


def summary(folder: Path, *, rows: int) -> dict:
    """Return success before and after a run, and what its first and last step logged."""
    logged = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    evaluated = [(line["step"], value) for line in logged for name, value in line.items() if name.endswith("_pass1")]
    steps = [line for line in logged if "turns" in line]
    before, after = evaluated[0][1], evaluated[-1][1]
    return {
        "success_before": estimate(before, rows=rows),
        "success_after": estimate(after, rows=rows),
        "gain_points": round(100 * (after - before), 2),
        "evaluations": evaluated,
        "steps": steps[-1]["step"],
        "seconds": json.loads((folder / "stage.json").read_text())["seconds"],
        "seconds_per_step": round((steps[-1]["seconds"] - steps[0]["seconds"]) / max(1, len(steps) - 1), 2),
        "first_step": {name: steps[0].get(name) for name in _LOGGED},
        "last_step": {name: steps[-1].get(name) for name in _LOGGED},
    }


def estimate(share: float, *, rows: int) -> dict:
    """Return a share of independent rows with its 95 % interval (Wilson's)."""
    wide = _SIGMAS**2 / rows
    middle = (share + wide / 2) / (1 + wide)
    half = _SIGMAS * (share * (1 - share) / rows + wide / (4 * rows)) ** 0.5 / (1 + wide)
    return {"share": round(share, 4), "low": round(middle - half, 4), "high": round(middle + half, 4)}


def finished(folder: Path) -> float:
    """Return when a stage ended, in seconds since the epoch."""
    return datetime.fromisoformat(json.loads((folder / "stage.json").read_text())["finished_at"]).timestamp()


if __name__ == "__main__":
    main()
