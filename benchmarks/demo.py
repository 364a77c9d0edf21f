"""What the demo's stages gain on held-out rows, for several seeds; JSON on the last line.

python benchmarks/demo.py --seeds 1 2 3 [--output benchmarks/results/demo.json] [--flags FLAGS OF BOTH RL STAGES...]
python benchmarks/demo.py --seeds 1 2 --arch qwen3_vl gemma3 --output benchmarks/results/demo_architectures.json
python benchmarks/demo.py --seeds 1 2 --flags --ds.lora.rank 64 --actor.adam.lr 1.5e-3     LoRA, ten times the demo's rate
python benchmarks/demo.py --script released --output benchmarks/results/released.json      on released weights
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


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="each is a whole demo of some minutes")
    parser.add_argument("--script", choices=("demo", "released"), default="demo", help="of examples/scripts")
    parser.add_argument("--arch", nargs="+", help="kits to run it with, by name; else the demo's own alone")
    parser.add_argument("--runs", type=Path, help="folder to keep the runs in, by kit and seed; else they are deleted")
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="further flags of both RL stages, last")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.runs or Path(temporary)
        by_arch = {arch: of_seeds(folder / arch, arguments, arch=arch) for arch in arguments.arch or ()}
        measured = {"architectures": by_arch} if by_arch else of_seeds(folder, arguments, arch=None)
    threads = int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1)
    facts = {"benchmark": "demo", "script": arguments.script, "machine": machine_name(), "threads": threads}
    publish(facts | {"flags": arguments.flags} | measured, arguments.output)


def of_seeds(folder: Path, arguments: argparse.Namespace, *, arch: str | None) -> dict:
    """Return the runs of some seeds and the least that each stage gained."""
    runs = [run(seed, folder / f"seed{seed}" / arguments.script, arguments, arch=arch) for seed in arguments.seeds]
    gains = {f"least_{name}": min(entry[name] for entry in runs) for name in runs[0] if "_gain_of_" in name}
    return {"runs": runs, **gains, "most_seconds": max(entry["seconds"] for entry in runs)}


def run(seed: int, folder: Path, arguments: argparse.Namespace, *, arch: str | None) -> dict:
    """Run the script and return its summary with the gains over the cold start, in points."""
    environment = {**os.environ, "SEED": str(seed), "PYTHON": sys.executable} | ({"ARCH": arch} if arch else {})
    script, began = ROOT / f"examples/scripts/{arguments.script}.sh", time.perf_counter()
    subprocess.run(["bash", script, folder, *arguments.flags], check=True, env=environment, stdout=sys.stderr)
    summary = json.loads((folder / "summary.json").read_text()) | {"seconds": round(time.perf_counter() - began, 1)}
    start, *stages = summary["stages"]
    gains = {
        f"{kind}_gain_of_{stage['name']}": round(100 * (stage[f"{kind}_accuracy"] - start[f"{kind}_accuracy"]), 2)
        for stage in stages
        for kind in ("text", "image")
        if start[f"{kind}_accuracy"] is not None
    }
    return {"seed": seed, **summary, **gains}


if __name__ == "__main__":
    main()
