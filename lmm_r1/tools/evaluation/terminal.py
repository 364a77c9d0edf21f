"""An evaluation as tables in a terminal, and scores as short texts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import rich.box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lmm_r1.tools.evaluation.board import CONFIDENCE, Board, Comparison, MeasuredFile
from lmm_r1.tools.evaluation.page_parts import NONE, mean, percent_text, points_text
from lmm_r1.tools.evaluation.scores import SampleScores, ScoreEstimate

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
            console.print(_episode_table(file, played))
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


def _episode_table(file: MeasuredFile, played: Mapping[str, Mapping[str, str]]) -> Table:
    names = columns(played.values())
    table = _table(f"{file.name}: means of an episode, and how they ended in percent", names)
    for checkpoint, values in played.items():
        table.add_row(*map(Text, [checkpoint, *(values.get(column, NONE) for column in names)]))
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
