"""The weight files of a checkpoint: whether all are there and whole, their precision, and single tensors of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from lmm_r1.errors import UserError

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig

# In the order in which transformers looks for them; an index names the files of a model in several parts.
_NAMES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
_LENGTH_BYTES = 8


def check_weights(model_path: str) -> None:
    """Raise UserError when weights of a checkpoint folder are missing or cut short; a hub name is not looked at."""
    folder = Path(model_path)
    if not folder.is_dir():
        return
    found = [folder / name for name in _NAMES if (folder / name).is_file()]
    if not found:
        raise UserError(f"{model_path}: no weights in this folder ({_NAMES[0]} or {_NAMES[1]}); copy them into it")
    for file in _parts(found[0]):
        if not file.is_file():
            raise UserError(f"{file}: this weight file, which {found[0].name} names, is missing; copy it again")
        if file.suffix == ".safetensors":
            _check_length(file)


def torch_dtype(name: str, *, config: PretrainedConfig) -> torch.dtype:
    """Return the precision called `name`; `auto` is that of the checkpoint's config, fp32 where it names none."""
    import torch

    dtype = name if name != "auto" else config.dtype or config.get_text_config().dtype or torch.float32
    return getattr(torch, dtype) if isinstance(dtype, str) else dtype


def _parts(file: Path) -> list[Path]:
    if file.suffix != ".json":
        return [file]
    try:
        names = set(json.loads(file.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{file}: not an index of weight files ({error}); copy it again") from error
    return [file.parent / name for name in sorted(names)]


def _check_length(file: Path) -> None:
    """Compare a safetensors file's length with what its header promises: length of the header, header, tensors."""
    length = file.stat().st_size
    with file.open("rb") as stream:
        header_length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
        header = stream.read(header_length) if header_length <= length else b""
    try:
        tensors = [entry for name, entry in json.loads(header).items() if name != "__metadata__"]
        end = max(entry["data_offsets"][1] for entry in tensors)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise UserError(f"{file}: the weight file is damaged (its header cannot be read); copy it again") from error
    promised = _LENGTH_BYTES + header_length + end
    if length != promised:
        raise UserError(f"{file}: the weight file has {length} bytes instead of {promised}; copy it again")


def read_tensors(path: str, wanted: Callable[[str], bool]) -> dict[str, torch.Tensor]:
    """Return the tensors whose stored names are wanted; of the others nothing is read.

    Args:
        path: a folder or a hub name.
    """
    for single, index in (_NAMES[:2], _NAMES[2:]):
        file = _stored_file(path, single)
        if file is not None:
            return _read(file, wanted)
        if (listing := _stored_file(path, index)) is None:
            continue
        places = json.loads(listing.read_text(encoding="utf-8"))["weight_map"]
        parts = sorted({part for name, part in places.items() if wanted(name)})
        files = [_stored_file(path, part) for part in parts]
        return {name: tensor for file in files if file is not None for name, tensor in _read(file, wanted).items()}
    return {}


def _stored_file(path: str, name: str) -> Path | None:
    from transformers.utils import cached_file

    file = cached_file(path, name, _raise_exceptions_for_missing_entries=False)
    return None if file is None else Path(file)


def _read(file: Path, wanted: Callable[[str], bool]) -> dict[str, torch.Tensor]:
    import torch
    from safetensors import safe_open

    if file.suffix != ".safetensors":
        stored = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        return {name: tensor for name, tensor in stored.items() if wanted(name)}
    with safe_open(file, framework="pt") as weights:
        return {name: weights.get_tensor(name) for name in weights.keys() if wanted(name)}
