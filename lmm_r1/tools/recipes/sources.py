"""A recipe's source files: row files and media."""

from __future__ import annotations

import fnmatch
import os
import tarfile
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath, PurePosixPath

from lmm_r1 import hub
from lmm_r1.data.files import Record, read_records
from lmm_r1.data.media_access import MAX_BYTES, downloaded_folder, is_below
from lmm_r1.data.messages import resolve
from lmm_r1.errors import UserError
from lmm_r1.tools.recipes import Recipe

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
        """List files of the dataset's folder; tar archives are unpacked into `unpack_into`, None refuses them.

        Raises UserError for an archive that cannot be read.
        """
        self._by_name: dict[str, list[tuple[tuple[str, ...], Member]]] = {}
        self._open: list[zipfile.ZipFile] = []
        self.folders = (folder,) if unpack_into is None else (folder, unpack_into)
        for file in files:
            if not is_archive(file):
                self._add(file.relative_to(folder), file)
            elif file.suffix.lower() == ".zip":
                try:
                    archive = zipfile.ZipFile(file)
                except (zipfile.BadZipFile, OSError) as error:
                    raise UserError(f"{file}: not a readable zip archive ({error}); fetch it again") from error
                self._open.append(archive)
                for name in archive.namelist():
                    if not name.endswith("/"):
                        self._add(PurePosixPath(name), (archive, name))
            elif unpack_into is None:
                raise UserError(f"{file}: tar archives cannot be read in place; unpack it, and give the folder")
            else:
                content = unpack_into / file.relative_to(folder)
                _unpack(file, content)
                for path in sorted(content.rglob("*")):
                    if path.is_file():
                        self._add(path.relative_to(content), path)

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
        asked = _steps(PurePosixPath(os.path.normpath(path.removeprefix("file://"))))
        fitting: dict[int, list[Member]] = {}
        for name, member in self._by_name.get(asked[-1] if asked else "", ()):
            shared = len(os.path.commonprefix([asked[::-1], name[::-1]]))
            if shared == min(len(asked), len(name)):
                fitting.setdefault(shared, []).append(member)
        if not fitting:
            return path
        best = fitting[max(fitting)]
        if len(best) > 1:
            raise UserError(
                f"{location}: the image {path} may be any of {len(best)} files, such as {_shown(best[0])} and "
                f"{_shown(best[1])}; remove those that do not belong to the dataset"
            )
        return _content(best[0], location=location)

    def _add(self, name: PurePath, member: Member) -> None:
        self._by_name.setdefault(name.name, []).append((_steps(name), member))


def _unpack(file: Path, folder: Path) -> None:
    try:
        folder.mkdir(parents=True)
        with tarfile.open(file) as archive:
            archive.extractall(folder, filter="data")
    except (tarfile.TarError, EOFError, OSError) as error:
        raise UserError(f"{file}: cannot be unpacked ({error}); fetch it again, or free space") from error


def _steps(path: PurePath) -> tuple[str, ...]:
    return tuple(step for step in path.parts if step not in ("/", ".", ".."))


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


ROW_SUFFIXES = (".jsonl", ".json", ".parquet", ".csv")
_IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff")


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


def hub_files(recipe: Recipe) -> SourceFiles:
    """Fetch a recipe's files from the hub or its cache; an interrupted download resumes.

    Raises UserError if they are not available, or the dataset has no such files.
    """
    source = recipe.source
    assert source.dataset is not None, "the caller handles recipes without a dataset"
    folder = hub.dataset_folder(
        source.dataset, patterns=[*source.row_patterns, *source.media], revision=source.revision
    )
    found = _found(recipe, folder)
    if not found.rows:
        raise UserError(
            f"{source.dataset}: the dataset on the hub has no files {' or '.join(source.row_patterns)}; its layout has "
            "changed since the recipe was written"
        )
    return replace(found, revision=folder.name)


def local_files(recipe: Recipe, path: Path) -> SourceFiles:
    """Return the files of a local copy: a row file, or a folder with the published layout.

    A folder without the published files is read as by `read_records`.

    Raises:
        UserError: `path` does not exist, or is no row file.
    """
    if path.is_file():
        if is_archive(path):
            raise UserError(
                f"{path}: an archive alone has no rows; give the row file next to it, or the folder that holds both"
            )
        if path.suffix.lower() not in ROW_SUFFIXES:
            raise UserError(f"{path}: unknown kind of row file; known kinds are {', '.join(ROW_SUFFIXES)}")
        return replace(_found(recipe, path.parent), rows=(path,))
    if not path.is_dir():
        raise UserError(f"{path}: no such file or folder; check the path")
    found = _found(recipe, path)
    if found.rows:
        return found
    alone = [name for name in _names(path) if name.lower().endswith(ROW_SUFFIXES)]
    return replace(found, rows=(path / alone[0] if len(alone) == 1 else path,))


def _found(recipe: Recipe, folder: Path) -> SourceFiles:
    """Return the files of a folder that the recipe names, and loose images if it has media."""
    names, media = _names(folder), recipe.source.media
    loose = [name for name in names if media and name.lower().endswith(_IMAGE_SUFFIXES)]
    return SourceFiles(
        folder=folder,
        rows=tuple(folder / name for name in _matching(names, recipe.source.row_patterns)),
        media=tuple(folder / name for name in dict.fromkeys([*_matching(names, media), *loose])),
        revision=None,
    )


def _names(folder: Path) -> list[str]:
    found = []
    for place, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        inside = Path(place).relative_to(folder)
        found += [(inside / name).as_posix() for name in files if not name.startswith(".")]
    return sorted(found)


def _matching(names: Sequence[str], patterns: Sequence[str]) -> list[str]:
    """Return the names that fit, else those of a copy in a deeper folder, or with all files in one folder."""
    anywhere = [f"*/{pattern}" for pattern in patterns]
    for known in (patterns, anywhere, [pattern.rpartition("/")[2] for pattern in patterns]):
        if fitting := [name for pattern in known for name in names if fnmatch.fnmatchcase(name, pattern)]:
            return list(dict.fromkeys(fitting))
    return []
