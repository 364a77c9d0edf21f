"""Seconds of a whole RL step of the real trainer on images, and where they go; JSON on the last line.

python benchmarks/rl_step.py --prompts 8 --samples 16 --new-tokens 96 --image-side 448 --steps 4

A step is: rollout of exactly T new tokens in vLLM, reward, old and reference log-probs, update, weights to the engine.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from machine import machine_name
from PIL import Image

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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", type=Path, help="checkpoint folder; without it a Qwen2.5-VL of 5 M parameters is made"
    )
    parser.add_argument("--prompts", type=int, default=8, help="prompts per step")
    parser.add_argument("--samples", type=int, default=16, help="responses per prompt")
    parser.add_argument("--new-tokens", type=int, default=96, help="tokens of every response")
    parser.add_argument("--image-side", type=int, default=448, help="pixels of each side of the image of a prompt")
    parser.add_argument("--steps", type=int, default=4, help="steps, of which the first is left out")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="bf16", help="of weights, in models and engine")
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="further flags of train_ppo_ray, last")
    parser.add_argument("--output", type=Path, help="also write the JSON to this file")
    arguments = parser.parse_args()
    if arguments.steps < 2:
        parser.error("--steps must be at least 2: the first is left out")
    with tempfile.TemporaryDirectory() as folder:
        result = measure(arguments, Path(folder))
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))


def measure(arguments: argparse.Namespace, folder: Path) -> dict:
    """Run the steps as one stage of `train_ppo_ray` and return what its metrics say."""
    model = arguments.model or make_model(folder / "model")
    write_rows(folder / "rows.jsonl", rows=arguments.prompts * arguments.steps, side=arguments.image_side)
    reward = folder / "reward.py"
    reward.write_text(REWARD_FUNCTION)
    run = folder / "run"
    log = folder / "log"
    command = [sys.executable, "-m", "lmm_r1.cli.train_ppo_ray", *stage_flags(arguments, folder, model, reward, run)]
    with log.open("w") as stream:
        ended = subprocess.run(command, stdout=stream, stderr=subprocess.STDOUT, check=False)
    if ended.returncode:
        raise SystemExit(f"the stage failed:\n{log.read_text()[-4000:]}")
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert len(steps) == arguments.steps
    return summary(arguments, steps[1:])


def make_model(folder: Path) -> Path:
    command = [sys.executable, "-m", "lmm_r1.cli.make_tiny_model", "--arch", "qwen2_5_vl"]
    subprocess.run(
        [*command, "--hidden_size", "192", "--layers", "6", "--output", str(folder)],
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    return folder


def write_rows(path: Path, *, rows: int, side: int) -> None:
    """Write one row per prompt, each with an image of its own: coloured noise in large squares."""
    noise = random.Random(0)
    images = path.parent / "images"
    images.mkdir()
    with path.open("w") as stream:
        for index in range(rows):
            file = images / f"{index}.png"
            pixels = Image.frombytes("RGB", (8, 8), noise.randbytes(8 * 8 * 3))
            pixels.resize((side, side), Image.Resampling.NEAREST).save(file)
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
        "--rollout.micro_batch_size": arguments.samples,
        "--train.batch_size": samples,
        "--train.micro_batch_size": arguments.samples,
        "--actor.num_gpus_per_node": 1,
        "--ref.num_gpus_per_node": 1,
        "--ds.param_dtype": arguments.dtype,
    }
    switches = ["--rollout.ignore_eos", "--train.colocate_all", "--algo.kl.use_loss", "--vllm.enable_prefix_caching"]
    return [*switches, *(str(part) for pair in flags.items() for part in pair), *arguments.flags]


def summary(arguments: argparse.Namespace, steps: list[dict]) -> dict:
    """Return medians over the steps."""

    def median(name: str) -> float:
        return round(statistics.median(step[name] for step in steps), 3)

    phases = {name.removeprefix("timing/"): median(name) for name in sorted(steps[0]) if name.startswith("timing/")}
    unique, computed = (sum(step[f"tokens/update_{name}"] for step in steps) for name in ("unique", "computed"))
    return {
        "seconds_per_step": phases.pop("step_total"),
        "phases": phases,
        "share_of_limit": round(unique / computed, 4),
        "update_tokens": {"unique": unique // len(steps), "computed": computed // len(steps)},
        "benchmark": "rl_step",
        "machine": machine_name(),
        "dtype": arguments.dtype,
        "prompts": arguments.prompts,
        "samples": arguments.samples,
        "new_tokens": arguments.new_tokens,
        "image_side": arguments.image_side,
        "steps_measured": len(steps),
        "response_length_mean": median("rollout/response_length_mean"),
    }


if __name__ == "__main__":
    main()
