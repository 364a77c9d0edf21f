"""What a prepared folder says of itself: where its rows came from, and what became of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from lmm_r1.data.bad_rows import SkippedRow
from lmm_r1.data.recipes.sources import FileHash, file_hashes
from lmm_r1.errors import UserError
from lmm_r1.files.json_files import count_field, read_json_lines, read_json_object, text_field

MANIFEST_FILE = "manifest.json"
LEFT_OUT_FILE = "left_out.jsonl"
"""The rows that could not be used, one a line, with their reasons."""


@dataclass(frozen=True, kw_only=True)
class JobSettings:
    """What rows depend on, apart from the content of the source files."""

    recipe: str
    recipe_sha256: str
    origin: str
    """The dataset on the hub, or the local copy as it was given."""
    max_rows: int | None

    def difference(self, other: JobSettings) -> str | None:
        """Say what differs, as `recipe (a, now b)`; None where nothing does."""
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
        """Read the settings back; raises UserError where they are none."""
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
    """The commit of the hub's dataset; None for a local copy."""
    licence: str
    unchecked: Mapping[str, str]
    """What of the recipe was not compared with the published files."""
    files: tuple[FileHash, ...]
    read: int
    kept: int
    filtered: Mapping[str, int]
    """How many rows each condition of the recipe took away, by its column."""
    left_out: int
    """Rows that count but could not be used: `LEFT_OUT_FILE` lists them."""
    images: int
    rows_sha256: str

    def record(self) -> dict[str, object]:
        """The manifest as JSON: the same for the same job, in however many sessions it was done."""
        record: dict[str, object] = asdict(self)
        files = [{"name": file.name, "bytes": file.bytes, "sha256": file.sha256} for file in self.files]
        del record["settings"]
        return {**asdict(self.settings), **record, "files": files}


def read_manifest(folder: Path) -> Manifest | None:
    """Return the manifest of a prepared folder, None where there is none; raises UserError for a damaged one."""
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


def read_left_out(path: Path) -> list[SkippedRow]:
    """Return the rows that were left out, none where there is no such file."""
    if not path.exists():
        return []
    return [
        SkippedRow(
            index=count_field(line.record, "index", place=line.place),
            reason=text_field(line.record, "reason", place=line.place),
        )
        for line in read_json_lines(path)
        if line.record is not None
    ]
