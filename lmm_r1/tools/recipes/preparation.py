"""Writes a recipe's rows into a folder. Images are named after their content: one of many questions is stored once."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from lmm_r1.data.files import IMAGES_FOLDER, ROWS_FILE, check_writable, row_folder
from lmm_r1.data.images import encoded_image, load_image
from lmm_r1.data.messages import ImagePart, Row, SkippedRow, open_image, with_images
from lmm_r1.data.reading import read_skipped
from lmm_r1.data.row_parser import stored_messages
from lmm_r1.errors import UserError
from lmm_r1.files.atomic import write_atomically, write_bytes_atomically
from lmm_r1.files.json_files import append_json_lines
from lmm_r1.tools.recipes import Recipe
from lmm_r1.tools.recipes.mapping import RecordView
from lmm_r1.tools.recipes.sources import MediaFiles, SourceFiles, hub_files, local_files

MANIFEST_FILE = "manifest.json"
LEFT_OUT_FILE = "left_out.jsonl"
"""Lists the rows that could not be used, one per line, with the reasons."""
PARTS = (ROWS_FILE, IMAGES_FOLDER, MANIFEST_FILE, LEFT_OUT_FILE)
UNPACKED_FOLDER = "unpacked"
_HASH_DIGITS = 24


class Manifest(BaseModel):
    """One prepared folder."""

    model_config = ConfigDict(frozen=True)

    recipe: str
    recipe_sha256: str
    origin: str
    """The dataset on the hub, or the local copy as given."""
    max_rows: int | None
    dataset: str | None
    split: str
    revision: str | None
    """The commit of the dataset on the hub; None for a local copy."""
    licence: str
    unchecked: Mapping[str, str]
    """What of the recipe was not compared with the published files."""
    read: int
    kept: int
    filtered: Mapping[str, int]
    """How many rows each condition of the recipe removed, by its column."""
    left_out: int
    """Matching rows that could not be used, listed in `LEFT_OUT_FILE`."""
    images: int
    rows_sha256: str


def read_manifest(folder: Path) -> Manifest | None:
    """Return the manifest of a prepared folder, None if there is none; raises UserError for a damaged one."""
    path = folder / MANIFEST_FILE
    if not path.is_file():
        return None
    try:
        return Manifest.model_validate_json(path.read_bytes())
    except ValidationError as error:
        fault = error.errors()[0]
        raise UserError(
            f"{path}: {'.'.join(map(str, fault['loc']))}: {fault['msg']}; prepare the folder again"
        ) from error


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """The result of a finished job."""

    manifest: Manifest
    left_out: list[SkippedRow]
    was_complete: bool
    """Whether the folder was complete already, so that nothing was done."""


@dataclass(kw_only=True)
class RecipeCounts:
    """How far a job is."""

    filtered: dict[str, int]
    left_out: list[SkippedRow] = field(default_factory=list)
    read: int = 0
    kept: int = 0


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """One job: a recipe, its source files, and the output."""

    recipe: Recipe
    output: Path
    source: Path | None = None
    """A local copy; None downloads the dataset from the hub."""
    max_rows: int | None = None
    """The number of matching rows to take, from the start; None takes all."""
    show: Callable[[RecipeCounts], None] = lambda _: None
    """Called after each record."""

    def run(self, *, overwrite: bool = False) -> Prepared:
        """Write the rows; does nothing if the folder is complete.

        Args:
            overwrite: replace an existing folder of rows.

        Raises:
            UserError: the dataset is not available, the folder is in use or was made with other settings, no row can be
                used, or nothing can be written.
        """
        recipe = self.recipe
        settings: dict[str, str | int | None] = {
            "recipe": recipe.name,
            "recipe_sha256": recipe.digest,
            "origin": str(self.source or recipe.source.dataset),
            "max_rows": self.max_rows,
        }
        made = None if overwrite else read_manifest(self.output)
        if made is not None:
            self._check_same(made, settings)
            skipped = read_skipped(self.output / LEFT_OUT_FILE)
            return Prepared(manifest=made, left_out=skipped, was_complete=True)
        check_writable(self.output, overwrite=overwrite, parts=PARTS)
        source = self._files()
        with row_folder(self.output, overwrite=overwrite, parts=PARTS) as folder:
            unpack_into = folder / UNPACKED_FOLDER
            with MediaFiles(source.media, folder=source.folder, unpack_into=unpack_into) as finder:
                counts = self._write(source, folder=folder, finder=finder)
            shutil.rmtree(unpack_into, ignore_errors=True)
            images = folder / IMAGES_FOLDER
            manifest = Manifest(
                **settings,  # type: ignore[arg-type]
                dataset=recipe.source.dataset,
                split=recipe.source.split,
                revision=source.revision,
                licence=recipe.licence,
                unchecked={str(aspect): assumed for aspect, assumed in recipe.unchecked.items()},
                read=counts.read,
                kept=counts.kept,
                filtered=counts.filtered,
                left_out=len(counts.left_out),
                images=len(list(images.iterdir())) if images.is_dir() else 0,
                rows_sha256=hashlib.sha256((folder / ROWS_FILE).read_bytes()).hexdigest(),
            )
            write_atomically(folder / MANIFEST_FILE, text=json.dumps(manifest.model_dump(), indent=2) + "\n")
        return Prepared(manifest=manifest, left_out=counts.left_out, was_complete=False)

    def _check_same(self, made: Manifest, settings: Mapping[str, str | int | None]) -> None:
        for name, now in settings.items():
            was = getattr(made, name)
            # Without a copy, the rows may be those of one that was given before.
            if was == now or (name == "origin" and self.source is None):
                continue
            other = f"version of the recipe {made.recipe}" if name == "recipe_sha256" else f"{name} ({was}, now {now})"
            raise UserError(
                f"--output {self.output} was made with another {other}; name another folder or add --overwrite"
            )

    def _files(self) -> SourceFiles:
        recipe = self.recipe
        if self.source is not None:
            return local_files(recipe, self.source)
        if recipe.source.dataset is None:
            raise UserError(
                f"recipe {recipe.name}: the hub has no dataset for it; give a local copy with --source PATH: "
                f"{recipe.source.obtain}"
            )
        try:
            return hub_files(recipe)
        except UserError as error:
            revision = f" --revision {recipe.source.revision}" if recipe.source.revision else ""
            raise UserError(
                f"recipe {recipe.name}: {error}. On a machine that reaches the hub run `hf download "
                f"{recipe.source.dataset} --repo-type dataset{revision} --local-dir FOLDER` (a dataset that asks for "
                "consent needs `hf auth login` first), and give that folder here with --source FOLDER"
            ) from error

    def _write(self, source: SourceFiles, *, folder: Path, finder: MediaFiles) -> RecipeCounts:
        recipe = self.recipe
        counts = RecipeCounts(filtered=dict.fromkeys(recipe.where, 0))
        names: dict[str, str] = {}
        for index, record in enumerate(source.records(split=recipe.source.split)):
            if self.max_rows is not None and counts.kept + len(counts.left_out) >= self.max_rows:
                break
            counts.read += 1
            view = RecordView(record, recipe=recipe, finder=finder)
            new: dict[str, tuple[str, bytes]] = {}
            try:
                failed = view.failed_filter()
                row = None if failed else view.row()
                stored = None if row is None else _stored(row, names=names, new=new)
            except UserError as error:
                skipped = SkippedRow(index=index, reason=str(error))
                append_json_lines(folder / LEFT_OUT_FILE, [asdict(skipped)], readable=True)
                counts.left_out.append(skipped)
                continue
            # Outside of the handler: a full disk ends the job, and is not the row's fault.
            if failed is not None:
                counts.filtered[failed] += 1
            if stored is not None:
                for digest, (name, data) in new.items():
                    write_bytes_atomically(folder / name, data=data)
                    names[digest] = name
                append_json_lines(folder / ROWS_FILE, [stored], readable=True)
                counts.kept += 1
            self.show(counts)
        if counts.kept == 0:
            first = f"the first: {counts.left_out[0].reason}" if counts.left_out else f"filtered: {counts.filtered}"
            raise UserError(f"recipe {recipe.name}: none of {counts.read:,} rows can be used; {first}")
        return counts


def _stored(row: Row, *, names: Mapping[str, str], new: dict[str, tuple[str, bytes]]) -> dict[str, object]:
    """Return the record of a row with images by the names of their files; adds those not among `names` to `new`."""

    def stored(part: ImagePart) -> ImagePart:
        data = encoded_image(part, location=row.location)
        digest = hashlib.sha256(data).hexdigest()[:_HASH_DIGITS]
        if digest in names:
            return replace(part, source=names[digest])
        load_image(replace(part, source=data), location=row.location)
        with open_image(io.BytesIO(data)) as image:
            name = f"{IMAGES_FOLDER}/{digest}.{str(image.format).lower()}"
        new[digest] = name, data
        return replace(part, source=name)

    messages = stored_messages(with_images(row.messages, stored))
    return {"messages": messages, "answer": row.answer, "datasource": row.datasource}
