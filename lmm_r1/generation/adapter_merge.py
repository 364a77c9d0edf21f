"""A checkpoint with a LoRA adapter, as engines take it: merged, in a folder of its own for as long as it is loaded."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from lmm_r1.errors import UserError
from lmm_r1.generation.engine import EngineSettings

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
    from lmm_r1.lmm_kits.weight_files import torch_dtype

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
