"""The arguments that every vLLM engine gets, in training and outside of it."""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig

from lmm_r1 import cpu
from lmm_r1.config.speculation import Speculation
from lmm_r1.generation.speculation import speculative_arguments
from lmm_r1.lmm_kits import LmmKit

# Tokens of a cache block on CPUs: of vLLM's 128 there, samples of a group would compute up to 127 of the prompt each.
CPU_BLOCK_SIZE = 32
SCHEDULER = "lmm_r1.generation.picture_scheduler.picture_scheduler"
"""For vLLM, whose process imports it: any request may have to make room for others, and then needs its pictures again."""


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
    enforce_eager: bool,
    speculation: Speculation | None = None,
) -> dict[str, Any]:
    """Return arguments of vLLM's `EngineArgs` and `LLM`.

    Args:
        model: a checkpoint without adapters.
        config: the checkpoint's own.
        max_model_len: longest prompt and response together, in tokens.
        max_images, max_videos: most of them in one prompt.
        enforce_eager: run without CUDA graphs; so it is always where there is no CUDA.
        speculation: how tokens are guessed ahead.
    """
    on_gpu = cpu.has_cuda()
    return {
        "model": model,
        "trust_remote_code": trust_remote_code,
        "dtype": dtype,
        "max_model_len": max_model_len,
        "tensor_parallel_size": tensor_parallel_size,
        "gpu_memory_utilization": gpu_memory_utilization,
        "enforce_eager": enforce_eager or not on_gpu,
        "scheduler_cls": SCHEDULER,
        # Lines of our own say what is being loaded.
        "use_tqdm_on_load": False,
        **({} if on_gpu else {"block_size": CPU_BLOCK_SIZE}),
        **speculative_arguments(speculation),
        **kit.engine_arguments(config, max_images=max_images, max_videos=max_videos),
    }
