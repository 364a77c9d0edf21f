"""A recipe's source files: row files, media, and the manifest with their hashes."""

from __future__ import annotations

import fnmatch
import hashlib
import os
import shutil
import tarfile
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath

from lmm_r1 import hub
from lmm_r1.data.fetching import MAX_BYTES
from lmm_r1.data.files import ROWS_FILE, Record, read_records
from lmm_r1.data.media_access import downloaded_folder, is_below
from lmm_r1.data.messages import resolve
from lmm_r1.data.recipes.recipe import Recipe
from lmm_r1.errors import UserError
from lmm_r1.files.json_files import count_field, read_json_object, text_field

ARCHIVES = (".zip", ".tar", ".tar.gz", ".tgz")
Member = tuple[zipfile.ZipFile, str] | Path


def is_archive(path: Path) -> bool:
    """Return whether the file's name is that of a supported archive."""
    return path.name.lower().endswith(ARCHIVES)


class MediaFiles:
    """Finds an image by the end of its path: `train/1.png` is `images/train/1.png`, and never `test/1.png`.

    Zip archives are read in place; tar archives have no index, so they are unpacked.
    """

    def __init__(self, files: Sequence[Path], *, folder: Path, unpack_into: Path | None) -> None:
        """List files of the dataset's folder; tar archives are unpacked into `unpack_into`, None refuses them."""
        self._by_name: dict[str, list[tuple[PurePosixPath, Member]]] = {}
        self._open: list[zipfile.ZipFile] = []
        self.folders = (folder,) if unpack_into is None else (folder, unpack_into)
        for file in files:
            if not is_archive(file):
                self._add(PurePosixPath(file.relative_to(folder).as_posix()), file)
            elif file.suffix.lower() == ".zip":
                self._add_zip(file)
            else:
                self._add_tar(file, folder=folder, unpack_into=unpack_into)

    def __enter__(self) -> MediaFiles:
        return self

    def __exit__(self, *_: object) -> None:
        for archive in self._open:
            archive.close()

    def find(self, path: str, *, base_dir: Path, location: str) -> str | bytes:
        """Return the path of an existing file, or the encoded image from an archive; `path` itself if nothing fits.

        Raises UserError if several files fit equally well, or an archive is damaged.
        """
        local = str(resolve(path, base_dir=base_dir))
        is_own = downloaded_folder(base_dir) is None or is_below(local, self.folders)
        if is_own and os.path.isfile(local):
            return local
        asked = PurePosixPath(os.path.normpath(path.removeprefix("file://")))
        fitting = [
            (_shared(asked, name), member)
            for name, member in self._by_name.get(asked.name, ())
            if _ends_alike(asked, name)
        ]
        if not fitting:
            return path
        longest = max(shared for shared, _ in fitting)
        best = [member for shared, member in fitting if shared == longest]
        if len(best) > 1:
            raise UserError(
                f"{location}: the image {path} may be any of {len(best)} files, such as {_shown(best[0])} and "
                f"{_shown(best[1])}; remove those that do not belong to the dataset"
            )
        return _content(best[0], location=location)

    def _add(self, name: PurePosixPath, member: Member) -> None:
        self._by_name.setdefault(name.name, []).append((name, member))

    def _add_zip(self, file: Path) -> None:
        try:
            archive = zipfile.ZipFile(file)
        except (zipfile.BadZipFile, OSError) as error:
            raise UserError(f"{file}: not a readable zip archive ({error}); fetch it again") from error
        self._open.append(archive)
        for name in archive.namelist():
            if not name.endswith("/"):
                self._add(PurePosixPath(name), (archive, name))

    def _add_tar(self, file: Path, *, folder: Path, unpack_into: Path | None) -> None:
        if unpack_into is None:
            raise UserError(f"{file}: tar archives cannot be read in place; unpack it, and give the folder")
        content = unpacked(file, folder=unpack_into / file.relative_to(folder))
        for path in sorted(content.rglob("*")):
            if path.is_file():
                self._add(PurePosixPath(path.relative_to(content).as_posix()), path)


def unpacked(file: Path, *, folder: Path) -> Path:
    """Return the folder with the content of a tar archive; reuses one that was unpacked completely before."""
    partial = folder.with_name(f".{folder.name}.partial")
    if folder.is_dir():
        return folder
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        with tarfile.open(file) as archive:
            archive.extractall(partial, filter="data")
    except (tarfile.TarError, EOFError, OSError) as error:
        raise UserError(
            f"{file}: cannot be unpacked into {folder.parent} ({error}); fetch it again, or free space"
        ) from error
    partial.rename(folder)
    return folder


def _ends_alike(asked: PurePosixPath, name: PurePosixPath) -> bool:
    return _shared(asked, name) == min(len(_steps(asked)), len(_steps(name)))


def _shared(asked: PurePosixPath, name: PurePosixPath) -> int:
    """Return how many components two paths share, counted from the file name upwards."""
    count = 0
    for one, other in zip(reversed(_steps(asked)), reversed(_steps(name)), strict=False):
        if one != other:
            break
        count += 1
    return count


def _steps(path: PurePosixPath) -> Sequence[str]:
    return [step for step in path.parts if step not in ("/", ".", "..")]


def _content(member: Member, *, location: str) -> str | bytes:
    if isinstance(member, Path):
        return str(member)
    archive, name = member
    if archive.getinfo(name).file_size > MAX_BYTES:
        raise UserError(
            f"{location}: {_shown(member)} is larger than {MAX_BYTES // 2**20} MiB; remove it from the archive"
        )
    try:
        return archive.read(name)
    except (zipfile.BadZipFile, OSError, RuntimeError, NotImplementedError) as error:
        raise UserError(f"{location}: cannot read {_shown(member)} ({error}); fetch the archive again") from error


def _shown(member: Member) -> str:
    return str(member) if isinstance(member, Path) else f"{member[0].filename}:{member[1]}"


ROW_SUFFIXES = (".jsonl", ".json", ".parquet", ".csv", ".arrow")
_IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff")
_BLOCK_BYTES = 2**20


@dataclass(frozen=True, kw_only=True)
class SourceFiles:
    """The files that a recipe's rows are read from."""

    folder: Path
    """The folder that names are relative to."""
    rows: tuple[Path, ...]
    """Row files in reading order, or one folder that `read_records` reads as a whole."""
    media: tuple[Path, ...]
    """Archives and images that are not next to the row files."""
    revision: str | None
    """The commit of the dataset on the hub; None for a local copy."""

    def records(self, *, split: str) -> Iterator[Record]:
        for path in self.rows:
            yield from read_records(str(path), split=split)

    def hashed(self) -> list[Path]:
        """Return the files whose hashes identify the source: row files and archives."""
        found = [*self.rows, *(path for path in self.media if is_archive(path))]
        return [
            file for path in found for file in (sorted(path.rglob("*")) if path.is_dir() else [path]) if file.is_file()
        ]

    def row_count(self) -> int | None:
        """Return the number of records, None if that requires reading them."""
        if not all(path.suffix == ".parquet" for path in self.rows):
            return None
        import pyarrow
        import pyarrow.parquet

        try:
            return sum(pyarrow.parquet.read_metadata(path).num_rows for path in self.rows)
        except (pyarrow.ArrowInvalid, OSError):
            return None


def hub_files(recipe: Recipe) -> SourceFiles:
    """Fetch a recipe's files from the hub or its cache; an interrupted download resumes.

    Raises UserError if they are not available, or the dataset has no such files.
    """
    source = recipe.source
    assert source.dataset is not None, "the caller handles recipes without a dataset"
    folder = hub.dataset_folder(
        source.dataset, patterns=[*source.row_patterns, *source.media], revision=source.revision
    )
    names = _names(folder)
    rows = _matching(names, source.row_patterns)
    if not rows:
        raise UserError(
            f"{source.dataset}: the dataset on the hub has no files {' or '.join(source.row_patterns)}; its layout has "
            "changed since the recipe was written"
        )
    return SourceFiles(
        folder=folder,
        rows=tuple(folder / name for name in rows),
        media=_media(recipe, folder, names),
        revision=folder.name,
    )


def local_files(recipe: Recipe, path: Path) -> SourceFiles:
    """Return the files of a local copy: a row file, or a folder with the published layout.

    A folder without the published files is read as by `read_records`.

    Raises:
        UserError: `path` does not exist, is an archive, or is a folder whose row files cannot be determined.
    """
    if path.is_file():
        if is_archive(path):
            raise UserError(
                f"{path}: an archive alone has no rows; give the row file next to it, or the folder that holds both"
            )
        if path.suffix.lower() not in ROW_SUFFIXES:
            raise UserError(f"{path}: unknown kind of row file; known kinds are {', '.join(ROW_SUFFIXES)}")
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
            f"{path}: no files {' or '.join(recipe.source.row_patterns)}, and {len(alone)} files that may hold rows; "
            "give the row file itself"
        )
    return SourceFiles(folder=path, rows=(path,), media=media, revision=None)


def _names(folder: Path) -> list[str]:
    found = []
    for place, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        inside = Path(place).relative_to(folder)
        found += [(inside / name).as_posix() for name in files if not name.startswith(".")]
    return sorted(found)


def _matching(names: Sequence[str], patterns: Sequence[str]) -> list[str]:
    fitting = [name for pattern in patterns for name in names if fnmatch.fnmatchcase(name, pattern)]
    return list(dict.fromkeys(fitting))


def _matching_anywhere(names: Sequence[str], patterns: Sequence[str]) -> list[str]:
    """Return the same for a copy in a deeper folder, or with all files in one folder."""
    anywhere = [f"*/{pattern}" for pattern in patterns]
    return _matching(names, anywhere) or _matching(names, [pattern.rpartition("/")[2] for pattern in patterns])


def _media(recipe: Recipe, folder: Path, names: Sequence[str]) -> tuple[Path, ...]:
    """Return archives and images: those that the recipe names, and unpacked ones of a local copy."""
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
    """When it was last changed; a later session reuses the hash if size and time are unchanged."""


def hash_files(
    source: SourceFiles, *, known: Sequence[FileHash] = (), report: Callable[[str], None] = lambda _: None
) -> list[FileHash]:
    """Return the hashes of a source's files; those of `known` are reused if size and time are unchanged."""
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
    """Return the hashes in the JSON of a state or a manifest; raises UserError, with the place, for invalid JSON."""
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
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


MANIFEST_FILE = "manifest.json"
LEFT_OUT_FILE = "left_out.jsonl"
"""Lists the rows that could not be used, one per line, with the reasons."""


@dataclass(frozen=True, kw_only=True)
class JobSettings:
    """What rows depend on, except for the content of the source files."""

    recipe: str
    recipe_sha256: str
    origin: str
    """The dataset on the hub, or the local copy as given."""
    max_rows: int | None

    def difference(self, other: JobSettings) -> str | None:
        """Return what differs, as `recipe (a, now b)`; None if nothing does."""
        for name, mine in asdict(self).items():
            theirs = getattr(other, name)
            if mine == theirs:
                continue
            if name == "recipe_sha256":
                return f"version of the recipe {self.recipe}"
            return f"{name} ({mine}, now {theirs})"
        return None

    @staticmethod
    def of(record: dict[str, object], *, place: str) -> JobSettings:
        """Read the settings back; raises UserError for invalid ones."""
        return JobSettings(
            recipe=text_field(record, "recipe", place=place),
            recipe_sha256=text_field(record, "recipe_sha256", place=place),
            origin=text_field(record, "origin", place=place),
            max_rows=None if record.get("max_rows") is None else count_field(record, "max_rows", place=place),
        )


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """One prepared folder."""

    settings: JobSettings
    dataset: str | None
    split: str
    revision: str | None
    """The commit of the dataset on the hub; None for a local copy."""
    licence: str
    unchecked: Mapping[str, str]
    """What of the recipe was not compared with the published files."""
    files: tuple[FileHash, ...]
    read: int
    kept: int
    filtered: Mapping[str, int]
    """How many rows each condition of the recipe removed, by its column."""
    left_out: int
    """Matching rows that could not be used, listed in `LEFT_OUT_FILE`."""
    images: int
    rows_sha256: str

    def record(self) -> dict[str, object]:
        """Return the manifest as JSON: the same for the same job, in however many sessions it was done."""
        record: dict[str, object] = asdict(self)
        files = [{"name": file.name, "bytes": file.bytes, "sha256": file.sha256} for file in self.files]
        del record["settings"]
        return {**asdict(self.settings), **record, "files": files}


def read_manifest(folder: Path) -> Manifest | None:
    """Return the manifest of a prepared folder, None if there is none; raises UserError for a damaged one."""
    path = folder / MANIFEST_FILE
    if not path.is_file():
        return None
    record, place = read_json_object(path), str(path)

    def optional(key: str) -> str | None:
        return None if record.get(key) is None else text_field(record, key, place=place)

    return Manifest(
        settings=JobSettings.of(record, place=place),
        dataset=optional("dataset"),
        split=text_field(record, "split", place=place),
        revision=optional("revision"),
        licence=text_field(record, "licence", place=place),
        unchecked={key: str(value) for key, value in _object(record, "unchecked", place=place).items()},
        files=tuple(file_hashes(record.get("files"), place=place)),
        read=count_field(record, "read", place=place),
        kept=count_field(record, "kept", place=place),
        filtered={
            key: count_field({key: value}, key, place=place)
            for key, value in _object(record, "filtered", place=place).items()
        },
        left_out=count_field(record, "left_out", place=place),
        images=count_field(record, "images", place=place),
        rows_sha256=text_field(record, "rows_sha256", place=place),
    )


def _object(record: dict[str, object], key: str, *, place: str) -> dict[str, object]:
    value = record.get(key)
    if not isinstance(value, dict):
        raise UserError(f"{place}: {key} must be an object; prepare the folder again")
    return value
