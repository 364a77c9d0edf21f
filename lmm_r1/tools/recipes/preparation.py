"""From the records of a published dataset to rows in a folder. An image of many questions is stored once, under its digest."""

from __future__ import annotations

import hashlib
import io
import json
import random
import re
import shutil
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from lmm_r1.data.files import IMAGES_FOLDER, ROWS_FILE, check_writable, row_folder
from lmm_r1.data.formats.row_format import Record, is_empty, listed, read_list
from lmm_r1.data.images import check_image_exists, encoded_image, load_image
from lmm_r1.data.media_access import media_roots
from lmm_r1.data.messages import ImagePart, Row, SkippedRow, images_of, kind_of, open_image, with_images
from lmm_r1.data.reading import read_skipped
from lmm_r1.data.row_parser import parse_row, stored_messages
from lmm_r1.errors import UserError
from lmm_r1.files.atomic import write_atomically, write_bytes_atomically
from lmm_r1.files.json_files import append_json_lines
from lmm_r1.tools.recipes import (
    CHOICES_FIELD,
    Condition,
    MediaFiles,
    Recipe,
    SourceFiles,
    hub_files,
    local_files,
    template_fields,
)
from remote_rm.answers.extraction import last_boxed

_MEDIA_KEYS = ("image", "image_url", "url", "path")
_LETTERS = "ABCDEFGHIJ"
"""As many as the choice verifier accepts."""
_ANSWER_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def check_embedded_images(row: Row) -> None:
    """Raise UserError for an image in the row itself that cannot be decoded; files are not checked."""
    for image in images_of(row.messages):
        if kind_of(image.source) not in ("path", "url"):
            load_image(image, location=row.location)


class RecordView:
    """One record as a recipe reads it; every error begins with the record's location."""

    def __init__(self, record: Record, *, recipe: Recipe, finder: MediaFiles | None = None) -> None:
        """Args: finder: where to look for images that are named by path; None looks next to the row file only."""
        self.columns, self.location, self.base_dir = record
        self.recipe, self.finder = recipe, finder

    def row(self) -> Row:
        """Return the row that the recipe makes of the record; raises UserError if it cannot."""
        choices = self._choices()
        messages = self._messages(choices)
        if self.recipe.response is not None:
            messages = [*messages, {"role": "assistant", "content": self._filled(self.recipe.response, choices)}]
        group = f"/{self._first((self.recipe.group,))}" if self.recipe.group else ""
        made = {"messages": messages, "answer": self._label(choices), "datasource": f"{self.recipe.name}{group}"}
        roots = media_roots(self.base_dir)
        if roots is not None and self.finder is not None:
            # Unpacked archives belong to the dataset.
            roots = (*roots, *self.finder.folders)
        row = parse_row(made, location=self.location, base_dir=self.base_dir, roots=roots)
        for image in images_of(row.messages):
            check_image_exists(image, location=self.location)
        return row

    def failed_filter(self) -> str | None:
        """Return the column of the first condition that the record does not meet; None if it meets all."""
        return next((name for name, wanted in self.recipe.where.items() if not self._meets(name, wanted)), None)

    def _meets(self, name: str, wanted: Any) -> bool:
        if isinstance(wanted, Condition):
            is_filled = wanted.filled is None or (self._value(name) is not None) == wanted.filled
            return is_filled and (
                wanted.matches is None or re.search(wanted.matches, str(self._first((name,)))) is not None
            )
        known, value = wanted if isinstance(wanted, tuple) else (wanted,), self._first((name,))
        # CSV files hold only text.
        return value in (map(str, known) if isinstance(value, str) else known)

    def _fail(self, sentence: str) -> UserError:
        """Return the error, for the caller to raise."""
        return UserError(f"{self.location}: {sentence}")

    def _value(self, name: str) -> Any:
        """Return the value of a column, None if it is empty."""
        # A column's own name may contain dots; it is a path only if the recipe gives one.
        path = self.recipe.columns.get(name)
        if path is None or path in self.columns:
            value = self.columns.get(path or name)
        else:
            value = self.columns
            for step in path.split("."):
                if isinstance(value, Mapping):
                    value = value.get(step)
                elif step.isdigit() and not isinstance(value, str | bytes) and isinstance(value, Sequence):
                    value = dict(enumerate(value)).get(int(step))
                else:
                    value = None
        return None if is_empty(value) else value

    def _first(self, names: Sequence[str]) -> Any:
        """Return the value of the first of these columns that is filled; raises UserError if none is."""
        for name in names:
            value = self._value(name)
            if value is not None:
                return value
        wanted = " or ".join(f'"{self.recipe.columns.get(name, name)}"' for name in names)
        raise self._fail(f"no column {wanted}, or it is empty (found: {', '.join(self.columns) or 'nothing'})")

    def _choices(self) -> list[str]:
        """Return the choices in the order of their letters; none for an open question."""
        published = self._published_choices()
        if not self.recipe.choices_shuffled:
            return published
        # The order depends only on the choices.
        order = sorted(published)
        random.Random(hashlib.sha256("\0".join(published).encode()).hexdigest()).shuffle(order)
        return order

    def _published_choices(self) -> list[str]:
        asked, optional = self.recipe.choices, self.recipe.choices_optional
        if asked is None:
            return []
        if isinstance(asked, tuple):
            value: Any = [self._value(name) for name in asked]
        else:
            value = _as_list((self._value(asked) or []) if optional else self._first((asked,)))
        if isinstance(value, list):
            held = [choice for choice in value if not is_empty(choice)]
            if held != value[: len(held)]:
                # A gap would shift the letters.
                raise self._fail(f"an empty choice is followed by others: {value!r}")
            value = held
        if not value and optional:
            return []
        if not isinstance(value, list) or not 2 <= len(value) <= len(_LETTERS):
            shown = asked if isinstance(asked, str) else " ".join(asked)
            raise self._fail(f"{shown} must be a list of 2 to {len(_LETTERS)} choices, found {value!r}")
        prefix = re.compile(f"^(?:{self.recipe.choice_prefix or ''})")
        return [prefix.sub("", str(choice).strip()).strip() for choice in value]

    def _label(self, choices: Sequence[str]) -> str:
        """Return the answer, or its choice's letter."""
        answer = self._answer_text()
        if not choices:
            return answer
        # Letters and indices refer to the published order.
        published = self._published_choices()
        letters = [
            _LETTERS[choices.index(choice) if self.recipe.choices_shuffled else place]
            for place, choice in enumerate(published)
        ]
        named = {
            "text": {choice: letter for letter, choice in reversed(list(zip(letters, published, strict=True)))},
            "letter": dict(zip(_LETTERS, letters, strict=False)),
            "index": {str(place): letter for place, letter in enumerate(letters)},
        }[self.recipe.answer_names]
        if answer not in named:
            raise self._fail(
                f"the answer {answer[:80]!r} is not the {self.recipe.answer_names} of any of the {len(choices)} choices"
            )
        return named[answer]

    def _answer_text(self) -> str:
        recipe = self.recipe
        value = self._first(recipe.answer)
        if recipe.answer_list is not None and isinstance(value := _as_list(value), list):
            entries = [str(entry).strip() for entry in value if not is_empty(entry)]
            if not entries:
                raise self._fail("the list of answers is empty")
            if recipe.answer_list == "sorted":
                entries.sort(key=lambda entry: (len(entry), entry))
            frequent = Counter(entries).most_common(1)[0][0]
            value = {"first": entries[0], "most_common": frequent}.get(recipe.answer_list, ", ".join(entries))
        text = str(value).strip()
        if recipe.answer_pattern is not None:
            found = re.findall(recipe.answer_pattern, text, flags=re.DOTALL)
            answer = found[-1] if found else None
        elif recipe.answer_in == "answer_tag":
            blocks = _ANSWER_TAG.findall(text)
            answer = blocks[-1] if blocks else None
        else:
            boxed = None if recipe.answer_in == "text" else last_boxed(text)
            answer = text if boxed is None and recipe.answer_in != "boxed" else boxed
        if answer is None or not answer.strip():
            named = {"answer_tag": "<answer> block", "boxed": r"\boxed{}"}
            wanted = recipe.answer_pattern or named.get(recipe.answer_in, "text")
            raise self._fail(f"no {wanted} in the answer {text[:80]!r}")
        return answer.strip()

    def _messages(self, choices: Sequence[str]) -> list[Any]:
        recipe = self.recipe
        if recipe.messages is not None:
            return self._ready_made(self._first((recipe.messages,)))
        assert recipe.prompt is not None, "a recipe has a prompt or ready-made messages"
        bound = {"max_pixels": recipe.max_pixels} if recipe.max_pixels else {}
        if recipe.images_from == "all":
            found = [image for name in recipe.images for image in listed(self._value(name))]
        else:
            found = listed(self._first(recipe.images)) if recipe.images else []
        images = [{"type": "image", "image": self._located(image), **bound} for image in found]
        content = self._content(self._filled(recipe.prompt, choices), images)
        system = [{"role": "system", "content": recipe.system}] if recipe.system else []
        return [*system, {"role": "user", "content": content}]

    def _content(self, text: str, images: list[dict[str, object]]) -> list[dict[str, object]]:
        tag = self.recipe.image_tag
        if tag is None:
            return [*images, {"type": "text", "text": text}]
        pieces = text.split(tag)
        if len(pieces) - 1 != len(images):
            raise self._fail(f"{len(images)} images, but {len(pieces) - 1} places {tag} in the prompt")
        content: list[dict[str, object]] = []
        for place, piece in enumerate(pieces):
            if piece.strip():
                content.append({"type": "text", "text": piece.strip()})
            content += images[place : place + 1]
        return content

    def _filled(self, template: str, choices: Sequence[str]) -> str:
        values = {}
        for column in template_fields(template):
            # In a recipe without choices, a column of this name is an ordinary column.
            if column == CHOICES_FIELD and self.recipe.choices is not None:
                values[column] = "\n".join(f"({name}) {one}" for name, one in zip(_LETTERS, choices, strict=False))
                continue
            text = str(self._first((column,)))
            for piece in self.recipe.remove:
                text = text.replace(piece, "")
            values[column] = text.strip()
        return string.Formatter().vformat(template, (), values).strip()

    def _located(self, image: Any) -> Any:
        # Hugging Face's image feature holds the bytes, or only a path.
        if isinstance(image, Mapping) and image.get("bytes") is None and isinstance(image.get("path"), str):
            image = image["path"]
        if not isinstance(image, str) or kind_of(image) != "path":
            return image
        path = image.removeprefix(self.recipe.image_prefix)
        return path if self.finder is None else self.finder.find(path, base_dir=self.base_dir, location=self.location)

    def _ready_made(self, value: Any) -> list[Any]:
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except json.JSONDecodeError as error:
                raise self._fail(f"the messages are not valid JSON: {error}") from error
        if not isinstance(value, Sequence):
            raise self._fail(f"the messages must be a list, not {type(value).__name__}")
        messages = []
        for message in value:
            content = message.get("content") if isinstance(message, Mapping) else None
            if isinstance(content, Sequence) and not isinstance(content, str):
                message = {**message, "content": [self._located_part(part) for part in content]}
            messages.append(message)
        return messages

    def _located_part(self, part: Any) -> Any:
        if not isinstance(part, Mapping) or part.get("type") not in ("image", "image_url"):
            return part
        value = next((part[key] for key in _MEDIA_KEYS if part.get(key) is not None), None)
        if isinstance(value, Mapping) and "url" in value:
            value = value["url"]
        rest = {key: entry for key, entry in part.items() if key not in _MEDIA_KEYS and entry is not None}
        return {**rest, "type": "image", "image": self._located(value)}


def _as_list(value: Any) -> Any:
    """Return a list, given as such or as the text that Parquet files may hold: `"['a', 'b']"` → `["a", "b"]`."""
    if isinstance(value, str):
        return (read_list(value.strip()) if value.lstrip().startswith("[") else None) or value
    return list(value) if isinstance(value, Sequence) and not isinstance(value, bytes) else value


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
            return Prepared(manifest=made, left_out=read_skipped(self.output / LEFT_OUT_FILE), was_complete=True)
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
