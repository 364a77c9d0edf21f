"""Where our verifiers and another harness judge the same predictions differently."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lmm_r1.evaluation.comparison import Comparison


@dataclass(frozen=True, kw_only=True)
class Disagreement:
    """One row that is right by one and wrong by the other; accuracies are between 0 and 1."""

    file: str
    verifier: str
    row: str
    """The row's file and line."""
    key: str
    """What the harness calls the row."""
    question: str
    options: Mapping[str, str]
    label: str
    predictions: tuple[str, ...]
    theirs: float
    ours: float
    images: tuple[str, ...]
    """Paths, addresses and data URIs."""


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """One verifier against the verdicts that a file of predictions holds, on the rows that have one."""

    comparison: Comparison
    """The baseline is the file's own verdict."""
    theirs: float
    """Mean of the file's verdicts."""
    ours: float
    """Mean of the verifier's."""


@dataclass(frozen=True, kw_only=True)
class Rejudged:
    """A file of predictions that was judged again."""

    file: str
    harness: str
    metric: str
    """The file's own verdict."""
    agreements: tuple[Agreement, ...]
    """One per verifier."""
    disagreements: tuple[Disagreement, ...]
    """With the first verifier, in the order of the file."""
