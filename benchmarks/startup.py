"""Seconds from the command to the first optimizer step of an RL stage, and where they go; JSON on the last line.

python benchmarks/startup.py [--output benchmarks/results/startup.json]
"""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from pathlib import Path

import psutil
from machine import machine_name
from measuring import command, parser_of, publish, reward_server, run_quietly

ROWS = 8


FLAGS = f"""--rollout.batch_size {ROWS} --rollout.n_samples_per_prompt 2 --rollout.max_new_tokens 16
  --rollout.micro_batch_size 16 --train.batch_size 16 --train.micro_batch_size 16 --data.max_len 160
  --actor.num_gpus_per_node 1 --ref.num_gpus_per_node 1 --algo.kl.init_coef 0 --ds.param_dtype fp32"""


def main() -> None:
    """Run one step on a tiny model with images, and publish its timeline and the CPU time of each process."""
    arguments = parser_of(__doc__).parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run_quietly("make_tiny_model", "--arch", "qwen2_5_vl", "--output", folder / "tiny")
        run_quietly("make_task", "digits", "--modality", "mixed", "--rows", ROWS, "--output", folder / "rows")
        with reward_server(folder) as (url, _):
            result = run_stage(folder, f"{url}/get_reward")
    publish(result, arguments.output)


def run_stage(folder: Path, url: str) -> dict:
    """Start the stage, watch its processes until the first line of metrics, and return what was seen."""
    run = folder / "run"
    stage = command("train_ppo_ray", "--train.colocate_all", "--vllm.enforce_eager", *FLAGS.split())
    stage += ["--actor.model_name_or_path", str(folder / "tiny"), "--data.prompt_dataset", str(folder / "rows")]
    stage += ["--reward.remote_url", url, "--ckpt.output_dir", str(run), "--ckpt.path", str(run / "checkpoints")]
    log = (folder / "log").open("w")
    began = time.time()
    process = subprocess.Popen(stage, stdout=log, stderr=subprocess.STDOUT)
    seen: dict[int, dict] = {}
    metrics = run / "metrics.jsonl"
    while not metrics.exists():
        if process.poll() is not None or time.time() - began > 300:
            raise SystemExit(f"the stage ended without a step:\n{(folder / 'log').read_text()}")
        watch(process.pid, seen, began)
        time.sleep(0.25)
    total = metrics.stat().st_mtime - began
    first = json.loads(metrics.read_text().splitlines()[0])
    process.wait()
    return {
        "benchmark": "startup",
        "machine": machine_name(),
        "seconds_to_first_step": round(total, 1),
        "phases": {
            "imports_and_checks": round((run / "run_config.yaml").stat().st_mtime - began, 1),
            "first_rollout_done": round(total - first["timing/step_total"] + first["timing/generation"], 1),
            **{name: round(value, 2) for name, value in first.items() if name.startswith("timing/")},
        },
        "processes": sorted(seen.values(), key=lambda entry: -entry["cpu_seconds"])[:12],
    }


def watch(pid: int, seen: dict[int, dict], began: float) -> None:
    """Update what is known of the process and all its descendants."""
    try:
        root = psutil.Process(pid)
        processes = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for process in processes:
        try:
            times = process.cpu_times()
            # Names without folders: results are kept in the repository and say nothing of the machine's paths.
            name = " ".join(Path(part).name for part in process.cmdline()[:3]) or process.name()
        except psutil.Error:
            continue
        entry = seen.setdefault(process.pid, {"started_after": round(process.create_time() - began, 1)})
        entry["name"] = name
        entry["cpu_seconds"] = round(times.user + times.system, 1)


if __name__ == "__main__":
    main()
