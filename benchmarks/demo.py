"""What the demo's stages gain on held-out rows, for several seeds; JSON on the last line.

python benchmarks/demo.py --seeds 1 2 3 [--output benchmarks/results/demo.json] [--flags FLAGS OF BOTH RL STAGES...]
python benchmarks/demo.py --seeds 1 2 --arch qwen3_vl gemma3 --output benchmarks/results/demo_architectures.json
python benchmarks/demo.py --seeds 1 2 --flags --ds.lora.rank 64 --actor.adam.lr 1.5e-3     LoRA, ten times the demo's rate
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from machine import ROOT, machine_name
from measuring import parser_of, publish

DEMO = ROOT / "examples/scripts/demo.sh"


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="each is a whole demo of some minutes")
    parser.add_argument("--arch", nargs="+", help="kits to run it with, by name; else the demo's own alone")
    parser.add_argument("--runs", type=Path, help="folder to keep the runs in, by kit and seed; else they are deleted")
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="further flags of both RL stages, last")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder, asked = arguments.runs or Path(temporary), {"seeds": arguments.seeds, "flags": arguments.flags}
        by_arch = {arch: of_seeds(folder / arch, arch=arch, **asked) for arch in arguments.arch or ()}
        measured = {"architectures": by_arch} if by_arch else of_seeds(folder, arch=None, **asked)
    threads = int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1)
    facts = {"benchmark": "demo", "machine": machine_name(), "threads": threads, "flags": arguments.flags}
    publish(facts | measured, arguments.output)


def of_seeds(folder: Path, *, arch: str | None, seeds: list[int], flags: list[str]) -> dict:
    """Return the runs of some seeds and the least that the stages gained."""
    runs = [run(seed, folder / f"seed{seed}/demo", arch=arch, flags=flags) for seed in seeds]
    return {
        "runs": runs,
        "least_text_gain_of_fre": min(entry["text_gain_of_fre"] for entry in runs),
        "least_image_gain_of_mgt": min(entry["image_gain_of_mgt"] for entry in runs),
        "most_seconds": max(entry["seconds"] for entry in runs),
    }


def run(seed: int, folder: Path, *, arch: str | None, flags: list[str]) -> dict:
    """Run the demo and return its summary with the gains over the cold start, in points."""
    environment = {**os.environ, "SEED": str(seed), "PYTHON": sys.executable} | ({"ARCH": arch} if arch else {})
    began = time.perf_counter()
    subprocess.run(["bash", str(DEMO), str(folder), *flags], check=True, env=environment, stdout=sys.stderr)
    summary = json.loads((folder / "summary.json").read_text()) | {"seconds": round(time.perf_counter() - began, 1)}
    stages = {stage["name"]: stage for stage in summary["stages"]}

    def gain(stage: str, kind: str) -> float:
        return round(100 * (stages[stage][kind] - stages["cold_start"][kind]), 2)

    return {
        "seed": seed,
        **summary,
        "text_gain_of_fre": gain("fre", "text_accuracy"),
        "image_gain_of_fre": gain("fre", "image_accuracy"),
        "image_gain_of_mgt": gain("mgt", "image_accuracy"),
    }


if __name__ == "__main__":
    main()
