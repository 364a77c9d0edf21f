"""`lmm-r1 prepare_data RECIPE --output DIR [--source PATH]`: the rows of a public dataset, by its recipe."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from lmm_r1.cli import ProgressLines, arguments, report_skipped, run_command, user_errors
from lmm_r1.config.declared import Positional, Within, check_ranges
from lmm_r1.errors import UserError

if TYPE_CHECKING:
    from lmm_r1.tools.recipes import Recipe
    from lmm_r1.tools.recipes.preparation import Manifest, RecipeCounts

PROG = "lmm-r1 prepare_data"
DESCRIPTION = (
    "Write the rows of a public dataset into a folder, with their images and a manifest. A complete folder is left as it "
    "is. Rows that cannot be used are left out and listed; the exit code is then 3."
)


@dataclass(frozen=True, kw_only=True)
class PrepareDataConfig:
    recipe: Positional[str] = ""
    """Name of a recipe, or one of your own as FILE.yaml."""
    list_recipes: bool = False
    """List the ready-made recipes and exit."""
    output: Path | None = None
    """Folder to write: rows.jsonl, images/, manifest.json, and left_out.jsonl if rows could not be used."""
    source: Path | None = None
    """A local copy in the published layout: a row file (Parquet, JSON, JSON lines), with zip or tar archives of images
    next to it, or the folder with all of them. None takes the dataset from the Hugging Face hub."""
    max_rows: Annotated[int | None, Within("[1, inf)")] = None
    """Rows taken from the start, not counting those that the recipe filters out; None takes all."""
    overwrite: bool = False
    """Replace a folder of rows that is already there."""


CONFIG = PrepareDataConfig


def main(argv: Sequence[str] | None = None) -> None:
    """Write the folder and say what is in it."""
    config = arguments.parse(PrepareDataConfig, argv, prog=PROG, description=DESCRIPTION)
    with user_errors(PROG):
        run(config)


def run(config: PrepareDataConfig) -> None:
    """Raises UserError if a value is wrong, the dataset cannot be had or the folder is taken."""
    from lmm_r1.tools.recipes import get_recipe
    from lmm_r1.tools.recipes.preparation import LEFT_OUT_FILE, Preparation

    if config.list_recipes:
        _print_recipes()
        return
    if not config.recipe:
        raise UserError("RECIPE is missing: name one (--list_recipes), or give a YAML file of your own")
    if config.output is None:
        raise UserError("--output is missing: name the folder to write")
    check_ranges(config)
    recipe = get_recipe(config.recipe)
    for aspect, assumed in recipe.unchecked.items():
        print(
            f"{PROG}: recipe {recipe.name}: its {aspect} could not be checked against the published files: {assumed}",
            file=sys.stderr,
        )
    show_line = ProgressLines()

    def show(counts: RecipeCounts) -> None:
        kept = f"{counts.kept:,} rows kept, {len(counts.left_out):,} left out"
        show_line(f"{PROG}: {recipe.name}: {counts.read:,} read, {kept}")

    job = Preparation(recipe=recipe, output=config.output, source=config.source, max_rows=config.max_rows, show=show)
    prepared = job.run(overwrite=config.overwrite)
    _print_summary(recipe, prepared.manifest, output=config.output, was_complete=prepared.was_complete)
    if prepared.left_out:
        report_skipped(PROG, prepared.left_out, listed_in=str(config.output / LEFT_OUT_FILE))


def _print_recipes() -> None:
    from lmm_r1.tools.recipes import get_recipe, recipe_names

    for recipe in map(get_recipe, recipe_names()):
        source = recipe.source.dataset or "no dataset on the hub, so --source is needed"
        rows = f"{recipe.rows:,} rows, " if recipe.rows else ""
        print(f"{recipe.name}: {recipe.description}")
        print(f"  {'evaluation' if recipe.is_suite else 'training'}; {source}, split {recipe.source.split}")
        print(f"  {rows}licence {recipe.licence}; judged by: {', '.join(recipe.verifiers)}")
        if recipe.unchecked:
            print(f"  not checked against the published files: {', '.join(recipe.unchecked)}")


def _print_summary(recipe: Recipe, manifest: Manifest, *, output: Path, was_complete: bool) -> None:
    images = f" and {_counted(manifest.images, 'image')}" if manifest.images else ""
    rows = f"{_counted(manifest.kept, 'row')}{images} of {recipe.name}"
    print(f"{output} holds {rows} already" if was_complete else f"wrote {rows} to {output}")
    for column, count in manifest.filtered.items():
        print(f"  {count:,} of {manifest.read:,} were filtered by {column}")
    if recipe.rows and manifest.max_rows is None and recipe.rows != manifest.kept + manifest.left_out:
        print(f"  the recipe expects {recipe.rows:,} rows, {manifest.kept + manifest.left_out:,} were found")
    print(f"  licence: {manifest.licence}; judged by: {', '.join(recipe.verifiers)}", flush=True)


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}" + ("" if count == 1 else "s")


if __name__ == "__main__":
    run_command(main)
