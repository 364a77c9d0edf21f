"""The rows of files and suites on which checkpoints are measured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from lmm_r1.config.generation import reward_part
from lmm_r1.data.files import read_row_file
from lmm_r1.data.messages import Row, check_asks
from lmm_r1.data.reading import AS_THEY_ARE, RowReading, SkippedRow
from lmm_r1.data.recipes import get_recipe, recipe_names
from lmm_r1.data.recipes.mapping import check_embedded_images, map_record
from lmm_r1.data.recipes.recipe import Recipe, RecordView, SuiteSampling
from lmm_r1.data.recipes.sources import MediaFiles, SourceFiles, hub_files, local_files, read_manifest
from lmm_r1.errors import UserError
from lmm_r1.evaluation.scoreboard.board import MeasuredFile
from lmm_r1.evaluation.scores import powers_of_two


@cache
def suite_names() -> tuple[str, ...]:
    """Return the names of the built-in suites."""
    return tuple(name for name in recipe_names() if get_recipe(name).is_suite)


def get_suite(name: str) -> Recipe:
    """Return a built-in suite by its name, or the one in a YAML file; raises UserError for an unknown name."""
    if name in recipe_names() and name not in suite_names():
        raise UserError(
            f"--suite {name}: this recipe is for training, because it has no field sampling; measure on rows that "
            "`lmm-r1 prepare_data` made of it, with --files"
        )
    suite = get_recipe(name, what="--suite", names=suite_names())
    if not suite.is_suite:
        raise UserError(f"--suite {name}: the recipe has no field sampling; add it")
    return suite


def load_suite(
    recipe: Recipe, *, path: str | None = None, max_rows: int | None = None
) -> tuple[dict[int, Row], list[SkippedRow]]:
    """Return the first `max_rows` rows of a suite by their index in its dataset, and those that cannot be used.

    Args:
        path: a local copy, a folder made by `prepare_data`, or what `read_records` takes; None takes the hub's dataset.

    Raises:
        UserError: the dataset is not available or not readable, or none of its rows can be used.
    """
    if path is not None and read_manifest(Path(path)) is not None:
        _check_prepared(recipe, folder=Path(path))
        prepared = read_row_file(path, max_rows=max_rows, bad_rows="skip")
        return prepared.rows, prepared.skipped
    source = _source(recipe, path=path)
    rows: dict[int, Row] = {}
    skipped: list[SkippedRow] = []
    with MediaFiles(source.media, folder=source.folder, unpack_into=None) as finder:
        for index, record in enumerate(source.records(split=recipe.source.split)):
            if max_rows is not None and len(rows) + len(skipped) == max_rows:
                break
            try:
                columns, location, _ = record
                if RecordView(columns, recipe=recipe, location=location).failed_filter() is not None:
                    continue
                row = map_record(record, recipe=recipe, finder=finder)
                check_embedded_images(row)
                rows[index] = row
            except UserError as error:
                skipped.append(SkippedRow(index=index, reason=str(error)))
    if not rows:
        first = (
            f"none of its {len(skipped)} rows can be used; the first: {skipped[0].reason}" if skipped else "no rows"
        )
        raise UserError(f"suite {recipe.name}, {path or recipe.source.dataset}: {first}")
    return rows, skipped


def _check_prepared(recipe: Recipe, *, folder: Path) -> None:
    manifest = read_manifest(folder)
    assert manifest is not None, "the caller checks this"
    if manifest.settings.recipe_sha256 != recipe.digest:
        same = manifest.settings.recipe == recipe.name
        found = "an older version of it" if same else f"the recipe {manifest.settings.recipe}"
        raise UserError(
            f"suite {recipe.name}: {folder} was prepared with {found}; run `lmm-r1 prepare_data {recipe.name} --output "
            "FOLDER` and give that folder"
        )


def _source(recipe: Recipe, *, path: str | None) -> SourceFiles:
    if path is not None:
        if Path(path).exists():
            return local_files(recipe, Path(path))
        # The name of another dataset on the hub, or a missing path, which `read_records` reports.
        return SourceFiles(folder=Path(), rows=(Path(path),), media=(), revision=None)
    local = f"give a local copy with --suite_data {recipe.name}=PATH"
    if recipe.source.dataset is None:
        raise UserError(f"suite {recipe.name}: the hub has no dataset for it; {local}: {recipe.source.obtain}")
    try:
        return hub_files(recipe)
    except UserError as error:
        raise UserError(
            f"suite {recipe.name}: {recipe.source.dataset}: no such file or folder, and no dataset of this name is "
            f"available: {error}; or {local}"
        ) from error


DEFAULT_VERIFIER = "math"


@dataclass(frozen=True, kw_only=True)
class Choices:
    """The user's settings that override the defaults of a file or a suite; None and () keep them."""

    verifiers: tuple[str, ...] = ()
    file_verifiers: tuple[str, ...] = (DEFAULT_VERIFIER,)
    """The verifiers of files, if none are chosen."""
    ks: tuple[int, ...] = ()
    temperature: float | None = None
    n_samples: int | None = None
    max_new_tokens: int | None = None
    max_rows: int | None = None


@dataclass(frozen=True, kw_only=True)
class RowSet:
    """One file or suite with its rows and settings."""

    file: MeasuredFile
    rows: dict[int, Row]
    """By their index in the file."""
    sampling: SuiteSampling
    notes: tuple[str, ...] = ()
    """What the user should know about these rows, in sentences."""
    summary: str | None = None
    """For a file: its rows and its format, in a sentence."""


def file_rows(name: str, path: str, *, choices: Choices, reading: RowReading = AS_THEY_ARE) -> RowSet:
    """Return the rows of a file; raises UserError if it cannot be read or none of its rows can be used."""
    verifiers = choices.verifiers or choices.file_verifiers
    # A part of an environment's reward needs no answer.
    judged = any(reward_part(verifier) is None for verifier in verifiers)
    read = read_row_file(path, max_rows=choices.max_rows, reading=reading, answer_required=judged, bad_rows="skip")
    rows, unusable = _usable(read.rows, path=path)
    skipped = sorted([*read.skipped, *unusable], key=lambda row: row.index)
    sampling = _chosen(SuiteSampling(), choices)
    file = MeasuredFile(
        name=name,
        source=path,
        verifiers=verifiers,
        ks=_ks(choices.ks, n_samples=sampling.n_samples, name=name),
        sampling=sampling.model_dump(),
        skipped=tuple(skipped),
        rows=rows,
    )
    return RowSet(
        file=file,
        rows=rows,
        sampling=sampling,
        notes=tuple(_alike(sampling, name=name)),
        summary=read.summary_as_prompts,
    )


def suite_rows(recipe: Recipe, *, path: str | None, choices: Choices) -> RowSet:
    """Return the rows of a suite, from a local copy or from the hub; raises UserError as `load_suite` does."""
    rows, skipped = load_suite(recipe, path=path, max_rows=choices.max_rows)
    assert recipe.sampling is not None, "a suite has sampling settings"
    sampling = _chosen(recipe.sampling, choices)
    file = MeasuredFile(
        name=recipe.name,
        source=path or str(recipe.source.dataset),
        verifiers=choices.verifiers or recipe.verifiers,
        ks=_ks(choices.ks, n_samples=sampling.n_samples, name=recipe.name),
        sampling=sampling.model_dump(),
        skipped=tuple(skipped),
        rows=rows,
    )
    found = len(rows) + len(skipped)
    notes = list(_alike(sampling, name=recipe.name))
    if choices.max_rows is None and recipe.rows not in (None, found):
        notes.append(f"suite {recipe.name}: {found:,} rows were found, but the benchmark has {recipe.rows:,}")
    return RowSet(file=file, rows=rows, sampling=sampling, notes=tuple(notes))


def _usable(rows: dict[int, Row], *, path: str) -> tuple[dict[int, Row], list[SkippedRow]]:
    """Return the rows that a model can answer and whose embedded images can be decoded, and the others."""
    good: dict[int, Row] = {}
    skipped: list[SkippedRow] = []
    for index, row in rows.items():
        try:
            check_asks(row)
            check_embedded_images(row)
            good[index] = row
        except UserError as error:
            skipped.append(SkippedRow(index=index, reason=str(error)))
    if not good:
        raise UserError(f"{path}: none of its rows can be used; the first: {skipped[0].reason}")
    return good, skipped


def _alike(sampling: SuiteSampling, *, name: str) -> Iterator[str]:
    if sampling.n_samples > 1 and sampling.temperature == 0:
        yield f"{name}: at temperature 0 the {sampling.n_samples} samples of a row are identical; raise --temperature"


def _chosen(sampling: SuiteSampling, choices: Choices) -> SuiteSampling:
    changes = {name: getattr(choices, name) for name in SuiteSampling.model_fields}
    return sampling.model_copy(update={name: value for name, value in changes.items() if value is not None})


def _ks(chosen: tuple[int, ...], *, n_samples: int, name: str) -> tuple[int, ...]:
    too_many = [k for k in chosen if not 1 <= k <= n_samples]
    if too_many:
        raise UserError(
            f"--k {too_many[0]}: {name} has {n_samples} samples per row, so k must be from 1 to {n_samples}; "
            "raise --n_samples"
        )
    return tuple(sorted(set(chosen))) or tuple(powers_of_two(n_samples))
