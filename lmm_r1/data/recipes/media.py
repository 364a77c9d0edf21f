"""The images that rows name by path: beside the row file, elsewhere in the dataset's folder, or in its archives."""

from __future__ import annotations

import os
import shutil
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from lmm_r1.data.image_sources import resolve
from lmm_r1.errors import UserError

ARCHIVES = (".zip", ".tar", ".tar.gz", ".tgz")
Member = tuple[zipfile.ZipFile, str] | Path


def is_archive(path: Path) -> bool:
    """Whether the name is that of an archive that can be read."""
    return path.name.lower().endswith(ARCHIVES)


class MediaFiles:
    """Finds an image by the end of its path: `train/1.png` is `images/train/1.png`, and never `test/1.png`.

    Zip archives are read in place. Of tar archives only the whole can be read, so they are unpacked.
    """

    def __init__(self, files: Sequence[Path], *, folder: Path, unpack_into: Path | None) -> None:
        """Look at files of the dataset's folder; tar archives are unpacked into `unpack_into`, None refuses them."""
        self._by_name: dict[str, list[tuple[PurePosixPath, Member]]] = {}
        self._open: list[zipfile.ZipFile] = []
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
        """Return the path of a file that is there, or the encoded image out of an archive.

        Raises UserError where several would do, or where an archive is damaged; a path that nothing fits comes back.
        """
        beside = resolve(path, base_dir=base_dir)
        if os.path.isfile(str(beside)):
            return str(beside)
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
            raise UserError(f"{file}: a tar archive is not read in place; unpack it, and give the folder")
        content = unpacked(file, folder=unpack_into / file.relative_to(folder))
        for path in sorted(content.rglob("*")):
            if path.is_file():
                self._add(PurePosixPath(path.relative_to(content).as_posix()), path)


def unpacked(file: Path, *, folder: Path) -> Path:
    """Return the folder with the content of a tar archive; one that was unpacked whole before is taken as it is."""
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
            f"{file}: cannot be unpacked into {folder.parent} ({error}); fetch it again, or make room"
        ) from error
    partial.rename(folder)
    return folder


def _ends_alike(asked: PurePosixPath, name: PurePosixPath) -> bool:
    """Whether the shorter path is the end of the longer one."""
    return _shared(asked, name) == min(len(_steps(asked)), len(_steps(name)))


def _shared(asked: PurePosixPath, name: PurePosixPath) -> int:
    """How many steps from the file's name upwards two paths have in common."""
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
    try:
        return archive.read(name)
    except (zipfile.BadZipFile, OSError, RuntimeError, NotImplementedError) as error:
        raise UserError(f"{location}: cannot read {_shown(member)} ({error}); fetch the archive again") from error


def _shown(member: Member) -> str:
    return str(member) if isinstance(member, Path) else f"{member[0].filename}:{member[1]}"
