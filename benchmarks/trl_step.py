"""Seconds of TRL's GRPO step on what `rl_step.py` measures, for comparison on the same machine; JSON on the last line.

python benchmarks/trl_step.py --prompts 8 --samples 16 --new-tokens 96 --image-side 448 --steps 3 --dtype fp32
python benchmarks/trl_step.py --shape 3B --prompts 16 --samples 8 --new-tokens 512 --image-side 896 --steps 4    # on a GPU

TRL is among the dev packages. It gets the same model, images, rewards, KL term and number of tokens. On a GPU it samples with
vLLM in its own process, which sleeps during the update, and on a CPU with transformers. Further settings on a GPU: gradient
checkpointing, weights and moments in bf16, PyTorch's fused AdamW, and Liger's kernels if they are installed.

By default TRL drops a response whose probability in the trainer is more than 3 times that in vLLM (`sequence_mask`): of a random
model in bf16, all. `--correction token_truncate` (the default here) bounds the ratio of each token; `off` saves a forward pass.
`importance_weights` and `grad_norms` show whether anything was trained.
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

from machine import cards, version
from measuring import publish
from rl_step import PIXELS_PER_TOKEN, QUESTION, TEXT_TOKENS, facts_of, make_model, parse_step, step_parser, write_rows

from lmm_r1 import cpu

CORRECTIONS = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "off")
WEIGHT = "sampling/importance_sampling_ratio/"


def main() -> None:
    parser = step_parser(__doc__)
    parser.add_argument("--micro-batch", type=int, help="responses in one pass; a group without it")
    parser.add_argument("--no-checkpointing", action="store_true", help="keep all activations of a pass, on a GPU")
    parser.add_argument("--no-liger", action="store_true", help="without Liger's kernels, where they are installed")
    parser.add_argument("--gpu-memory", type=float, default=0.3, help="vLLM's share of the GPU while it is awake")
    parser.add_argument("--correction", choices=CORRECTIONS, default="token_truncate", help="of vLLM's log-probs")
    arguments = parse_step(parser)
    if (arguments.prompts * arguments.samples) % (arguments.micro_batch or arguments.samples):
        parser.error("--micro-batch must divide --prompts times --samples")
    # Before anything imports torch.
    cpu.prepare_process()
    with tempfile.TemporaryDirectory() as folder:
        result = measure(arguments, Path(folder))
    publish(result, arguments.output)


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run TRL's trainer and return its first step's seconds and the median of the others."""
    import torch
    import trl
    from transformers import AutoModelForImageTextToText, AutoProcessor, TrainerCallback

    seconds: list[float] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.began = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            if on_gpu:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - self.began)

    on_gpu = bool(cards())
    path = arguments.model or make_model(folder / "model", arguments.shape)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[arguments.dtype]
    model = AutoModelForImageTextToText.from_pretrained(path, dtype=dtype)
    asked = settings(arguments, folder / "run", media=media_tokens(model.config))
    trainer = trl.GRPOTrainer(
        model=model,
        args=trl.GRPOConfig(**asked),
        reward_funcs=reward,
        train_dataset=dataset(arguments, folder),
        processing_class=AutoProcessor.from_pretrained(path, padding_side="left"),
        callbacks=[Clock()],
    )
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    lengths = {entry["completions/mean_length"] for entry in steps}
    assert lengths == {float(arguments.new_tokens)}, lengths
    weights = {name: [step.get(f"{WEIGHT}{name}") for step in steps] for name in ("min", "mean", "max")}
    return {
        "seconds_per_step": round(statistics.median(seconds[1:]), 3),
        "first_step_seconds": round(seconds[0], 3),
        "peak_gib": round(torch.cuda.max_memory_reserved() / 2**30, 1) if on_gpu else None,
        **facts_of(arguments, "trl_step"),
        "steps_measured": len(seconds) - 1,
        "correction": arguments.correction if on_gpu else None,
        "importance_weights": weights if asked["vllm_importance_sampling_correction"] else None,
        "grad_norms": [step["grad_norm"] for step in steps],
        "settings": {name: asked[name] for name in sorted(asked) if name not in ("output_dir", "generation_kwargs")},
    }


def media_tokens(config: Any) -> tuple[int, ...]:
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    return tuple(getattr(config, name) for name in names)


def settings(arguments: argparse.Namespace, output: Path, *, media: tuple[int, ...]) -> dict[str, Any]:
    """Return TRL's settings: one optimizer step, a reference model, and what is fastest on the device.

    Args:
        media: Placeholder tokens, which a random model samples, and TRL's engine does not ban.
    """
    micro_batch = arguments.micro_batch or arguments.samples
    common = {
        "output_dir": str(output),
        "per_device_train_batch_size": micro_batch,
        "gradient_accumulation_steps": arguments.prompts * arguments.samples // micro_batch,
        "num_generations": arguments.samples,
        "max_completion_length": arguments.new_tokens,
        "beta": 0.01,
        "max_steps": arguments.steps,
        # Autocasting; the weights themselves are of the dtype that was asked for.
        "bf16": False,
        "report_to": [],
        "logging_steps": 1,
        "save_strategy": "no",
        "shuffle_dataset": False,
    }
    if not cards():
        return common | {
            "use_cpu": True,
            "gradient_checkpointing": False,
            "generation_kwargs": {"min_new_tokens": arguments.new_tokens},
            "vllm_importance_sampling_correction": False,
        }
    corrected = arguments.correction != "off"
    return common | {
        "gradient_checkpointing": not arguments.no_checkpointing,
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
        "optim": "adamw_torch_fused",
        "use_liger_kernel": not arguments.no_liger and version("liger-kernel") is not None,
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_enable_sleep_mode": True,
        "vllm_gpu_memory_utilization": arguments.gpu_memory,
        "vllm_max_model_length": TEXT_TOKENS + arguments.image_side**2 // PIXELS_PER_TOKEN + arguments.new_tokens,
        "vllm_importance_sampling_correction": corrected,
        **({"vllm_importance_sampling_mode": arguments.correction} if corrected else {}),
        "generation_kwargs": {"ignore_eos": True, "logit_bias": dict.fromkeys(media, -100.0)},
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
