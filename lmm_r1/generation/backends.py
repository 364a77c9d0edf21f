"""Engines by the name of their backend."""

from __future__ import annotations

import os
from typing import Literal

from lmm_r1 import loading
from lmm_r1.errors import UserError
from lmm_r1.generation.engine import Engine, EngineSettings
from lmm_r1.lmm_kits import LmmKit, kit_of

Backend = Literal["vllm", "transformers"]
# What can be done with a kit that vLLM does not have.
FINE_TUNE = "it can be fine-tuned with lmm-r1 train_sft"
PLAIN_TRANSFORMERS = "generate through plain transformers (--eval_task generate, --backend transformers)"


def prepare_process() -> None:
    """Set what vLLM and PyTorch read when they are imported; for a process that runs engines itself."""
    # What torch says of thread binding would stand between the lines of the command.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from lmm_r1 import cpu

    cpu.prepare_process()
    # No process of its own for the engine, which would import vLLM once more.
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")


def check_backend(backend: Backend, kit: LmmKit, *, model: str, instead: str = PLAIN_TRANSFORMERS) -> None:
    """Raise UserError where the backend has no class for the kit's models.

    Args:
        model: the flag and the path, for the message.
        instead: what can be done, for the message.
    """
    if backend == "vllm" and kit.engine_refusal is not None:
        raise UserError(f"{model}: vLLM cannot generate with this architecture ({kit.engine_refusal}); {instead}")


def make_engine(backend: Backend, path: str, settings: EngineSettings) -> Engine:
    """Return the checkpoint's engine; raises UserError where it cannot be had in this backend."""
    check_backend(backend, kit_of(path, trust_remote_code=settings.trust_remote_code), model=path)
    if backend == "vllm":
        from lmm_r1.generation.vllm_engine import VllmEngine

        loading.done()
        return VllmEngine(path, settings)
    from lmm_r1.generation.transformers_engine import TransformersEngine

    loading.done()
    return TransformersEngine(path, settings)
