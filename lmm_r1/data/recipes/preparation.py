"""Writes a recipe's rows into a folder; a killed job resumes, with the same bytes at the end.

The folder is written next to its final place, under a name that every session of the job finds again, and is moved when
complete. Images are named after their content, so that an image of many questions is stored once.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from lmm_r1.data.files import IMAGES_FOLDER, ROWS_FILE, Record
from lmm_r1.data.images import fetched, load_image
from lmm_r1.data.messages import (
    ImagePart,
    Message,
    Part,
    PreferenceRow,
    Row,
    SkippedRow,
    StoredBytes,
    decode_base64,
    kind_of,
    open_image,
)
from lmm_r1.data.reading import read_skipped
from lmm_r1.data.recipes.mapping import map_preference, map_record
from lmm_r1.data.recipes.recipe import Recipe, RecordView
from lmm_r1.data.recipes.sources import (
    LEFT_OUT_FILE,
    MANIFEST_FILE,
    FileHash,
    JobSettings,
    Manifest,
    MediaFiles,
    SourceFiles,
    file_hashes,
    hash_files,
    hub_files,
    local_files,
    read_manifest,
    sha256_of,
)
from lmm_r1.data.row_parser import stored_messages
from lmm_r1.errors import UserError
from lmm_r1.files.atomic import check_creatable, write_bytes_atomically
from lmm_r1.files.json_files import append_json_lines, cut_torn_line, read_json_object, write_json_object

STATE_FILE = "state.json"
LOCK_FILE = "lock"
UNPACKED_FOLDER = "unpacked"
_HASH_DIGITS = 24
PARTS = {ROWS_FILE, IMAGES_FOLDER, MANIFEST_FILE, LEFT_OUT_FILE}
OWN = {STATE_FILE, LOCK_FILE}


@dataclass(frozen=True, kw_only=True)
class PreparationProgress:
    """How far the job is."""

    read: int
    kept: int
    left_out: int
    total: int | None
    """Records of the source, if known."""


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """The result of a finished job."""

    manifest: Manifest
    left_out: list[SkippedRow]
    was_complete: bool
    """Whether the folder was complete already, so that nothing was done."""


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """One job: a recipe, its source files, and the output."""

    recipe: Recipe
    output: Path
    source: Path | None = None
    """A local copy; None downloads the dataset from the hub."""
    max_rows: int | None = None
    """The number of matching rows to take, from the start; None takes all."""
    say: Callable[[str], None] = lambda _: None
    """Called with a sentence about each step."""
    show: Callable[[PreparationProgress], None] = lambda _: None
    """Called after each record."""

    @property
    def settings(self) -> JobSettings:
        """What the rows depend on, except for the content of the files."""
        origin = str(self.source or self.recipe.source.dataset)
        return JobSettings(
            recipe=self.recipe.name, recipe_sha256=self.recipe.digest, origin=origin, max_rows=self.max_rows
        )

    @property
    def partial(self) -> Path:
        """The folder in which the rows are written until they are complete."""
        output = Path(os.path.abspath(self.output))
        return output.with_name(f".{output.name}.partial")

    def run(self, *, overwrite: bool = False) -> Prepared:
        """Write the rows, or resume writing them; does nothing if the folder is complete.

        Args:
            overwrite: replace an existing folder of rows, and start over a job that was begun with other settings.

        Raises:
            UserError: the dataset is not available, the folder is in use or was begun with other settings, no row can be
                used, or nothing can be written.
        """
        self._check_output(overwrite=overwrite)
        complete = None if overwrite else self._complete()
        if complete is not None:
            return complete
        source = self._files()
        with _locked(self.partial, output=self.output):
            # Another session may have finished the job in the meantime.
            complete = None if overwrite else self._complete()
            if complete is not None:
                shutil.rmtree(self.partial)
                return complete
            hashes = self._begin(source, overwrite=overwrite)
            unpack_into = self.partial / UNPACKED_FOLDER
            with MediaFiles(source.media, folder=source.folder, unpack_into=unpack_into) as finder:
                counts = _Writer(self, source=source, finder=finder).write()
            manifest = Manifest(
                settings=self.settings,
                dataset=self.recipe.source.dataset,
                split=self.recipe.source.split,
                revision=source.revision,
                licence=self.recipe.licence,
                unchecked={str(aspect): assumed for aspect, assumed in self.recipe.unchecked.items()},
                files=tuple(hashes),
                read=counts.read,
                kept=counts.kept,
                filtered=counts.filtered,
                left_out=len(counts.left_out),
                images=counts.images,
                rows_sha256=sha256_of(self.partial / ROWS_FILE),
            )
            self._finish(manifest)
        return Prepared(manifest=manifest, left_out=counts.left_out, was_complete=False)

    def _check_output(self, *, overwrite: bool) -> None:
        check_creatable(self.output, flag="--output")
        if not self.output.exists():
            return
        if not self.output.is_dir():
            raise UserError(f"--output {self.output} is a file; name a folder")
        names = {entry.name for entry in self.output.iterdir()}
        if names and not overwrite and MANIFEST_FILE not in names:
            raise UserError(f"--output {self.output} is not empty; name another folder or add --overwrite")
        foreign = sorted(names - PARTS - OWN)
        if foreign:
            raise UserError(
                f"--output {self.output} holds {foreign[0]}, which is not part of a row folder; name another folder"
            )

    def _complete(self) -> Prepared | None:
        """Return the finished folder of the same job; raises UserError if it belongs to another job."""
        found = read_manifest(self.output)
        if found is None:
            return None
        # Without a copy, the rows may be those of one that was given before.
        wanted = self.settings if self.source else replace(self.settings, origin=found.settings.origin)
        difference = found.settings.difference(wanted)
        if difference:
            raise UserError(
                f"--output {self.output} was made with another {difference}; name another folder or add --overwrite"
            )
        # A session that was killed at its very end may have left these.
        _remove(self.output, names=OWN)
        return Prepared(manifest=found, left_out=read_skipped(self.output / LEFT_OUT_FILE), was_complete=True)

    def _files(self) -> SourceFiles:
        recipe = self.recipe
        if self.source is not None:
            return local_files(recipe, self.source)
        if recipe.source.dataset is None:
            raise UserError(
                f"recipe {recipe.name}: the hub has no dataset for it; give a local copy with --source PATH: "
                f"{recipe.source.obtain}"
            )
        self.say(f"asking the Hugging Face hub for {recipe.source.dataset}")
        try:
            return hub_files(recipe)
        except UserError as error:
            revision = f" --revision {recipe.source.revision}" if recipe.source.revision else ""
            raise UserError(
                f"recipe {recipe.name}: {error}. On a machine that reaches the hub run `hf download "
                f"{recipe.source.dataset} --repo-type dataset{revision} --local-dir FOLDER` (a dataset that asks for "
                "consent needs `hf auth login` first), and give that folder here with --source FOLDER"
            ) from error

    def _begin(self, source: SourceFiles, *, overwrite: bool) -> list[FileHash]:
        """Check what an earlier session left, and return the hashes of the files."""
        state_file = self.partial / STATE_FILE
        state = read_json_object(state_file) if state_file.exists() else None
        known = [] if state is None else file_hashes(state.get("files"), place=str(state_file))
        hashes = hash_files(source, known=known, report=self.say)
        if state is None:
            _clear(self.partial)
        else:
            difference = JobSettings.of(state, place=str(state_file)).difference(self.settings)
            if difference is None and _contents(known) != _contents(hashes):
                difference = "content of the source files"
            if difference and not overwrite:
                raise UserError(
                    f"--output {self.output} was begun with another {difference}; name another folder, or add "
                    "--overwrite to start over"
                )
            if difference:
                _clear(self.partial)
        write_json_object(state_file, {**asdict(self.settings), "files": [asdict(entry) for entry in hashes]})
        return hashes

    def _finish(self, manifest: Manifest) -> None:
        # Unpacked archives, and files that a killed session was writing.
        _remove(self.partial, names={entry.name for entry in self.partial.iterdir()} - PARTS - OWN)
        _remove(self.partial / IMAGES_FOLDER, names={file.name for file in self.images() if file.name[0] == "."})
        write_json_object(self.partial / MANIFEST_FILE, manifest.record())
        replaced = self.partial.with_name(f".{self.output.name}.replaced")
        shutil.rmtree(replaced, ignore_errors=True)
        if self.output.exists():
            self.output.rename(replaced)
        self.partial.rename(self.output)
        shutil.rmtree(replaced, ignore_errors=True)
        _remove(self.output, names=OWN)

    def images(self) -> list[Path]:
        """Return the images written so far, including unfinished ones."""
        folder = self.partial / IMAGES_FOLDER
        return list(folder.iterdir()) if folder.is_dir() else []


@dataclass(kw_only=True)
class _Counts:
    filtered: dict[str, int]
    left_out: list[SkippedRow] = field(default_factory=list)
    read: int = 0
    kept: int = 0
    images: int = 0


class _Writer:
    """Appends rows to the partial folder; counts what earlier sessions wrote instead of making it again.

    The filters are applied again each time, which is cheap. Whether a matching record was kept or left out is known from
    the lines that exist.
    """

    def __init__(self, job: Preparation, *, source: SourceFiles, finder: MediaFiles) -> None:
        self.job = job
        self.source = source
        self.finder = finder
        self.rows_file = job.partial / ROWS_FILE
        self.left_out_file = job.partial / LEFT_OUT_FILE
        self.images = job.partial / IMAGES_FOLDER
        self.names = {file.stem: file.name for file in job.images() if file.name[0] != "."}

    def write(self) -> _Counts:
        recipe = self.job.recipe
        written = _count_lines(self.rows_file)
        cut_torn_line(self.left_out_file)
        known = {row.index: row for row in read_skipped(self.left_out_file)}
        if written or known:
            self.job.say(f"resuming after {written + len(known):,} rows of an earlier session")
        counts = _Counts(filtered=dict.fromkeys(recipe.where, 0))
        total = self.source.row_count()
        for index, record in enumerate(self.source.records(split=recipe.source.split)):
            if self.job.max_rows is not None and counts.kept + len(counts.left_out) >= self.job.max_rows:
                break
            counts.read += 1
            if index in known:
                counts.left_out.append(known[index])
            else:
                self._take(index, record, counts=counts, written=written)
            progress = PreparationProgress(
                read=counts.read, kept=counts.kept, left_out=len(counts.left_out), total=total
            )
            self.job.show(progress)
        if counts.kept == 0:
            _clear(self.job.partial)
            first = f"the first: {counts.left_out[0].reason}" if counts.left_out else f"filtered: {counts.filtered}"
            raise UserError(f"recipe {recipe.name}: none of {counts.read:,} rows can be used; {first}")
        counts.images = len(self.names)
        return counts

    def _take(self, index: int, record: Record, *, counts: _Counts, written: int) -> None:
        columns, location, _ = record
        recipe = self.job.recipe
        try:
            failed = RecordView(columns, recipe=recipe, location=location).failed_filter()
            if failed is not None:
                counts.filtered[failed] += 1
                return
            if counts.kept < written:
                counts.kept += 1
                return
            images: dict[str, bytes] = {}
            if recipe.format is None:
                stored = self._stored(map_record(record, recipe=recipe, finder=self.finder), images)
            else:
                stored = self._stored_pair(map_preference(record, recipe=recipe, finder=self.finder), images)
        except UserError as error:
            left_out = SkippedRow(index=index, reason=str(error))
            _append(self.left_out_file, asdict(left_out))
            counts.left_out.append(left_out)
            return
        # Outside of the handler: a full disk ends the job, and is not the row's fault.
        for name, data in images.items():
            write_bytes_atomically(self.images / name, data=data)
            self.names[Path(name).stem] = name
        _append(self.rows_file, stored)
        counts.kept += 1

    def _stored(self, row: Row, new: dict[str, bytes]) -> dict[str, object]:
        """Return the row with images by name; adds images that are not stored yet to `new`."""
        messages = self._named(row.messages, new, location=row.location)
        return {"messages": messages, "answer": row.answer, "datasource": row.datasource}

    def _stored_pair(self, row: PreferenceRow, new: dict[str, bytes]) -> dict[str, object]:
        """Return the same for a preference, in the form that `batch_inference` writes."""
        sides = {"prompt": row.messages, "chosen": row.chosen, "rejected": row.rejected}
        stored: dict[str, object] = {
            name: self._named(messages, new, location=row.location) for name, messages in sides.items()
        }
        judged = {"margin": row.margin, "chosen_score": row.chosen_score, "rejected_score": row.rejected_score}
        given = {name: number for name, number in judged.items() if number is not None}
        return {**stored, **given, "datasource": row.datasource}

    def _named(self, messages: Sequence[Message], new: dict[str, bytes], *, location: str) -> list[dict[str, object]]:
        def stored(part: Part) -> Part:
            if not isinstance(part, ImagePart):
                return part
            data = _encoded(part, location=location)
            stem = hashlib.sha256(data).hexdigest()[:_HASH_DIGITS]
            name = self.names.get(stem) or f"{stem}.{_format(part, data, location=location)}"
            if stem not in self.names:
                new[name] = data
            return replace(part, source=f"{IMAGES_FOLDER}/{name}")

        return stored_messages([replace(message, parts=tuple(map(stored, message.parts))) for message in messages])


def _encoded(part: ImagePart, *, location: str) -> bytes:
    source = fetched(part, location=location).source
    if isinstance(source, StoredBytes):
        return source.read()
    if isinstance(source, bytes):
        return source
    assert isinstance(source, str), "records hold images as bytes or text"
    if kind_of(source) == "path":
        return Path(source).read_bytes()
    try:
        return decode_base64(source)
    except ValueError as error:
        raise UserError(f"{location}: an image cannot be read: {error}") from error


def _format(part: ImagePart, data: bytes, *, location: str) -> str:
    load_image(replace(part, source=data), location=location)
    with open_image(io.BytesIO(data)) as image:
        return str(image.format).lower()


def _append(file: Path, line: Mapping[str, object]) -> None:
    try:
        append_json_lines(file, [line], readable=True)
    except OSError as error:
        raise UserError(
            f"{file}: cannot be written ({error.strerror}); free space and repeat the command, which resumes the job"
        ) from error


def _count_lines(file: Path) -> int:
    """Return the number of complete lines; an incomplete last line is cut off."""
    cut_torn_line(file)
    if not file.exists():
        return 0
    with file.open("rb") as lines:
        return sum(1 for _ in lines)


def _contents(hashes: list[FileHash]) -> list[tuple[str, str]]:
    return [(entry.name, entry.sha256) for entry in hashes]


def _clear(folder: Path) -> None:
    _remove(folder, names={entry.name for entry in folder.iterdir()} - {LOCK_FILE})


def _remove(folder: Path, *, names: Set[str]) -> None:
    for name in sorted(names):
        if (folder / name).is_dir():
            shutil.rmtree(folder / name)
        else:
            (folder / name).unlink(missing_ok=True)


@contextlib.contextmanager
def _locked(folder: Path, *, output: Path) -> Iterator[None]:
    """Keep other sessions out of the folder; the lock ends with the process."""
    with contextlib.ExitStack() as held:
        while True:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                lock = held.enter_context((folder / LOCK_FILE).open("ab"))
            except OSError as error:
                raise UserError(
                    f"--output {output}: cannot be written ({error.strerror}); choose another place"
                ) from error
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise UserError(f"--output {output}: another prepare_data is writing it; wait for it") from error
            # A session that finished in the meantime has moved the folder, together with the lock file opened here.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(lock.fileno()), os.stat(folder / LOCK_FILE)):
                    break
        yield
