"""`lmm-r1 report RUN`: one self-contained HTML page about a run folder or a curriculum folder."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import rich.box
import tyro
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lmm_r1.cli.arguments import parse, user_errors
from lmm_r1.data.atomic_file import write_atomically
from lmm_r1.errors import UserError
from lmm_r1.evaluation.report import build_report, write_summary
from lmm_r1.evaluation.report.number_text import NONE, duration, percent, points
from lmm_r1.evaluation.report.page import DEFAULT_MAX_ROLLOUTS
from lmm_r1.evaluation.report.stage_table import StageRow, stage_rows
from lmm_r1.evaluation.run_folder import Run, read_run

PROG = "lmm-r1 report"
DESCRIPTION = (
    "Write RUN/report.html, one page that opens anywhere: held-out accuracy per stage, training curves and a browser "
    "of rollouts. For a curriculum folder, RUN/summary.json is written as well."
)


@dataclass(frozen=True, kw_only=True)
class ReportConfig:
    """What to report on, and where to."""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """A run folder (a stage's output folder), or the folder that holds the stages."""
    output: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Where the page goes; by default report.html in RUN."""
    seconds: Annotated[float | None, tyro.conf.arg(metavar="N")] = None
    """How long the whole run took; by default the sum over its stages."""
    max_rollouts: int = DEFAULT_MAX_ROLLOUTS
    """How many rollouts the page holds at most, spread evenly over the steps."""


def main(argv: Sequence[str] | None = None) -> None:
    """Write the page, and for a curriculum the summary; print the table of stages."""
    config = parse(ReportConfig, argv, prog=PROG, description=DESCRIPTION)
    with user_errors(PROG):
        report(config)


def report(config: ReportConfig) -> None:
    """Do what `lmm-r1 report` does with these flags."""
    _check(config)
    run = read_run(config.run)
    output = config.output or config.run / "report.html"
    page = build_report(run, seconds=config.seconds, max_rollouts=config.max_rollouts)
    write_atomically(output, text=page)
    if run.is_curriculum:
        write_summary(run, path=config.run / "summary.json", seconds=config.seconds)
    _print_table(run, output=output)


def _check(config: ReportConfig) -> None:
    if config.seconds is not None and not 0 <= config.seconds < float("inf"):
        raise UserError(f"--seconds must be a number from 0 up, got {config.seconds}")
    if config.max_rollouts < 0:
        raise UserError(f"--max_rollouts must be 0 or more, got {config.max_rollouts}")


def _print_table(run: Run, *, output: Path) -> None:
    table = Table(title=Text(run.name), title_justify="left", box=rich.box.SIMPLE_HEAD)
    table.add_column("Stage")
    table.add_column("Steps", justify="right")
    table.add_column("Time", justify="right")
    for file in run.evaluation.file_names:
        table.add_column(Text(f"{file} accuracy"), justify="right")
    for row in stage_rows(run):
        # As Text, since a name in square brackets would be taken for markup.
        table.add_row(*map(Text, _cells(row)))
    console = Console()
    console.print(table)
    console.print(Text(f"report: {output}"), soft_wrap=True)


def _cells(row: StageRow) -> list[str]:
    running = " (running)" if row.stage and row.stage.running else ""
    accuracies = [
        f"{points(cell.change)} {percent(cell.scores.accuracy)}".strip() if cell.scores else NONE
        for cell in row.held_out
    ]
    steps = f"{row.stage.steps:,}" if row.stage else NONE
    return [f"{row.name}{running}", steps, duration(row.stage.seconds if row.stage else None), *accuracies]


if __name__ == "__main__":
    main()
