"""Single tensors out of a checkpoint's weight files, by the names they are stored under."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import safe_open
from transformers.utils import (
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
    cached_file,
)


def read_tensors(path: str, wanted: Callable[[str], bool]) -> dict[str, torch.Tensor]:
    """Return the tensors whose stored names are wanted; of the others nothing is read.

    Args:
        path: a folder or a hub name.
    """
    for single, index in ((SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME), (WEIGHTS_NAME, WEIGHTS_INDEX_NAME)):
        file = _found(path, single)
        if file is not None:
            return _read(file, wanted)
        if (listing := _found(path, index)) is None:
            continue
        places = json.loads(listing.read_text(encoding="utf-8"))["weight_map"]
        parts = sorted({part for name, part in places.items() if wanted(name)})
        files = [_found(path, part) for part in parts]
        return {name: tensor for file in files if file is not None for name, tensor in _read(file, wanted).items()}
    return {}


def _found(path: str, name: str) -> Path | None:
    file = cached_file(path, name, _raise_exceptions_for_missing_entries=False)
    return None if file is None else Path(file)


def _read(file: Path, wanted: Callable[[str], bool]) -> dict[str, torch.Tensor]:
    if file.suffix != ".safetensors":
        stored = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        return {name: tensor for name, tensor in stored.items() if wanted(name)}
    with safe_open(file, framework="pt") as weights:
        return {name: weights.get_tensor(name) for name in weights.keys() if wanted(name)}
