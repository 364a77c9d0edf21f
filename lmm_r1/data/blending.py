"""Several row files as one list: one after the other, or drawn by probability."""

import math
from collections.abc import Sequence

import numpy as np

from lmm_r1.data.messages import Row
from lmm_r1.errors import UserError


def parse_dataset_spec(datasets: str, probabilities: str | None = None) -> tuple[list[str], list[float] | None]:
    """`("a.jsonl,b.jsonl", "0.7,0.3")` → `(["a.jsonl", "b.jsonl"], [0.7, 0.3])`; raises UserError if they do not fit."""
    paths = [path.strip() for path in datasets.split(",")]
    if not all(paths):
        raise UserError(
            f"--data.prompt_dataset {datasets!r} has an empty entry; give paths separated by single commas"
        )
    if probabilities is None or not probabilities.strip():
        return paths, None
    try:
        values = [float(value) for value in probabilities.split(",")]
    except ValueError as error:
        raise UserError(f"--data.prompt_probs {probabilities!r} must be numbers separated by commas") from error
    _check(values, num_datasets=len(paths))
    return paths, values


def blend(row_lists: Sequence[Sequence[Row]], probabilities: Sequence[float] | None, *, seed: int) -> list[Row]:
    """One list of rows: a concatenation without `probabilities`, else a draw that stops at the first list used up.

    Each draw picks a list by its probability and takes that list's next row, so no row comes twice. The order is that
    of `datasets.interleave_datasets(..., stopping_strategy="first_exhausted")` for the same seed.

    Raises:
        UserError: the probabilities do not fit the lists, or a list is empty.
    """
    if probabilities is None:
        return [row for rows in row_lists for row in rows]
    _check(probabilities, num_datasets=len(row_lists))
    for number, rows in enumerate(row_lists, start=1):
        if not rows:
            raise UserError(
                f"dataset {number} of --data.prompt_dataset holds no rows, so nothing can be drawn from it"
            )
    # No more draws than rows can be needed: after that many, one list has been used up.
    shares = np.asarray(probabilities) / sum(probabilities)
    draws = np.random.default_rng(seed).choice(len(row_lists), size=sum(map(len, row_lists)), p=shares)
    taken = [0] * len(row_lists)
    blended = []
    for index in draws.tolist():
        blended.append(row_lists[index][taken[index]])
        taken[index] += 1
        if taken[index] == len(row_lists[index]):
            break
    return blended


def _check(probabilities: Sequence[float], *, num_datasets: int) -> None:
    given = ",".join(f"{value:g}" for value in probabilities)
    if len(probabilities) != num_datasets:
        raise UserError(
            f"--data.prompt_probs {given} has {len(probabilities)} numbers but --data.prompt_dataset names "
            f"{num_datasets} datasets; give one probability for each"
        )
    if not all(math.isfinite(value) and value >= 0 for value in probabilities):
        raise UserError(f"--data.prompt_probs {given} must not be negative")
    if not math.isclose(sum(probabilities), 1.0, abs_tol=1e-4):
        raise UserError(
            f"--data.prompt_probs {given} adds up to {sum(probabilities):g}; the probabilities of the datasets in "
            "--data.prompt_dataset must add up to 1"
        )
