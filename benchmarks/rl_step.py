"""Seconds of a whole RL step of the real trainer on images, and where they go; JSON on the last line.

python benchmarks/rl_step.py --prompts 8 --samples 16 --new-tokens 96 --image-side 448 --steps 4
python benchmarks/rl_step.py --shape 3B --prompts 16 --samples 8 --new-tokens 512 --image-side 896 --steps 4      # on a GPU
python benchmarks/rl_step.py --shape 3B ... --flags --actor.gradient_checkpointing_enable

A step is: rollout of exactly T new tokens in vLLM, reward, old and reference log-probs, update, weights to the engine.
On GPUs, who shares them, memory and passes are left to the command's defaults, so that `--flags` shows what a flag brings.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from machine import ROOT, cards, machine_facts
from measuring import command, noise_picture, parser_of, publish

# Any number in [0, 1) that follows from the response alone: rewards within a group differ, and a run repeats.
REWARD_FUNCTION = """
import zlib
def reward_func(queries, prompts, labels):
    return {"rewards": [zlib.crc32(query.encode()) / 2**32 for query in queries]}
"""
QUESTION = "What does the picture show? Think first, then answer."
# What of a prompt is not image: the chat's frame and the question, with room for other tokenizers.
TEXT_TOKENS = 256
PIXELS_PER_TOKEN = 28 * 28


def main() -> None:
    parser = step_parser(__doc__)
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="further flags of train_ppo_ray, last")
    arguments = parse_step(parser)
    with tempfile.TemporaryDirectory() as folder:
        result = measure(arguments, Path(folder))
    publish(result, arguments.output)


def step_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the sizes of a step."""
    parser = parser_of(description)
    parser.add_argument("--model", type=Path, help="checkpoint folder; without it a random one of --shape is made")
    parser.add_argument("--shape", choices=("5M", "3B"), default="5M", help="parameters of the random Qwen2.5-VL")
    parser.add_argument("--prompts", type=int, default=8, help="prompts per step")
    parser.add_argument("--samples", type=int, default=16, help="responses per prompt")
    parser.add_argument("--new-tokens", type=int, default=96, help="tokens of every response")
    parser.add_argument("--image-side", type=int, default=448, help="pixels of each side of the image of a prompt")
    parser.add_argument("--steps", type=int, default=4, help="steps, of which the first is reported by itself")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="bf16", help="of weights, in models and engine")
    return parser


def parse_step(parser: argparse.ArgumentParser) -> argparse.Namespace:
    arguments = parser.parse_args()
    if arguments.steps < 2:
        parser.error("--steps must be at least 2: the first is reported by itself")
    return arguments


def facts_of(arguments: argparse.Namespace, benchmark: str) -> dict[str, Any]:
    """Return what a step's result depends on."""
    sizes = {name: vars(arguments)[name] for name in ("dtype", "prompts", "samples", "new_tokens", "image_side")}
    model = arguments.model.name if arguments.model else arguments.shape
    return {"benchmark": benchmark, **machine_facts(), "model": model, **sizes}


def measure(arguments: argparse.Namespace, folder: Path) -> dict:
    """Run the steps as one stage of `train_ppo_ray` and return what its metrics say."""
    model = arguments.model or make_model(folder / "model", arguments.shape)
    write_rows(folder / "rows.jsonl", rows=arguments.prompts * arguments.steps, side=arguments.image_side)
    reward = folder / "reward.py"
    reward.write_text(REWARD_FUNCTION)
    run = folder / "run"
    metrics, log = run / "metrics.jsonl", folder / "log"
    stage = command("train_ppo_ray", *stage_flags(arguments, folder, model, reward, run))
    began, first = time.perf_counter(), 0.0
    with log.open("w") as stream:
        process = subprocess.Popen(stage, stdout=stream, stderr=subprocess.STDOUT)
        while process.poll() is None:
            if not first and metrics.exists() and metrics.stat().st_size:
                first = time.perf_counter() - began
            time.sleep(0.05)
    if process.returncode:
        raise SystemExit(f"the stage failed:\n{log.read_text()[-4000:]}")
    steps = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert len(steps) == arguments.steps
    start = {"start_seconds": round(first - steps[0]["timing/step_total"], 1)}
    return summary(arguments, steps) | start


def make_model(folder: Path, shape: str) -> Path:
    """Write a random checkpoint, in a process of its own, which leaves no memory of a card taken."""
    tiny = ["-m", "lmm_r1.cli.make_tiny_model", "--arch", "qwen2_5_vl", "--hidden_size", "192", "--layers", "6"]
    code = "import sys, pathlib; from gpu_stages.subject import write_checkpoint; write_checkpoint(pathlib.Path(sys.argv[1]))"
    flags = ["-c", code, str(folder)] if shape == "3B" else [*tiny, "--output", str(folder)]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, (f"{ROOT}/benchmarks", str(ROOT), os.environ.get("PYTHONPATH")))),
    }
    made = subprocess.run([sys.executable, *flags], capture_output=True, text=True, check=False, env=environment)
    if made.returncode:
        raise SystemExit(f"the model could not be made:\n{made.stderr[-2000:]}")
    return folder


def write_rows(path: Path, *, rows: int, side: int) -> None:
    """Write one row per prompt, each with an image of its own: coloured noise in large squares."""
    noise = random.Random(0)
    images = path.parent / "images"
    images.mkdir()
    with path.open("w") as stream:
        for index in range(rows):
            file = images / f"{index}.png"
            noise_picture(side, noise=noise).save(file)
            content = [{"type": "image", "image": str(file)}, {"type": "text", "text": QUESTION}]
            stream.write(json.dumps({"messages": [{"role": "user", "content": content}], "answer": "7"}) + "\n")


def stage_flags(arguments: argparse.Namespace, folder: Path, model: Path, reward: Path, run: Path) -> list[str]:
    samples = arguments.prompts * arguments.samples
    flags = {
        "--actor.model_name_or_path": model,
        "--data.prompt_dataset": folder / "rows.jsonl",
        "--data.max_len": TEXT_TOKENS + (arguments.image_side**2 // PIXELS_PER_TOKEN) + arguments.new_tokens,
        "--reward.remote_url": reward,
        "--ckpt.output_dir": run,
        "--ckpt.path": run / "checkpoints",
        "--algo.advantage.estimator": "group_norm",
        "--algo.kl.init_coef": 0.01,
        "--algo.kl.estimator": "k3",
        "--rollout.batch_size": arguments.prompts,
        "--rollout.n_samples_per_prompt": arguments.samples,
        "--rollout.max_new_tokens": arguments.new_tokens,
        "--train.batch_size": samples,
        "--ds.param_dtype": arguments.dtype,
    }
    switches = ["--rollout.ignore_eos", "--algo.kl.use_loss", "--vllm.enable_prefix_caching"]
    if not cards():
        # As in the results of earlier versions.
        switches.append("--train.colocate_all")
        flags |= {"--actor.num_gpus_per_node": 1, "--ref.num_gpus_per_node": 1}
        flags |= {"--rollout.micro_batch_size": arguments.samples, "--train.micro_batch_size": arguments.samples}
    return [*switches, *(str(part) for pair in flags.items() for part in pair), *arguments.flags]


def summary(arguments: argparse.Namespace, all_steps: list[dict]) -> dict:
    """Return the first step's seconds and medians over the others; engine and trainer are compared in the first."""
    first, steps = all_steps[0], all_steps[1:]

    def median(name: str) -> float:
        return round(statistics.median(step[name] for step in steps), 3)

    phases = {name.removeprefix("timing/"): median(name) for name in sorted(steps[0]) if name.startswith("timing/")}
    unique, computed = (sum(step[f"tokens/update_{name}"] for step in steps) for name in ("unique", "computed"))
    return {
        "seconds_per_step": phases.pop("step_total"),
        "first_step_seconds": round(first["timing/step_total"], 3),
        "phases": phases,
        "share_of_limit": round(unique / computed, 4),
        "update_tokens": {"unique": unique // len(steps), "computed": computed // len(steps)},
        **facts_of(arguments, "rl_step"),
        "flags": arguments.flags,
        "steps_measured": len(steps),
        "response_length_mean": median("response_length"),
        "mismatch": {name: first[f"mismatch/{name}"] for name in ("mean", "mean_exp", "max")},
        "grad_norms": [step["actor_grad_norm"] for step in all_steps],
    }


if __name__ == "__main__":
    main()
