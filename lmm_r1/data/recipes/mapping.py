"""From one record of a published dataset to one row."""

from __future__ import annotations

import json
import string
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lmm_r1.data.files import Record
from lmm_r1.data.formats import PREFERENCE_ROWS
from lmm_r1.data.formats.row_format import listed
from lmm_r1.data.images import check_image_exists, load_image
from lmm_r1.data.media_access import media_roots
from lmm_r1.data.messages import PreferenceRow, Row, images_of, kind_of
from lmm_r1.data.preferences import read_pair
from lmm_r1.data.recipes.recipe import CHOICES_FIELD, LETTERS, Recipe, RecordView, template_fields
from lmm_r1.data.recipes.sources import MediaFiles
from lmm_r1.data.row_parser import parse_row

_MEDIA_KEYS = ("image", "image_url", "url", "path")


def map_record(record: Record, *, recipe: Recipe, finder: MediaFiles | None = None) -> Row:
    """Return the row that a recipe makes of one record; raises UserError, with its location, if it cannot.

    Args:
        finder: where to look for images that are named by path; None looks next to the row file only.
    """
    columns, location, base_dir = record
    mapper = _Mapper(RecordView(columns, recipe=recipe, location=location), base_dir=base_dir, finder=finder)
    row = parse_row(mapper.fields(), location=location, base_dir=base_dir, roots=_roots(base_dir, finder))
    for image in images_of(row.messages):
        check_image_exists(image, location=location)
    return row


def map_preference(record: Record, *, recipe: Recipe, finder: MediaFiles | None = None) -> PreferenceRow:
    """Return the preference that a recipe makes of one record; arguments and errors are those of `map_record`."""
    assert recipe.format is not None, "a recipe of preferences has their format"
    columns, location, base_dir = record
    mapper = _Mapper(RecordView(columns, recipe=recipe, location=location), base_dir=base_dir, finder=finder)
    row_format = PREFERENCE_ROWS.named(recipe.format, file=location)
    located = (mapper.located_columns(columns), location, base_dir)
    row = read_pair(located, row_format, roots=_roots(base_dir, finder))
    return replace(row, datasource=recipe.name)


def _roots(base_dir: Path, finder: MediaFiles | None) -> tuple[Path, ...] | None:
    """Return the folders below which rows may name files, with that of unpacked archives; None if they may name all."""
    roots = media_roots(base_dir)
    return roots if roots is None or finder is None else (*roots, *finder.folders)


def check_embedded_images(row: Row) -> None:
    """Raise UserError for an image in the row itself that cannot be decoded; files are not checked."""
    for image in images_of(row.messages):
        if kind_of(image.source) not in ("path", "url"):
            load_image(image, location=row.location)


class _Mapper:
    def __init__(self, view: RecordView, *, base_dir: Path, finder: MediaFiles | None) -> None:
        self.view = view
        self.recipe = view.recipe
        self.base_dir = base_dir
        self.finder = finder

    def fields(self) -> dict[str, object]:
        """Return the row as `parse_row` reads it."""
        choices = self.view.choices()
        messages = self._messages(choices)
        if self.recipe.response is not None:
            messages = [*messages, {"role": "assistant", "content": self._filled(self.recipe.response, choices)}]
        group = f"/{self.view.first((self.recipe.group,))}" if self.recipe.group else ""
        return {"messages": messages, "answer": self.view.label(choices), "datasource": f"{self.recipe.name}{group}"}

    def located_columns(self, columns: Mapping[str, Any]) -> dict[str, object]:
        """Return the record with the paths in its image columns replaced by those of existing files."""
        found = {name: columns[name] for name in self.recipe.images if columns.get(name) is not None}
        located = {name: [self._located(image) for image in listed(value)] for name, value in found.items()}
        return {**columns, **located}

    def _messages(self, choices: Sequence[str]) -> list[Any]:
        recipe = self.recipe
        if recipe.messages is not None:
            return self._ready_made(self.view.first((recipe.messages,)))
        assert recipe.prompt is not None, "a recipe has a prompt or ready-made messages"
        bound = {"max_pixels": recipe.max_pixels} if recipe.max_pixels else {}
        if recipe.images_from == "all":
            found = [image for name in recipe.images for image in listed(self.view.value(name))]
        else:
            found = listed(self.view.first(recipe.images)) if recipe.images else []
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
            raise self.view.fail(f"{len(images)} images, but {len(pieces) - 1} places {tag} in the prompt")
        content: list[dict[str, object]] = []
        for place, piece in enumerate(pieces):
            if piece.strip():
                content.append({"type": "text", "text": piece.strip()})
            content += images[place : place + 1]
        return content

    def _filled(self, template: str, choices: Sequence[str]) -> str:
        lettered = "\n".join(f"({letter}) {choice}" for letter, choice in zip(LETTERS, choices, strict=False))
        values = {}
        for field in template_fields(template):
            # In a recipe without choices, a column of this name is an ordinary column.
            if field == CHOICES_FIELD and self.recipe.choices is not None:
                values[field] = lettered
                continue
            text = str(self.view.first((field,)))
            for piece in self.recipe.remove:
                text = text.replace(piece, "")
            values[field] = text.strip()
        return string.Formatter().vformat(template, (), values).strip()

    def _located(self, image: Any) -> Any:
        # Hugging Face's image feature holds the bytes, or only a path.
        if isinstance(image, Mapping) and image.get("bytes") is None and isinstance(image.get("path"), str):
            image = image["path"]
        if not isinstance(image, str) or kind_of(image) != "path":
            return image
        path = image.removeprefix(self.recipe.image_prefix)
        if self.finder is None:
            return path
        return self.finder.find(path, base_dir=self.base_dir, location=self.view.location)

    def _ready_made(self, value: Any) -> list[Any]:
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except json.JSONDecodeError as error:
                raise self.view.fail(f"the messages are not valid JSON: {error}") from error
        if not isinstance(value, Sequence):
            raise self.view.fail(f"the messages must be a list, not {type(value).__name__}")
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
