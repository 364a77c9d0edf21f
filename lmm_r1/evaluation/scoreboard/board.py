"""Every score and every comparison of an evaluation, and its JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from lmm_r1.data.messages import Row
from lmm_r1.data.reading import SkippedRow
from lmm_r1.evaluation.comparison import Comparison, Rejudged, compare
from lmm_r1.evaluation.scores import SampleScores, by_datasource, summarize
from lmm_r1.records.responses import JudgedResponse


@dataclass(frozen=True, kw_only=True)
class MeasuredFile:
    """A row file or a suite, and how its rows were sampled and judged."""

    name: str
    source: str
    """Where its rows are from."""
    verifiers: tuple[str, ...]
    """The accuracy of the first one is that of the file."""
    ks: tuple[int, ...]
    """For pass@k and majority@k."""
    sampling: Mapping[str, float] = field(default_factory=dict)
    """temperature, n_samples and max_new_tokens; empty if unknown."""
    skipped: tuple[SkippedRow, ...] = ()
    rows: Mapping[int, Row] = field(default_factory=dict, repr=False)
    """By their index in the file, as far as they are available, to show their images."""

    @property
    def verifier(self) -> str:
        """The verifier whose accuracy is that of the file."""
        return self.verifiers[0]


@dataclass(frozen=True, kw_only=True)
class CheckpointResponses:
    """The responses of one checkpoint."""

    name: str
    path: str
    files: Mapping[str, Sequence[JudgedResponse]]
    """By the name of the file."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """How long the responses to a file took, if known."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One checkpoint on one file."""

    all: SampleScores
    datasources: dict[str, SampleScores]
    seconds: float | None


@dataclass(frozen=True, kw_only=True)
class Board:
    """An evaluation."""

    files: tuple[MeasuredFile, ...]
    checkpoints: tuple[CheckpointResponses, ...]
    baseline: str
    cells: dict[tuple[str, str], Cell]
    """By checkpoint and file."""
    comparisons: tuple[Comparison, ...]
    settings: Mapping[str, object]
    rejudged: tuple[Rejudged, ...] = ()
    """For files with the predictions and verdicts of another harness."""

    def datasources(self, file: MeasuredFile) -> list[str]:
        """Return the data sources of a file's rows, in the order of first occurrence."""
        cells = (self.cells.get((checkpoint.name, file.name)) for checkpoint in self.checkpoints)
        return list(dict.fromkeys(source for cell in cells if cell for source in cell.datasources))

    def scores(self, file: MeasuredFile, *, datasource: str | None = None) -> dict[str, SampleScores]:
        """Return the scores on a file, or on one data source of it, by checkpoint."""
        found = {}
        for checkpoint in self.checkpoints:
            cell = self.cells.get((checkpoint.name, file.name))
            scores = cell and (cell.all if datasource is None else cell.datasources.get(datasource))
            if scores:
                found[checkpoint.name] = scores
        return found

    def best(self, scores: Mapping[str, SampleScores], *, verifier: str) -> set[str]:
        """Return the checkpoints with the highest accuracy, none if all are equal."""
        means = {name: found.verifiers[verifier].accuracy.mean for name, found in scores.items()}
        top = max(means.values())
        best = {name for name, mean in means.items() if mean == top}
        return best if len(best) < len(means) else set()


def build_board(
    *,
    files: Sequence[MeasuredFile],
    checkpoints: Sequence[CheckpointResponses],
    baseline: str,
    resamples: int,
    seed: int,
    settings: Mapping[str, object],
    rejudged: Sequence[Rejudged] = (),
) -> Board:
    """Return every score, and the comparison of each other checkpoint with the baseline, per file and verifier.

    Args:
        resamples: for the bootstrap, as is `seed`.
    """
    cells: dict[tuple[str, str], Cell] = {}
    for file in files:
        answered = {one.name: one for one in checkpoints if file.name in one.files}
        # The same limit for all of them, so that they fit one table.
        turns = max((_most_turns(one.files[file.name]) for one in answered.values()), default=0)
        asked: dict[str, Any] = {"verifiers": file.verifiers, "ks": file.ks, "most_turns": turns}
        for name, one in answered.items():
            cells[name, file.name] = Cell(
                all=summarize(one.files[file.name], **asked),
                datasources=by_datasource(one.files[file.name], **asked),
                seconds=one.seconds.get(file.name),
            )
    (first,) = (checkpoint for checkpoint in checkpoints if checkpoint.name == baseline)
    comparisons = tuple(
        compare(first.files[file.name], other.files[file.name], verifier=verifier, resamples=resamples, seed=seed)
        for file in files
        for verifier in file.verifiers
        for other in checkpoints
        if other is not first and file.name in first.files and file.name in other.files
    )
    return Board(
        files=tuple(files),
        checkpoints=tuple(checkpoints),
        baseline=baseline,
        cells=cells,
        comparisons=comparisons,
        settings=settings,
        rejudged=tuple(rejudged),
    )


def _most_turns(responses: Sequence[JudgedResponse]) -> int:
    """Return the number of turns of the longest episode, 0 without episodes."""
    return max((response.episode.turns for response in responses if response.episode is not None), default=0)


def board_record(board: Board) -> dict[str, Any]:
    """Return an evaluation as plain values: settings, files, checkpoints with their scores per file, comparisons."""
    return {
        "settings": dict(board.settings),
        "files": {file.name: _file(file) for file in board.files},
        "checkpoints": [
            {
                "name": checkpoint.name,
                "path": checkpoint.path,
                "files": {
                    file.name: _cell(board.cells[checkpoint.name, file.name], file=file)
                    for file in board.files
                    if (checkpoint.name, file.name) in board.cells
                },
            }
            for checkpoint in board.checkpoints
        ],
        "baseline": board.baseline,
        "comparisons": [asdict(comparison) for comparison in board.comparisons],
        **({"rejudged": [_rejudged(one) for one in board.rejudged]} if board.rejudged else {}),
    }


def _rejudged(one: Rejudged) -> dict[str, Any]:
    """Return the record without the disagreements, which have their own file."""
    return {
        "file": one.file,
        "harness": one.harness,
        "metric": one.metric,
        "disagreements": len(one.disagreements),
        "agreements": [asdict(agreement) for agreement in one.agreements],
    }


def _file(file: MeasuredFile) -> dict[str, Any]:
    return {
        "source": file.source,
        "verifiers": list(file.verifiers),
        "k": list(file.ks),
        **file.sampling,
        "skipped_rows": [asdict(row) for row in file.skipped],
    }


def _cell(cell: Cell, *, file: MeasuredFile) -> dict[str, Any]:
    sources = {name: _scores(scores, verifier=file.verifier) for name, scores in cell.datasources.items()}
    seconds = {} if cell.seconds is None else {"seconds": cell.seconds}
    return {**_scores(cell.all, verifier=file.verifier), **seconds, "datasources": sources}


def _scores(scores: SampleScores, *, verifier: str) -> dict[str, Any]:
    """Return the scores of all verifiers, preceded by the accuracy of the file's own verifier."""
    accuracy = scores.verifiers[verifier].accuracy
    found = asdict(scores)
    if scores.episodes is None:
        del found["episodes"]
        for own in found["verifiers"].values():
            del own["within_turns"]
    return {"accuracy": accuracy.mean, "accuracy_standard_error": accuracy.standard_error, **found}
