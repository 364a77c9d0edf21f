"""Engines by the name of their backend."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from lmm_r1 import loading
from lmm_r1.errors import UserError
from lmm_r1.generation.engine import Engine, EngineSettings, EpisodeSettings, Responder
from lmm_r1.lmm_kits import LmmKit, kit_of

if TYPE_CHECKING:
    from lmm_r1.generation.episode_engine import EpisodeEngine


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


def playing(engine: Engine, episodes: EpisodeSettings | None) -> Responder:
    """Return an engine that plays episodes on another one, or that one where there are none to play; raises as `playing_engine`."""
    return engine if episodes is None else playing_engine(engine, episodes)


def playing_engine(engine: Engine, episodes: EpisodeSettings) -> EpisodeEngine:
    """Return an engine that plays episodes on another one.

    Raises UserError where the environment cannot be had, or the checkpoint's chat template knows no turns.
    """
    from lmm_r1.generation.episode_engine import EpisodeEngine
    from lmm_r1.generation.vllm_engine import VllmEngine

    assert isinstance(engine, VllmEngine), "the commands take nothing else with episodes"
    try:
        return EpisodeEngine(engine, episodes)
    except BaseException:
        engine.close()
        raise


ADAPTER_FILE = "adapter_config.json"


def split_adapter(path: str, adapter: Path | None) -> tuple[str, Path | None]:
    """Return the base model and the adapter of what was given: a folder that is an adapter names its base itself.

    Raises UserError for an adapter that names none, and where two adapters are given.
    """
    folder = Path(path)
    if not (folder / ADAPTER_FILE).is_file() or (folder / "config.json").is_file():
        return path, adapter
    if adapter is not None:
        raise UserError(
            f"{path} is an adapter, and --adapter {adapter} names another; give the base model and one of them"
        )
    from lmm_r1.checkpoints.merging import adapter_base

    base = adapter_base(folder)
    if base is None:
        raise UserError(
            f"{path}: this adapter does not name its base model; give the model, and this as --adapter {path}"
        )
    return base, folder


@contextlib.contextmanager
def merged_checkpoint(path: str, settings: EngineSettings) -> Iterator[str]:
    """Give the checkpoint's own path, or a temporary folder with the adapter merged in."""
    if settings.adapter is None:
        yield path
        return
    from lmm_r1.checkpoints.merging import load_with_adapter, merge_adapter, write_checkpoint
    from lmm_r1.lmm_kits import Checkpoint
    from lmm_r1.lmm_kits.checkpoint import torch_dtype

    trust_remote_code = settings.trust_remote_code
    checkpoint = Checkpoint(path, trust_remote_code=trust_remote_code)
    dtype = torch_dtype(settings.dtype, config=checkpoint.config)
    with tempfile.TemporaryDirectory(prefix="lmm-r1-merged-") as temporary:
        folder = Path(temporary) / "model"
        model = load_with_adapter(path, settings.adapter, dtype=dtype, trust_remote_code=trust_remote_code)
        merge_adapter(model)
        kit, processor = checkpoint.kit, checkpoint.processor
        write_checkpoint(model, kit=kit, processor=processor, output=folder, dtype=dtype, max_shard_size="5GB")
        del model
        yield str(folder)
