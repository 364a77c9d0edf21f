"""Seconds of TRL's GRPO step on what `rl_step.py` measures, for comparison on the same machine; JSON on the last line.

python benchmarks/trl_step.py --prompts 8 --samples 16 --new-tokens 96 --image-side 448 --steps 3 [--dtype fp32]

TRL is among the dev packages. It samples with transformers, as it does without vLLM's server; it was given the same model,
images, rewards, KL term and number of tokens.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
import zlib
from pathlib import Path
from typing import Any

from machine import machine_name
from rl_step import QUESTION, make_model, write_rows

from lmm_r1 import cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="checkpoint folder; without it that of rl_step.py is made")
    parser.add_argument("--prompts", type=int, default=8, help="prompts per step")
    parser.add_argument("--samples", type=int, default=16, help="responses per prompt")
    parser.add_argument("--new-tokens", type=int, default=96, help="tokens of every response")
    parser.add_argument("--image-side", type=int, default=448, help="pixels of each side of the image of a prompt")
    parser.add_argument("--steps", type=int, default=3, help="steps, of which the first is left out")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="bf16", help="of weights")
    parser.add_argument("--output", type=Path, help="also write the JSON to this file")
    arguments = parser.parse_args()
    if arguments.steps < 2:
        parser.error("--steps must be at least 2: the first is left out")
    # Before anything imports torch.
    cpu.prepare_process()
    with tempfile.TemporaryDirectory() as folder:
        result = measure(arguments, Path(folder))
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run TRL's trainer and return the median of its steps."""
    import torch
    import trl
    from transformers import AutoModelForImageTextToText, AutoProcessor, TrainerCallback

    seconds: list[float] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.began = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            seconds.append(time.perf_counter() - self.began)

    path = arguments.model or make_model(folder / "model")
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[arguments.dtype]
    model = AutoModelForImageTextToText.from_pretrained(path, dtype=dtype)
    trainer = trl.GRPOTrainer(
        model=model,
        args=trl.GRPOConfig(**settings(arguments, folder / "run")),
        reward_funcs=reward,
        train_dataset=dataset(arguments, folder),
        processing_class=AutoProcessor.from_pretrained(path, padding_side="left"),
        callbacks=[Clock()],
    )
    trainer.train()
    lengths = {entry["completions/mean_length"] for entry in trainer.state.log_history if "loss" in entry}
    assert lengths == {float(arguments.new_tokens)}, lengths
    return {
        "seconds_per_step": round(statistics.median(seconds[1:]), 3),
        "benchmark": "trl_step",
        "machine": machine_name(),
        "trl": trl.__version__,
        "dtype": arguments.dtype,
        "prompts": arguments.prompts,
        "samples": arguments.samples,
        "new_tokens": arguments.new_tokens,
        "image_side": arguments.image_side,
        "steps_measured": len(seconds) - 1,
    }


def settings(arguments: argparse.Namespace, output: Path) -> dict[str, Any]:
    """Return TRL's settings: one group in each pass, one optimizer step, a reference model."""
    return {
        "output_dir": str(output),
        "per_device_train_batch_size": arguments.samples,
        "gradient_accumulation_steps": arguments.prompts,
        "num_generations": arguments.samples,
        "max_completion_length": arguments.new_tokens,
        "generation_kwargs": {"min_new_tokens": arguments.new_tokens},
        "beta": 0.01,
        "max_steps": arguments.steps,
        "gradient_checkpointing": False,
        # Autocasting; the weights themselves are of the dtype that was asked for.
        "bf16": False,
        "use_cpu": True,
        "report_to": [],
        "logging_steps": 1,
        "save_strategy": "no",
        "shuffle_dataset": False,
    }


def dataset(arguments: argparse.Namespace, folder: Path) -> Any:
    """Return the rows of `rl_step.py` as TRL takes them."""
    from datasets import Dataset, Image

    file = folder / "rows.jsonl"
    write_rows(file, rows=arguments.prompts * arguments.steps, side=arguments.image_side)
    contents = [json.loads(line)["messages"][0]["content"] for line in file.read_text().splitlines()]
    rows = [{"prompt": [{"role": "user", "content": QUESTION}], "image": image["image"]} for image, _ in contents]
    return Dataset.from_list(rows).cast_column("image", Image())


def reward(completions: list[Any], **_: Any) -> list[float]:
    """Return a number in [0, 1) that follows from each response alone."""
    return [zlib.crc32(json.dumps(completion).encode()) / 2**32 for completion in completions]


if __name__ == "__main__":
    main()
