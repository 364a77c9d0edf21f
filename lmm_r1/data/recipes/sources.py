"""The files of a published dataset: on the hub, or in a local copy with the same layout; and their hashes."""

from __future__ import annotations

import fnmatch
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lmm_r1 import hub
from lmm_r1.data.files import ROWS_FILE, Record, read_records
from lmm_r1.data.recipes.media import is_archive
from lmm_r1.data.recipes.recipe import Recipe
from lmm_r1.errors import UserError
from lmm_r1.files.json_files import count_field, text_field

ROW_SUFFIXES = (".jsonl", ".json", ".parquet", ".csv", ".arrow")
_IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff")
_BLOCK_BYTES = 2**20


@dataclass(frozen=True, kw_only=True)
class SourceFiles:
    """What a recipe's rows are read from."""

    folder: Path
    """Their names are relative to it."""
    rows: tuple[Path, ...]
    """Row files, in the order in which they are read; or one folder that `read_records` takes whole."""
    media: tuple[Path, ...]
    """Archives and images that are not beside the row files."""
    revision: str | None
    """The commit of the hub's dataset; None for a local copy."""

    def records(self, *, split: str) -> Iterator[Record]:
        """Yield the records of all row files."""
        for path in self.rows:
            yield from read_records(str(path), split=split)

    def hashed(self) -> list[Path]:
        """The files whose hashes identify the source: row files and archives."""
        found = [*self.rows, *(path for path in self.media if is_archive(path))]
        return [
            file for path in found for file in (sorted(path.rglob("*")) if path.is_dir() else [path]) if file.is_file()
        ]

    def row_count(self) -> int | None:
        """How many records there are, where that can be told without reading them."""
        if not all(path.suffix == ".parquet" for path in self.rows):
            return None
        import pyarrow
        import pyarrow.parquet

        try:
            return sum(pyarrow.parquet.read_metadata(path).num_rows for path in self.rows)
        except (pyarrow.ArrowInvalid, OSError):
            return None


def hub_files(recipe: Recipe) -> SourceFiles:
    """Fetch a recipe's files from the hub, or out of the hub's cache; a download that broke off goes on.

    Raises UserError where they cannot be had, or where the dataset has no such files.
    """
    source = recipe.source
    assert source.dataset is not None, "the caller asked where there is no dataset"
    folder = hub.dataset_folder(
        source.dataset, patterns=[*source.row_patterns, *source.media], revision=source.revision
    )
    names = _names(folder)
    rows = _matching(names, source.row_patterns)
    if not rows:
        raise UserError(
            f"{source.dataset}: the hub's dataset has no files {' or '.join(source.row_patterns)}; its layout has "
            "changed since the recipe was written"
        )
    return SourceFiles(
        folder=folder,
        rows=tuple(folder / name for name in rows),
        media=_media(recipe, folder, names),
        revision=folder.name,
    )


def local_files(recipe: Recipe, path: Path) -> SourceFiles:
    """Return what of a local copy a recipe reads: a row file, or a folder with the published layout.

    A folder without the published files is read as `read_records` reads folders.

    Raises:
        UserError: there is nothing at `path`, it is an archive, or no row files can be told from others.
    """
    if path.is_file():
        if is_archive(path):
            raise UserError(
                f"{path}: an archive alone has no rows; give the row file that lies beside it, or the folder of both"
            )
        if path.suffix.lower() not in ROW_SUFFIXES:
            raise UserError(f"{path}: unknown kind of row file; known are {', '.join(ROW_SUFFIXES)}")
        return SourceFiles(
            folder=path.parent, rows=(path,), media=_media(recipe, path.parent, _names(path.parent)), revision=None
        )
    if not path.is_dir():
        raise UserError(f"{path}: no such file or folder; check the path")
    names = _names(path)
    rows = _matching(names, recipe.source.row_patterns) or _matching_anywhere(names, recipe.source.row_patterns)
    media = _media(recipe, path, names)
    if rows:
        return SourceFiles(folder=path, rows=tuple(path / name for name in rows), media=media, revision=None)
    alone = [name for name in names if name.lower().endswith(ROW_SUFFIXES)]
    if len(alone) == 1:
        return SourceFiles(folder=path, rows=(path / alone[0],), media=media, revision=None)
    whole = {ROWS_FILE, "state.json", "dataset_dict.json"} & set(names)
    if not whole and not any(name.endswith((".parquet", ".arrow")) for name in alone):
        raise UserError(
            f"{path}: no files {' or '.join(recipe.source.row_patterns)}, and {len(alone)} files that rows could be in; "
            "give the row file itself"
        )
    return SourceFiles(folder=path, rows=(path,), media=media, revision=None)


def _names(folder: Path) -> list[str]:
    """The files under a folder by their relative paths, hidden ones left out."""
    found = []
    for place, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        inside = Path(place).relative_to(folder)
        found += [(inside / name).as_posix() for name in files if not name.startswith(".")]
    return sorted(found)


def _matching(names: Sequence[str], patterns: Sequence[str]) -> list[str]:
    """The names that fit, pattern by pattern, none twice."""
    fitting = [name for pattern in patterns for name in names if fnmatch.fnmatchcase(name, pattern)]
    return list(dict.fromkeys(fitting))


def _matching_anywhere(names: Sequence[str], patterns: Sequence[str]) -> list[str]:
    """The same for a copy that lies deeper, or whose files were put into one folder."""
    anywhere = [f"*/{pattern}" for pattern in patterns]
    return _matching(names, anywhere) or _matching(names, [pattern.rpartition("/")[2] for pattern in patterns])


def _media(recipe: Recipe, folder: Path, names: Sequence[str]) -> tuple[Path, ...]:
    """Archives and images: those that the recipe names, and in a local copy the unpacked ones as well."""
    if not recipe.source.media:
        return ()
    named = _matching(names, recipe.source.media) or _matching_anywhere(names, recipe.source.media)
    loose = [name for name in names if name.lower().endswith(_IMAGE_SUFFIXES)]
    return tuple(folder / name for name in dict.fromkeys([*named, *loose]))


@dataclass(frozen=True, kw_only=True)
class FileHash:
    """One file that rows were read from."""

    name: str
    bytes: int
    sha256: str
    modified_ns: int
    """When it was changed last: with the same size and time it is not read again in a later session."""


def hash_files(
    source: SourceFiles, *, known: Sequence[FileHash] = (), report: Callable[[str], None] = lambda _: None
) -> list[FileHash]:
    """Return the hashes of a source's files; those of `known` are taken over where size and time are the same."""
    by_name = {entry.name: entry for entry in known}
    hashes = []
    for file in source.hashed():
        name = file.relative_to(source.folder).as_posix()
        status = file.stat()
        before = by_name.get(name)
        if before is not None and (before.bytes, before.modified_ns) == (status.st_size, status.st_mtime_ns):
            hashes.append(before)
            continue
        report(f"hashing {name} ({status.st_size / 1e6:,.1f} MB)")
        hashes.append(
            FileHash(name=name, bytes=status.st_size, sha256=sha256_of(file), modified_ns=status.st_mtime_ns)
        )
    return hashes


def file_hashes(value: object, *, place: str) -> list[FileHash]:
    """Return the hashes in the JSON of a state or a manifest; raises UserError, with the place, where it is another."""
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise UserError(f"{place}: files must be a list of objects; delete the folder")
    return [
        FileHash(
            name=text_field(entry, "name", place=place),
            bytes=count_field(entry, "bytes", place=place),
            sha256=text_field(entry, "sha256", place=place),
            modified_ns=entry.get("modified_ns") or 0,
        )
        for entry in value
    ]


def sha256_of(file: Path) -> str:
    """Return the SHA-256 of a file's bytes."""
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()
