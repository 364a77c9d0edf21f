"""`lmm-r1 report RUN [RUN ...]`: one self-contained HTML page about a run, or about several side by side."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from lmm_r1.cli import run_command, user_errors
from lmm_r1.cli.arguments import parse
from lmm_r1.config.declared import ArgumentPlace
from lmm_r1.errors import UserError
from lmm_r1.files.atomic import write_atomically
from lmm_r1.records.run_folder import chained, read_run
from lmm_r1.tools.evaluation.page_parts import duration, percent, points
from lmm_r1.tools.report import (
    StageRow,
    build_comparison,
    build_report,
    compared_rows,
    distinct_names,
    match_stages,
    row_files,
    stage_rows,
    write_summary,
)
from lmm_r1.tools.report.rollout_sample import DEFAULT_MAX_ROLLOUTS

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
    """Write the page, and for a curriculum the summary; print a line for each stage."""
    config = parse(ReportConfig, argv, prog=PROG, description=DESCRIPTION)
    with user_errors(PROG):
        report(config)


def report(config: ReportConfig) -> None:
    """Do what `lmm-r1 report` does with these flags."""
    if config.seconds is not None and not 0 <= config.seconds < float("inf"):
        raise UserError(f"--seconds must be a number from 0 up, got {config.seconds}")
    if config.max_rollouts < 0:
        raise UserError(f"--max_rollouts must be 0 or more, got {config.max_rollouts}")
    names = distinct_names(config.runs)
    runs = [read_run(folder) for folder in config.runs]
    run = runs[0] if len(runs) == 1 else chained(runs)
    if run is None:
        if config.seconds is not None:
            raise UserError("--seconds says how long one run took; leave it out to compare several runs")
        output = config.output or COMPARISON_FILE
        write_atomically(output, text=build_comparison(runs, max_rollouts=config.max_rollouts))
        _say(f"in brackets, differences to {names[0]}")
        files = row_files(runs)
        for place, row in (one for match in match_stages(runs) for one in compared_rows(match, files=files)):
            _say(f"{names[place]}, {_told(row, files)}")
    else:
        output = config.output or run.folder / "report.html"
        write_atomically(output, text=build_report(run, seconds=config.seconds, max_rollouts=config.max_rollouts))
        if runs[0].is_curriculum:
            write_summary(run, path=run.folder / "summary.json", seconds=config.seconds)
        for row in stage_rows(run):
            _say(_told(row, run.evaluation.file_names))
    _say(f"report: {output} ({output.stat().st_size / 1e6:.1f} MB)")


def _told(row: StageRow, files: Sequence[str]) -> str:
    """Return a line about a stage: its steps, its time, and the accuracy on each file with the change in brackets."""
    parts = [row.name]
    if row.stage is not None:
        state = "" if row.stage.state == "finished" else f" ({row.stage.state})"
        parts = [f"{row.name}{state}: {row.stage.steps:,} steps", duration(row.stage.seconds)]
    for file, cell in zip(files, row.held_out, strict=True):
        if cell.scores is not None:
            changed = "" if cell.change is None else f" ({points(cell.change)})"
            parts.append(f"{file} {percent(cell.scores.accuracy)}{changed}")
    return ", ".join(parts)


def _say(line: str) -> None:
    # Half a surrogate pair has no encoding.
    print(line.encode("utf-8", "replace").decode("utf-8"))


if __name__ == "__main__":
    run_command(main)
