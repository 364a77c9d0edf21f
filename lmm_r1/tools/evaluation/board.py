"""The scores of an evaluation, the paired comparisons of its checkpoints, and both as JSON and as tables in a terminal."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from functools import partial
from statistics import fmean
from typing import Any

import numpy as np
import rich.box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lmm_r1.data.messages import Row, SkippedRow
from lmm_r1.errors import UserError
from lmm_r1.records.responses import JudgedResponse, by_row
from lmm_r1.tools.evaluation.page_parts import NONE, mean, percent_text, points_text
from lmm_r1.tools.evaluation.scores import SampleScores, ScoreEstimate, by_datasource, summarize

Record = dict[str, object]
CONFIDENCE = 0.95
BATCH_VALUES = 4_000_000
"""How many resampled values are in memory at a time."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A checkpoint's accuracy minus the baseline's, by one verifier, on the rows that both answered."""

    baseline: str
    checkpoint: str
    file: str
    verifier: str
    rows: int
    rows_of_one: int
    """Rows that only one of them answered, which are left out."""
    difference: float
    low: float
    """The 95 % interval of the difference, by a percentile bootstrap over rows."""
    high: float
    p_value: float
    """By a sign-flip permutation test, see `paired_test`."""
    better_rows: int
    worse_rows: int


def compare(
    baseline: Sequence[JudgedResponse],
    checkpoint: Sequence[JudgedResponse],
    *,
    verifier: str,
    resamples: int,
    seed: int,
) -> Comparison:
    """Return the paired comparison of two checkpoints' responses to one file."""
    first = {row[0].index: row for row in by_row(baseline)}
    second = {row[0].index: row for row in by_row(checkpoint)}
    shared = [index for index in first if index in second]
    file = baseline[0].file
    if not shared:
        raise UserError(f"{file}: the two evaluations share no row; compare those of the same rows")
    differences = []
    for index in shared:
        rows = first[index], second[index]
        for name in ("label", "question"):
            ours, theirs = (getattr(row[0], name) for row in rows)
            if ours != theirs:
                raise UserError(
                    f"{file}: {rows[0][0].row} and {rows[1][0].row} are not the same row: their {name}s are {ours[:80]!r} "
                    f"and {theirs[:80]!r}; compare evaluations of the same rows"
                )
        before, after = (Fraction(sum(one.verdicts[verifier].right for one in row), len(row)) for row in rows)
        differences.append(after - before)
    values = [float(difference) for difference in differences]
    low, high = mean_interval(values, resamples=resamples, seed=seed)
    return Comparison(
        baseline=baseline[0].checkpoint,
        checkpoint=checkpoint[0].checkpoint,
        file=file,
        verifier=verifier,
        rows=len(shared),
        rows_of_one=len(first) + len(second) - 2 * len(shared),
        difference=fmean(values),
        low=low,
        high=high,
        p_value=paired_test(differences),
        better_rows=sum(difference > 0 for difference in differences),
        worse_rows=sum(difference < 0 for difference in differences),
    )


def mean_interval(values: Sequence[float], *, resamples: int, seed: int) -> tuple[float, float]:
    """Return the percentile interval of the mean of the rows' values, by resampling rows (Efron 1979).

    It holds `CONFIDENCE` of the resampled means. For the differences between two checkpoints on the same rows, this is
    the paired bootstrap.
    """
    rows = np.asarray(values, dtype=np.float64)  # (R,)
    generator = np.random.default_rng(seed)
    batch = max(1, BATCH_VALUES // len(rows))
    means = [
        rows[generator.integers(len(rows), size=(min(batch, resamples - start), len(rows)))].mean(axis=1)
        for start in range(0, resamples, batch)
    ]
    low, high = np.quantile(np.concatenate(means), [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)


def paired_test(differences: Sequence[Fraction]) -> float:
    """Return the two-sided p-value of the sum of rows' differences if each has either sign with equal probability.

    It counts all 2^R choices of signs; with one sample per row it is McNemar's exact test.
    """
    moved = [difference for difference in differences if difference]
    scale = math.lcm(*(difference.denominator for difference in moved)) if moved else 1
    reaching = int(abs(sum(moved, Fraction(0))) * scale)
    if reaching == 0:
        return 1.0
    steps = [int(abs(difference) * scale) for difference in moved]
    # The sum of the signed steps is 2 * (the sum of the positive ones) - total.
    total, reached = sum(steps), 0
    chances = np.zeros(total + 1)
    chances[0] = 1.0
    for step in steps:
        chances[step : reached + step + 1] = (chances[step : reached + step + 1] + chances[: reached + 1]) / 2
        chances[:step] /= 2
        reached += step
    sums = 2 * np.arange(total + 1) - total
    return min(1.0, float(chances[np.abs(sums) >= reaching].sum()))


@dataclass(frozen=True, kw_only=True)
class MeasuredFile:
    """A row file or a suite, and how its rows were sampled and judged."""

    name: str
    source: str
    verifiers: tuple[str, ...]
    """The accuracy of the first one is that of the file."""
    ks: tuple[int, ...]
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """temperature, n_samples and max_new_tokens; empty if unknown."""
    skipped: tuple[SkippedRow, ...] = ()
    notes: tuple[str, ...] = ()
    """What the command prints about its rows."""
    rows: Mapping[int, Row] = field(default_factory=dict, repr=False)
    """By their index in the file, as far as they are available, to show their images."""

    @property
    def verifier(self) -> str:
        return self.verifiers[0]


@dataclass(frozen=True, kw_only=True)
class CheckpointResponses:
    name: str
    path: str
    files: Mapping[str, Sequence[JudgedResponse]]
    seconds: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Cell:
    all: SampleScores
    datasources: dict[str, SampleScores]
    seconds: float | None


@dataclass(frozen=True, kw_only=True)
class Board:
    files: tuple[MeasuredFile, ...]
    checkpoints: tuple[CheckpointResponses, ...]
    baseline: str
    cells: dict[tuple[str, str], Cell]
    comparisons: tuple[Comparison, ...]
    settings: Mapping[str, object]

    def scores(self, file: MeasuredFile, *, datasource: str | None = None) -> dict[str, SampleScores]:
        """Return the scores on a file, or on one data source of it, by checkpoint."""
        found = {}
        for checkpoint in self.checkpoints:
            cell = self.cells.get((checkpoint.name, file.name))
            scores = cell and (cell.all if datasource is None else cell.datasources.get(datasource))
            if scores:
                found[checkpoint.name] = scores
        return found

    def groups(self, file: MeasuredFile) -> list[tuple[str | None, dict[str, SampleScores]]]:
        """Return the scores of all rows, under None, and of each data source if there are several, by checkpoint."""
        cells = (self.cells.get((checkpoint.name, file.name)) for checkpoint in self.checkpoints)
        sources = list(dict.fromkeys(source for cell in cells if cell for source in cell.datasources))
        names = [None, *sources] if len(sources) > 1 else [None]
        return [(name, self.scores(file, datasource=name)) for name in names]

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
) -> Board:
    """Return every score, and the comparison of each other checkpoint with the baseline, per file and verifier."""
    cells: dict[tuple[str, str], Cell] = {}
    for file in files:
        answered = {one.name: one for one in checkpoints if file.name in one.files}
        # The same limit for all of them, so that they fit one table.
        episodes = (said.episode for one in answered.values() for said in one.files[file.name])
        turns = max((episode.turns for episode in episodes if episode is not None), default=0)
        scored = partial(summarize, verifiers=file.verifiers, ks=file.ks, most_turns=turns)
        for name, one in answered.items():
            cells[name, file.name] = Cell(
                all=scored(one.files[file.name]),
                datasources={name: scored(own) for name, own in by_datasource(one.files[file.name]).items()},
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
    )


def board_record(board: Board) -> Record:
    """Return an evaluation as plain values: settings, files, checkpoints with their scores per file, comparisons."""
    return {
        "settings": dict(board.settings),
        "files": {
            file.name: {
                "source": file.source,
                "verifiers": list(file.verifiers),
                "k": list(file.ks),
                **file.sampling,
                "skipped_rows": [asdict(row) for row in file.skipped],
            }
            for file in board.files
        },
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
    }


def _cell(cell: Cell, *, file: MeasuredFile) -> Record:
    sources = {name: _scores(scores, verifier=file.verifier) for name, scores in cell.datasources.items()}
    seconds = {} if cell.seconds is None else {"seconds": cell.seconds}
    return {**_scores(cell.all, verifier=file.verifier), **seconds, "datasources": sources}


def _scores(scores: SampleScores, *, verifier: str) -> Record:
    """Return the scores of all verifiers, preceded by the accuracy of the file's own verifier."""
    accuracy = scores.verifiers[verifier].accuracy
    found = asdict(scores)
    if scores.episodes is None:
        del found["episodes"]
        for own in found["verifiers"].values():
            del own["within_turns"]
    return {"accuracy": accuracy.mean, "accuracy_standard_error": accuracy.standard_error, **found}


BEST = "\N{BLACK STAR}"
LOG_WIDTH = 160
"""Columns of a log file; a terminal uses its own width."""
CONFIDENCE_TEXT = f"{100 * CONFIDENCE:.0f}\N{NO-BREAK SPACE}%"
SMALLEST_P = 0.0001
END_NAMES = {"over": "over", "turns": "out of turns", "images": "out of images", "tokens": "out of tokens"}
"""How an episode ended, as a column."""


def print_board(board: Board) -> None:
    """Print one table per file, and one of the comparisons, with only the largest k; a page has all of them."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=LOG_WIDTH)
    for file in board.files:
        console.print(_file_table(board, file))
        played = {name: told for name, scores in board.scores(file).items() if (told := episode_columns(scores))}
        if played:
            names = columns(played.values())
            table = _table(f"{file.name}: means of an episode, and how they ended in percent", names)
            for checkpoint, values in played.items():
                table.add_row(*map(Text, [checkpoint, *(values.get(column, NONE) for column in names)]))
            console.print(table)
    if board.comparisons:
        console.print(_comparison_table(board))


def _file_table(board: Board, file: MeasuredFile) -> Table:
    most = max(file.ks)
    skipped = f", {len(file.skipped)} left out" if file.skipped else ""
    rows = max(scores.rows for scores in board.scores(file).values())
    title = f"{file.name}: {rows:,} rows{skipped}, percent \N{PLUS-MINUS SIGN} standard error over rows"
    # One sample has neither, and two samples are no vote.
    sampled = [f"pass@{most}", f"majority@{most}"][: most - 1]
    table = _table(title, [*file.verifiers, *sampled, "in format", "mean tokens", "cut off"])
    for source, scores in board.groups(file):
        best = board.best(scores, verifier=file.verifier)
        if source is not None:
            table.add_row(Text(f"{source}, {max(found.rows for found in scores.values()):,} rows", style="italic"))
        for name, found in scores.items():
            marked = f"{name} {BEST}" if name in best else name
            own = found.verifiers[file.verifier]
            cells = [
                marked,
                *(estimate(found.verifiers[verifier].accuracy) for verifier in file.verifiers),
                *[estimate(own.pass_at_k[most]), estimate(own.majority_at_k[most])][: most - 1],
                share(found.format),
                mean(found.mean_response_tokens),
                share(found.truncated_rate),
            ]
            table.add_row(*map(Text, cells), style="bold" if name in best else None)
        table.add_section()
    return table


def _table(title: str, numbers: Sequence[str], *, names: Sequence[str] = ("Checkpoint",)) -> Table:
    """Return an empty table with columns of names and of numbers."""
    # As Text, because a name in square brackets would be read as markup.
    table = Table(title=Text(title), title_justify="left", box=rich.box.SIMPLE_HEAD)
    for name in names:
        table.add_column(name)
    for name in numbers:
        table.add_column(Text(name), justify="right", no_wrap=True)
    return table


def episode_columns(scores: SampleScores) -> dict[str, str]:
    """Return a checkpoint's cells about its episodes, by column; empty without episodes."""
    episodes = scores.episodes
    if episodes is None:
        return {}
    means = {"turns": episodes.turns, "images": episodes.shown_images, **episodes.counts, **episodes.rewards}
    return {
        **{name.replace("_", " "): f"{value:.2f}" for name, value in means.items()},
        **{END_NAMES[end]: share(value) for end, value in episodes.ends.items()},
    }


def columns(rows: Iterable[Mapping[str, str]]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row))


def _comparison_table(board: Board) -> Table:
    table = _table(
        f"Against {board.baseline}, row by row, in percentage points",
        ("Difference", f"{CONFIDENCE_TEXT} interval", "p-value", "Rows better", "Rows worse"),
        names=("File", "Verifier", "Checkpoint"),
    )
    for comparison in board.comparisons:
        cells = (
            comparison.file,
            comparison.verifier,
            comparison.checkpoint,
            points_text(comparison.difference),
            interval(comparison),
            p_value(comparison.p_value),
            f"{comparison.better_rows:,}",
            f"{comparison.worse_rows:,}",
        )
        table.add_row(*map(Text, cells))
    return table


def share(value: float | None) -> str:
    """Return 0.5342 as `53.4`, in percent; a dash for an unknown value."""
    return NONE if value is None else percent_text(value)


def count(value: float | None) -> str:
    """Return 1234.4 as `1,234`; a dash for an unknown value."""
    return NONE if value is None else f"{value:,.0f}"


def estimate(value: ScoreEstimate) -> str:
    """Return a mean and its standard error in percent: `53.4 ± 1.2`."""
    error = value.standard_error
    return share(value.mean) if error is None else f"{share(value.mean)} \N{PLUS-MINUS SIGN} {share(error)}"


def interval(comparison: Comparison) -> str:
    """Return the interval of a difference in percentage points: `−1.0 to +4.5`."""
    return f"{points_text(comparison.low)} to {points_text(comparison.high)}"


def p_value(value: float) -> str:
    """Return a p-value to two digits, `< 0.0001` below that."""
    return f"< {SMALLEST_P:.4f}" if value < SMALLEST_P else f"{value:.2g}"
