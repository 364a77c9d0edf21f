"""Benchmark suites: the recipes that say how responses are sampled, and their rows."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from lmm_r1.data.bad_rows import SkippedRow
from lmm_r1.data.files import read_good_rows
from lmm_r1.data.messages import Row
from lmm_r1.data.recipes import get_recipe, recipe_names
from lmm_r1.data.recipes.columns import RecordView
from lmm_r1.data.recipes.manifest import read_manifest
from lmm_r1.data.recipes.mapping import check_embedded_images, map_record
from lmm_r1.data.recipes.media import MediaFiles
from lmm_r1.data.recipes.recipe import Recipe
from lmm_r1.data.recipes.sources import SourceFiles, hub_files, local_files
from lmm_r1.errors import UserError


@cache
def suite_names() -> tuple[str, ...]:
    """Return the names of the ready-made suites."""
    return tuple(name for name in recipe_names() if get_recipe(name).is_suite)


def get_suite(name: str) -> Recipe:
    """Return a ready-made suite by its name, or the one in a YAML file; raises UserError for an unknown name."""
    if name in recipe_names() and name not in suite_names():
        raise UserError(
            f"--suite {name}: this recipe is for training, it says nothing of sampling; measure on rows that "
            "`lmm-r1 prepare_data` made of it, with --files"
        )
    suite = get_recipe(name, what="--suite", names=suite_names())
    if not suite.is_suite:
        raise UserError(f"--suite {name}: the recipe says nothing of sampling; add the field sampling")
    return suite


def load_suite(
    recipe: Recipe, *, path: str | None = None, max_rows: int | None = None
) -> tuple[dict[int, Row], list[SkippedRow]]:
    """Return the first `max_rows` rows of a suite by their place in its dataset, and those that cannot be used.

    Args:
        path: a local copy, a folder that `prepare_data` made, or what `read_records` takes; None takes the hub's dataset.

    Raises:
        UserError: the dataset cannot be had or read, or none of its rows can be used.
    """
    if path is not None and read_manifest(Path(path)) is not None:
        _check_prepared(recipe, folder=Path(path))
        prepared = read_good_rows(path, max_rows=max_rows)
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
    assert manifest is not None, "the caller looked"
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
        # The name of another dataset on the hub, or a path that `read_records` says is not there.
        return SourceFiles(folder=Path(), rows=(Path(path),), media=(), revision=None)
    local = f"give a local copy with --suite_data {recipe.name}=PATH"
    if recipe.source.dataset is None:
        raise UserError(f"suite {recipe.name}: no dataset on the hub holds it; {local}: {recipe.source.obtain}")
    try:
        return hub_files(recipe)
    except UserError as error:
        raise UserError(
            f"suite {recipe.name}: {recipe.source.dataset}: no such file or folder, and no dataset of this name can be "
            f"had: {error}; or {local}"
        ) from error
