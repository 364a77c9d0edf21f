"""What the demo's stages gain on held-out rows, for several seeds; JSON on the last line.

python benchmarks/demo.py --seeds 1 2 3 [--output benchmarks/results/demo.json] [--flags FLAGS OF BOTH RL STAGES...]
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

from machine import machine_name

DEMO = Path(__file__).resolve().parents[1] / "examples/scripts/demo.sh"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="each is a whole demo of some minutes")
    parser.add_argument("--output", type=Path, help="also write the JSON to this file")
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="further flags of both RL stages, last")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runs = [run(seed, Path(folder) / str(seed), flags=arguments.flags) for seed in arguments.seeds]
    result = {
        "benchmark": "demo",
        "machine": machine_name(),
        "flags": arguments.flags,
        "runs": runs,
        "least_text_gain_of_fre": min(entry["text_gain_of_fre"] for entry in runs),
        "least_image_gain_of_mgt": min(entry["image_gain_of_mgt"] for entry in runs),
        "most_seconds": max(entry["seconds"] for entry in runs),
    }
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))


def run(seed: int, folder: Path, *, flags: list[str]) -> dict:
    """Run the demo and return its summary with the gains over the cold start, in points."""
    environment = {**os.environ, "SEED": str(seed), "PYTHON": sys.executable}
    began = time.perf_counter()
    subprocess.run(["bash", str(DEMO), str(folder), *flags], check=True, env=environment, stdout=sys.stderr)
    seconds = round(time.perf_counter() - began, 1)
    summary = json.loads((folder / "summary.json").read_text()) | {"seconds": seconds}
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
