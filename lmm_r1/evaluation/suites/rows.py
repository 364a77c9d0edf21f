"""From the columns of a suite's dataset to rows."""

from __future__ import annotations

import math
import string
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lmm_r1.data.files import Record, SkippedRow, read_records
from lmm_r1.data.image_sources import kind_of
from lmm_r1.data.images import check_image_exists, load_image
from lmm_r1.data.messages import Row, images_of
from lmm_r1.data.row_parser import parse_row
from lmm_r1.errors import UserError
from lmm_r1.evaluation.suites.recipe import CHOICES_FIELD, Recipe

LETTERS = "ABCDEFGHIJ"
"""As many as the choice verifier knows."""


def load_suite(
    recipe: Recipe, *, path: str | None = None, max_rows: int | None = None
) -> tuple[dict[int, Row], list[SkippedRow]]:
    """Return the first `max_rows` rows of a suite by their place in its dataset, and those that cannot be used.

    Args:
        path: a local copy, as `read_records` takes it; None takes the dataset from the hub.

    Raises:
        UserError: the dataset cannot be had or read, or none of its rows can be used.
    """
    rows: dict[int, Row] = {}
    skipped: list[SkippedRow] = []
    for index, record in enumerate(_records(recipe, path=path)):
        if max_rows is not None and len(rows) + len(skipped) == max_rows:
            break
        if not _counts(record, recipe=recipe):
            continue
        try:
            rows[index] = suite_row(record, recipe=recipe)
        except UserError as error:
            skipped.append(SkippedRow(index=index, reason=str(error)))
    if not rows:
        first = (
            f"none of its {len(skipped)} rows can be used; the first: {skipped[0].reason}" if skipped else "no rows"
        )
        raise UserError(f"suite {recipe.name}, {path or recipe.source.dataset}: {first}")
    return rows, skipped


def _records(recipe: Recipe, *, path: str | None) -> Iterator[Record]:
    if path is not None:
        yield from read_records(path, split=recipe.source.split)
        return
    local = f"give a local copy with --suite_data {recipe.name}=PATH"
    if recipe.source.dataset is None:
        raise UserError(f"suite {recipe.name}: no dataset on the hub holds it; {local}: {recipe.source.obtain}")
    try:
        yield from read_records(recipe.source.dataset, split=recipe.source.split)
    except UserError as error:
        raise UserError(f"suite {recipe.name}: {error}; or {local}") from error


def suite_row(record: Record, *, recipe: Recipe) -> Row:
    """Return the row that a recipe makes of one record; raises UserError, with its location, where it cannot."""
    columns, location, base_dir = record
    choices = _choices(columns, recipe=recipe, location=location)
    images = [
        {"type": "image", "image": image} | ({"max_pixels": recipe.max_pixels} if recipe.max_pixels else {})
        for image in _images(columns, recipe=recipe, location=location)
    ]
    text = {"type": "text", "text": _prompt(columns, choices, recipe=recipe, location=location)}
    row = parse_row(
        {
            "messages": [{"role": "user", "content": [*images, text]}],
            "answer": _label(columns, choices, recipe=recipe, location=location),
            "datasource": recipe.name,
        },
        location=location,
        base_dir=base_dir,
    )
    for image in images_of(row.messages):
        check_image_exists(image, location=location)
    check_embedded_images(row)
    return row


def check_embedded_images(row: Row) -> None:
    """Raise UserError for an image that the row itself holds and that cannot be decoded; files are not looked at."""
    for image in images_of(row.messages):
        if kind_of(image.source) not in ("path", "url"):
            load_image(image, location=row.location)


def _counts(record: Record, *, recipe: Recipe) -> bool:
    columns, location, _ = record
    for name, value in recipe.where.items():
        if name not in columns:
            raise _missing((name,), columns, location=location)
        if columns[name] != value:
            return False
    return True


def _images(columns: Mapping[str, Any], *, recipe: Recipe, location: str) -> list[Any]:
    if not recipe.images:
        return []
    value = _first(recipe.images, columns, location=location)
    images = [value] if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Sequence) else list(value)
    return [image.removeprefix(recipe.image_prefix) if isinstance(image, str) else image for image in images]


def _choices(columns: Mapping[str, Any], *, recipe: Recipe, location: str) -> list[str]:
    if recipe.choices is None:
        return []
    value = _first((recipe.choices,), columns, location=location)
    choices = [str(choice).strip() for choice in value] if isinstance(value, Sequence) else []
    if not 2 <= len(choices) <= len(LETTERS):
        raise UserError(f"{location}: {recipe.choices} must be a list of 2 to {len(LETTERS)} choices, found {value!r}")
    return choices


def _prompt(columns: Mapping[str, Any], choices: Sequence[str], *, recipe: Recipe, location: str) -> str:
    lettered = "\n".join(f"({letter}) {choice}" for letter, choice in zip(LETTERS, choices, strict=False))
    values = {}
    for field in recipe.prompt_fields:
        if field == CHOICES_FIELD:
            values[field] = lettered
            continue
        text = str(_first((field,), columns, location=location))
        for piece in recipe.remove:
            text = text.replace(piece, "")
        values[field] = text.strip()
    return string.Formatter().vformat(recipe.prompt, (), values)


def _label(columns: Mapping[str, Any], choices: Sequence[str], *, recipe: Recipe, location: str) -> str:
    answer = str(_first(recipe.answer, columns, location=location)).strip()
    if not choices:
        return answer
    named = {
        "text": {choice: letter for letter, choice in reversed(list(zip(LETTERS, choices, strict=False)))},
        "letter": {letter: letter for letter in LETTERS[: len(choices)]},
        "index": {str(place): letter for place, letter in enumerate(LETTERS[: len(choices)])},
    }[recipe.answer_names]
    if answer not in named:
        raise UserError(
            f"{location}: the answer {answer[:80]!r} is not the {recipe.answer_names} of one of the {len(choices)} choices"
        )
    return named[answer]


def _first(names: Sequence[str], columns: Mapping[str, Any], *, location: str) -> Any:
    """The value of the first of these columns that a row has."""
    for name in names:
        value = columns.get(name)
        if not (value is None or value == "" or (isinstance(value, float) and math.isnan(value))):
            return value
    raise _missing(names, columns, location=location)


def _missing(names: Sequence[str], columns: Mapping[str, Any], *, location: str) -> UserError:
    wanted = " or ".join(f'"{name}"' for name in names)
    return UserError(f"{location}: no column {wanted}, or it is empty (found: {', '.join(columns) or 'nothing'})")
