"""The arguments of every vLLM engine, in training and outside of it."""

from __future__ import annotations

import copy
import math
import os
import subprocess
from dataclasses import dataclass

import torch
from transformers import PretrainedConfig

from lmm_r1 import cpu
from lmm_r1.config.shared import LOOKUP, Speculation
from lmm_r1.lmm_kits import LmmKit
from lmm_r1.lmm_kits.checkpoint import quantization_of, stored_bytes
from lmm_r1.lmm_kits.delta_rule import linear_layers, state_numbers

_DRAFTED, _ACCEPTED = "vllm:spec_decode_num_draft_tokens", "vllm:spec_decode_num_accepted_tokens"


def speculative_arguments(speculation: Speculation | None) -> dict[str, object]:
    """Return the arguments of vLLM's `EngineArgs` for speculative decoding; empty without it."""
    if speculation is None:
        return {}
    shortest, longest = LOOKUP
    config = {"method": "ngram", "num_speculative_tokens": speculation.tokens}
    return {"speculative_config": config | {"prompt_lookup_min": shortest, "prompt_lookup_max": longest}}


@dataclass(frozen=True, kw_only=True)
class Guesses:
    """The numbers of drafted and accepted tokens of engines."""

    drafted: int = 0
    accepted: int = 0

    def __add__(self, other: Guesses) -> Guesses:
        return Guesses(drafted=self.drafted + other.drafted, accepted=self.accepted + other.accepted)

    def since(self, before: Guesses) -> Guesses:
        """Return the increase since earlier numbers of the same engines."""
        return Guesses(drafted=self.drafted - before.drafted, accepted=self.accepted - before.accepted)

    def metrics(self) -> dict[str, float]:
        """Return the metrics of a rollout; without a rate if nothing was drafted."""
        metrics: dict[str, float] = {"rollout/drafted_tokens": self.drafted, "rollout/accepted_tokens": self.accepted}
        return metrics | ({"rollout/acceptance_rate": self.accepted / self.drafted} if self.drafted else {})


def guesses_so_far() -> Guesses:
    """Return the numbers of this process's engine, which must collect vLLM's statistics."""
    from vllm.v1.metrics.reader import Counter, get_metrics_snapshot

    counts = [metric for metric in get_metrics_snapshot() if isinstance(metric, Counter)]
    drafted, accepted = (sum(its.value for its in counts if its.name == name) for name in (_DRAFTED, _ACCEPTED))
    return Guesses(drafted=drafted, accepted=accepted)


# Tokens per cache block on CPUs: with vLLM's 128, each sample of a group would recompute up to 127 prompt tokens.
CPU_BLOCK_SIZE = 32
SCHEDULER = "lmm_r1.generation.worker_extension.picture_scheduler"
"""Imported by vLLM's process: a preempted request needs its pictures again."""

GIB = 2**30
MIB = 2**20
# Memory of an engine on a GPU for CUDA's context and graphs, and the largest prefill batch.
WORKSPACE = 3 * GIB
# KV cache beyond that of the responses.
SPARE_CACHE = 2 * GIB
# vLLM's default and the maximum here, because other libraries need memory, too.
MOST_SHARE = 0.92
# From this GPU memory on, vLLM's defaults allow more responses at a time and more tokens per pass.
LARGE_GPU = 70 * GIB
# Parameters of a language model's layers from which CUDA graphs are captured.
FEWEST_PARAMETERS = 100_000_000
# Left free on a GPU in addition to other processes' memory.
MARGIN = GIB
# On CPUs, where it is only used in a check.
CPU_SHARE = 0.85


def kv_bytes_per_token(config: PretrainedConfig, *, width: int) -> int:
    """Return the bytes of a token's keys and values in all layers that store them.

    Args:
        width: bytes of a number.
    """
    text = config.get_text_config()
    # The last layers may share the keys and values of earlier ones.
    keeping = text.num_hidden_layers - linear_layers(text) - (getattr(text, "num_kv_shared_layers", None) or 0)
    numbers = 0
    for layer in text.per_layer_config[:keeping]:
        heads = getattr(layer, "num_key_value_heads", None) or layer.num_attention_heads
        numbers += heads * (getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads)
    return 2 * width * numbers


def engine_bytes(
    config: PretrainedConfig, *, weights: int, width: int, max_len: int, responses: int, gpu_bytes: int, gpus: int = 1
) -> int:
    """Return the bytes that an engine needs on each of its GPUs for `responses` responses of the longest length at a time.

    These are its weights, its workspace with the logits and the prefill of a batch, and the KV cache of the responses, up to
    vLLM's limit of concurrent ones. Linear layers have a state per response, in single precision.

    Args:
        weights: bytes of all weights.
        width: bytes of a number.
        gpus: GPUs over which the engine is split.
    """
    text = config.get_text_config()
    at_once, batched = (1024, 16384) if gpu_bytes >= LARGE_GPU else (256, 8192)
    logits = 8 * min(at_once, responses) * text.vocab_size
    widest = getattr(text, "intermediate_size", None)
    widest = widest if isinstance(widest, int) else 4 * text.hidden_size
    prefill = width * min(batched, responses * max_len) * (4 * text.hidden_size + 2 * widest)
    per_response = kv_bytes_per_token(config, width=width) * max_len + 4 * state_numbers(text)
    cache = per_response * min(at_once, responses)
    return (weights + prefill + cache) // gpus + logits + WORKSPACE + SPARE_CACHE


def share_of(needed: int, *, room: int, gpu_bytes: int) -> float:
    """Return `gpu_memory_utilization`, in hundredths, for an engine that needs `needed` bytes and has `room`."""
    return max(1, min(math.floor(100 * room / gpu_bytes), math.ceil(100 * needed / gpu_bytes), 100 * MOST_SHARE)) / 100


def free_share(
    config: PretrainedConfig, *, kit: LmmKit, dtype: str, max_len: int, responses: int, gpus: int = 1
) -> float:
    """Return `gpu_memory_utilization` for an engine in this process: what its responses need, limited by the free memory.

    Args:
        dtype: of `EngineSettings`.
        responses: the most responses at a time.
    """
    if not cpu.own_cuda():
        return CPU_SHARE
    gpu_bytes, free = gpu_memory()
    width = 4 if (dtype if dtype != "auto" else str(config.dtype)).endswith("float32") else 2
    with torch.device("meta"):
        model = kit.model_class_of(config)(copy.deepcopy(config))
    whole = width * sum(weight.numel() for weight in model.parameters())
    needed = engine_bytes(
        config,
        weights=(quantization_of(config) and stored_bytes(config.name_or_path)) or whole,
        width=width,
        max_len=max_len,
        responses=responses,
        gpu_bytes=gpu_bytes,
        gpus=gpus,
    )
    return share_of(needed, room=free - MARGIN, gpu_bytes=gpu_bytes)


def gpu_memory() -> tuple[int, int]:
    """Return the bytes of the smallest GPU of this process, and the free bytes of the fullest one.

    Read by nvidia-smi if possible, because CUDA would use memory in this process and prevent forks.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    command = ["nvidia-smi", "--query-gpu=memory.total,memory.free", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(
            [*command, *([f"--id={visible}"] if visible else [])],
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        ).stdout
        totals, free = zip(*(map(int, line.split(",")) for line in said.splitlines()), strict=True)
        return min(totals) * MIB, min(free) * MIB
    except (OSError, subprocess.SubprocessError, ValueError):
        left, total = torch.cuda.mem_get_info()
        return total, left


def engine_arguments(
    model: str,
    *,
    kit: LmmKit,
    config: PretrainedConfig,
    trust_remote_code: bool,
    dtype: str,
    max_model_len: int,
    max_images: int,
    max_videos: int,
    tensor_parallel_size: int,
    gpu_memory_utilization: float,
    enforce_eager: bool | None,
    speculation: Speculation | None = None,
) -> dict[str, object]:
    """Return arguments of vLLM's `EngineArgs` and `LLM`.

    Args:
        model: a checkpoint without adapters.
        config: the checkpoint's config.
        max_model_len: longest prompt and response together, in tokens.
        max_images, max_videos: the most in one prompt.
        enforce_eager: run without CUDA graphs; None does so for small models only.
        speculation: settings of speculative decoding.
    """
    on_gpu, text = cpu.has_cuda(), config.get_text_config()
    # Capturing CUDA graphs of a small model takes longer than they save. A layer's attention and feed-forward matrices have
    # about twelve times the square of its width.
    is_small = 12 * text.num_hidden_layers * text.hidden_size**2 < FEWEST_PARAMETERS
    return {
        "model": model,
        "trust_remote_code": trust_remote_code,
        "dtype": dtype,
        "max_model_len": max_model_len,
        "tensor_parallel_size": tensor_parallel_size,
        "gpu_memory_utilization": gpu_memory_utilization,
        "enforce_eager": not on_gpu or (is_small if enforce_eager is None else enforce_eager),
        "scheduler_cls": SCHEDULER,
        # Our own lines report what is loaded.
        "use_tqdm_on_load": False,
        **({} if on_gpu else {"block_size": CPU_BLOCK_SIZE}),
        **speculative_arguments(speculation),
        **kit.engine_arguments(config, max_images=max_images, max_videos=max_videos),
    }
