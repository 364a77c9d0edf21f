"""`lmm-r1 report RUN [RUN ...]`: one self-contained HTML page about a run, or about several side by side."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import rich.box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lmm_r1.cli import run_command, user_errors
from lmm_r1.cli.arguments import parse
from lmm_r1.config.declared import ArgumentPlace
from lmm_r1.errors import UserError
from lmm_r1.evaluation.page_parts import NONE, duration, percent, points
from lmm_r1.files.atomic import write_atomically
from lmm_r1.records.metrics import FileScores
from lmm_r1.records.run_folder import Run, chained, read_run
from lmm_r1.report import build_comparison, build_report, write_summary
from lmm_r1.report.pages import compared_rows, distinct_names, row_files
from lmm_r1.report.rollout_sample import DEFAULT_MAX_ROLLOUTS
from lmm_r1.report.stages import StageRow, match_stages, stage_rows

PROG = "lmm-r1 report"
DESCRIPTION = (
    "Write RUN/report.html, one self-contained page: held-out accuracy per stage, training curves and a browser "
    "of rollouts. For a curriculum folder, RUN/summary.json is written as well. Runs that were each trained from the one "
    "before are the stages of one page, in the last of their folders. For other runs, comparison.html in the current folder "
    "shows the curves on the same axes, and the differences in accuracy and settings from the first run."
)
COMPARISON_FILE = Path("comparison.html")


@dataclass(frozen=True, kw_only=True)
class ReportConfig:
    """The runs and the output of a report."""

    runs: Annotated[tuple[Path, ...], ArgumentPlace("RUN [RUN ...]")]
    """Run folders (a stage's output folder), or folders that hold the stages; several are a chain, or compared."""
    output: Path | None = None
    """Where the page goes; by default report.html in the last RUN, or comparison.html here."""
    seconds: float | None = None
    """Seconds that the whole run took; by default the sum over its stages."""
    max_rollouts: int = DEFAULT_MAX_ROLLOUTS
    """How many rollouts the page holds at most: whole groups, spread evenly over the steps."""


CONFIG = ReportConfig


def main(argv: Sequence[str] | None = None) -> None:
    """Write the page, and for a curriculum the summary; print the table of stages."""
    config = parse(ReportConfig, argv, prog=PROG, description=DESCRIPTION)
    with user_errors(PROG):
        report(config)


def report(config: ReportConfig) -> None:
    """Do what `lmm-r1 report` does with these flags."""
    _check(config)
    names = distinct_names(config.runs)
    runs = [read_run(folder) for folder in config.runs]
    run = runs[0] if len(runs) == 1 else chained(runs)
    if run is None:
        _compare(config, runs, names=names)
        return
    output = config.output or run.folder / "report.html"
    page = build_report(run, seconds=config.seconds, max_rollouts=config.max_rollouts)
    write_atomically(output, text=page)
    if runs[0].is_curriculum:
        write_summary(run, path=run.folder / "summary.json", seconds=config.seconds)
    _print(_stage_table(run), output=output)


def _compare(config: ReportConfig, runs: Sequence[Run], *, names: Sequence[str]) -> None:
    if config.seconds is not None:
        raise UserError("--seconds says how long one run took; leave it out to compare several runs")
    output = config.output or COMPARISON_FILE
    write_atomically(output, text=build_comparison(runs, max_rollouts=config.max_rollouts))
    _print(_comparison_table(runs, names=names), output=output)


def _check(config: ReportConfig) -> None:
    if config.seconds is not None and not 0 <= config.seconds < float("inf"):
        raise UserError(f"--seconds must be a number from 0 up, got {config.seconds}")
    if config.max_rollouts < 0:
        raise UserError(f"--max_rollouts must be 0 or more, got {config.max_rollouts}")


def _stage_table(run: Run) -> Table:
    table = _table(run.name, columns=("Stage", "Began with"), files=run.evaluation.file_names)
    table.caption, table.caption_justify = run.legend or None, "left"
    for row in stage_rows(run):
        name, *others = _stage_cells(row)
        _add(
            table,
            name,
            row.began_with or NONE,
            *others,
            *(_accuracy(cell.scores, cell.change) for cell in row.held_out),
        )
    return table


def _comparison_table(runs: Sequence[Run], *, names: Sequence[str]) -> Table:
    files = row_files(runs)
    table = _table(f"differences to {names[0]}", columns=("Run", "Stage"), files=files)
    for match in match_stages(runs):
        for run, row in compared_rows(match, files=files):
            cells = [_accuracy(cell.scores, cell.change) for cell in row.held_out]
            _add(table, names[run], *_stage_cells(row), *cells)
        table.add_section()
    return table


def _accuracy(scores: FileScores | None, change: float | None) -> str:
    if scores is None:
        return NONE
    return percent(scores.accuracy) + ("" if change is None else f" ({points(change)})")


def _table(title: str, *, columns: Sequence[str], files: Sequence[str]) -> Table:
    table = Table(title=Text(title), title_justify="left", box=rich.box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column)
    table.add_column("Steps", justify="right")
    table.add_column("Time", justify="right")
    for file in files:
        table.add_column(Text(f"{file} accuracy"), justify="right")
    return table


def _add(table: Table, *cells: str) -> None:
    # As Text, since a name in square brackets would be taken for markup; half a surrogate pair has no encoding.
    table.add_row(*(Text(cell.encode("utf-8", "replace").decode("utf-8")) for cell in cells))


def _stage_cells(row: StageRow) -> list[str]:
    state = f" ({row.stage.state})" if row.stage and row.stage.state != "finished" else ""
    steps = f"{row.stage.steps:,}" if row.stage else NONE
    return [f"{row.name}{state}", steps, duration(row.stage.seconds if row.stage else None)]


def _print(table: Table, *, output: Path) -> None:
    console = Console()
    console.print(table)
    size = output.stat().st_size
    shown = f"{size / 1e6:.1f} MB" if size >= 1e6 else f"{size / 1e3:.0f} kB"
    console.print(Text(f"report: {output} ({shown})"), soft_wrap=True)


if __name__ == "__main__":
    run_command(main)
