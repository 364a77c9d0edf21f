"""An evaluation as tables in a terminal."""

from __future__ import annotations

import rich.box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lmm_r1.evaluation.scoreboard.board import Board, MeasuredFile
from lmm_r1.evaluation.scoreboard.cell_text import CONFIDENCE_TEXT, change, estimate, interval, p_value, share
from lmm_r1.evaluation.scores import SampleScores

BEST = "\N{BLACK STAR}"
LOG_WIDTH = 160
"""Columns of a log file; a terminal has its own width."""


def print_board(board: Board) -> None:
    """Print one table per file, and one of the comparisons; a page holds every k, these only the largest."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=LOG_WIDTH)
    for file in board.files:
        console.print(_file_table(board, file))
    if board.comparisons:
        console.print(_comparison_table(board))


def _file_table(board: Board, file: MeasuredFile) -> Table:
    sources = board.datasources(file)
    most = max(file.ks)
    skipped = f", {len(file.skipped)} left out" if file.skipped else ""
    rows = max(scores.rows for scores in board.scores(file).values())
    title = f"{file.name}: {rows:,} rows{skipped}, percent \N{PLUS-MINUS SIGN} standard error over rows"
    # As Text, since a name in square brackets would be taken for markup.
    table = Table(title=Text(title), title_justify="left", box=rich.box.SIMPLE_HEAD)
    table.add_column("Checkpoint")
    for name in [*file.verifiers, *_sampled_columns(most), "format", "tokens", "cut off"]:
        table.add_column(Text(name), justify="right", no_wrap=True)
    for source in [None, *(sources if len(sources) > 1 else ())]:
        scores = board.scores(file, datasource=source)
        best = board.best(scores, verifier=file.verifier)
        if source is not None:
            table.add_row(Text(f"{source}, {max(found.rows for found in scores.values()):,} rows", style="italic"))
        for name, found in scores.items():
            marked = f"{name} {BEST}" if name in best else name
            cells = [marked, *_cells(found, file=file, most=most)]
            table.add_row(*map(Text, cells), style="bold" if name in best else None)
        table.add_section()
    return table


def _sampled_columns(most: int) -> list[str]:
    return [f"pass@{most}", f"maj@{most}"] if most > 1 else []


def _cells(scores: SampleScores, *, file: MeasuredFile, most: int) -> list[str]:
    own = scores.verifiers[file.verifier]
    sampled = [estimate(own.pass_at_k[most]), estimate(own.majority_at_k[most])] if most > 1 else []
    return [
        *(estimate(scores.verifiers[verifier].accuracy) for verifier in file.verifiers),
        *sampled,
        share(scores.format),
        f"{scores.mean_response_tokens:,.0f}",
        share(scores.truncated_rate),
    ]


def _comparison_table(board: Board) -> Table:
    table = Table(
        title=Text(f"Against {board.baseline}, row by row, in percentage points"),
        title_justify="left",
        box=rich.box.SIMPLE_HEAD,
    )
    for name in ("File", "Verifier", "Checkpoint"):
        table.add_column(name)
    for name in ("Difference", f"{CONFIDENCE_TEXT} interval", "p", "Rows better", "Rows worse"):
        table.add_column(name, justify="right", no_wrap=True)
    for comparison in board.comparisons:
        cells = (
            comparison.file,
            comparison.verifier,
            comparison.checkpoint,
            change(comparison.difference),
            interval(comparison),
            p_value(comparison.p_value),
            f"{comparison.better_rows:,}",
            f"{comparison.worse_rows:,}",
        )
        table.add_row(*map(Text, cells))
    return table
