"""The rows that checkpoints are measured on: of row files, and of suites."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lmm_r1.config.episodes import reward_part
from lmm_r1.data.bad_rows import SkippedRow
from lmm_r1.data.files import read_good_rows
from lmm_r1.data.messages import Row, check_asks
from lmm_r1.data.reading import AS_THEY_ARE, RowReading
from lmm_r1.data.recipes.mapping import check_embedded_images
from lmm_r1.data.recipes.recipe import Recipe, Sampling
from lmm_r1.errors import UserError
from lmm_r1.evaluation.scoreboard.board import MeasuredFile
from lmm_r1.evaluation.scores import powers_of_two
from lmm_r1.evaluation.suites import load_suite

DEFAULT_VERIFIER = "math"


@dataclass(frozen=True, kw_only=True)
class Choices:
    """What the user chose over the defaults of a file or a suite; None and () leave them."""

    verifiers: tuple[str, ...] = ()
    file_verifiers: tuple[str, ...] = (DEFAULT_VERIFIER,)
    """Those of files, where none are chosen."""
    ks: tuple[int, ...] = ()
    temperature: float | None = None
    n_samples: int | None = None
    max_new_tokens: int | None = None
    max_rows: int | None = None


@dataclass(frozen=True, kw_only=True)
class RowSet:
    """One file or suite, ready to be answered."""

    file: MeasuredFile
    rows: dict[int, Row]
    """By their place in the file."""
    sampling: Sampling
    notes: tuple[str, ...] = ()
    """What the user should know of these rows, in sentences."""
    told: str | None = None
    """Of a file its format, in a sentence."""


def file_rows(name: str, path: str, *, choices: Choices, reading: RowReading = AS_THEY_ARE) -> RowSet:
    """Return the rows of a file; raises UserError where it cannot be read or none of its rows can be used."""
    verifiers = choices.verifiers or choices.file_verifiers
    # A part of an environment's reward needs no answer.
    judged = any(reward_part(verifier) is None for verifier in verifiers)
    read = read_good_rows(path, max_rows=choices.max_rows, reading=reading, answer_required=judged)
    rows, unusable = _usable(read.rows, path=path)
    skipped = sorted([*read.skipped, *unusable], key=lambda row: row.index)
    sampling = _chosen(Sampling(), choices)
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
        file=file, rows=rows, sampling=sampling, notes=tuple(_alike(sampling, name=name)), told=read.told_as_prompts
    )


def suite_rows(recipe: Recipe, *, path: str | None, choices: Choices) -> RowSet:
    """Return the rows of a suite, from a local copy or from the hub; raises UserError as `load_suite` does."""
    rows, skipped = load_suite(recipe, path=path, max_rows=choices.max_rows)
    assert recipe.sampling is not None, "a suite says how it is sampled"
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
        notes.append(f"suite {recipe.name}: {found:,} rows were found, where the benchmark has {recipe.rows:,}")
    return RowSet(file=file, rows=rows, sampling=sampling, notes=tuple(notes))


def _usable(rows: dict[int, Row], *, path: str) -> tuple[dict[int, Row], list[SkippedRow]]:
    """The rows that ask something and whose embedded images can be decoded, and the others."""
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


def _alike(sampling: Sampling, *, name: str) -> Iterator[str]:
    if sampling.n_samples > 1 and sampling.temperature == 0:
        yield f"{name}: at temperature 0 the {sampling.n_samples} samples of a row are alike; raise --temperature"


def _chosen(sampling: Sampling, choices: Choices) -> Sampling:
    changes = {name: getattr(choices, name) for name in Sampling.model_fields}
    return sampling.model_copy(update={name: value for name, value in changes.items() if value is not None})


def _ks(chosen: tuple[int, ...], *, n_samples: int, name: str) -> tuple[int, ...]:
    too_many = [k for k in chosen if not 1 <= k <= n_samples]
    if too_many:
        raise UserError(
            f"--k {too_many[0]}: {name} has {n_samples} samples per row, so k must be from 1 to {n_samples}; "
            "raise --n_samples"
        )
    return tuple(sorted(set(chosen))) or tuple(powers_of_two(n_samples))
