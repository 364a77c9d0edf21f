"""Run a checkpoint over a file of rows: `lmm-r1 batch_inference --model DIR --data ROWS --output FILE`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lmm_r1.cli import job_progress, report_skipped, run_command, user_errors
from lmm_r1.cli.arguments import parse
from lmm_r1.config.generation import BatchConfig

if TYPE_CHECKING:
    from lmm_r1.tools.batch.run import BatchReport

CONFIG = BatchConfig
PROG = "lmm-r1 batch_inference"
DESCRIPTION = (
    "Generate responses to every row of a file, play episodes on it with an environment (--agent), or score responses with "
    "a reward model; select the best of n, samples to fine-tune on, or pairs for DPO. The same command resumes a killed "
    "job. Rows that cannot be used are left out and listed at the end, with exit code 3."
)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the job; exits with code 3 if rows were left out."""
    config = parse(BatchConfig, argv, prog=PROG, description=DESCRIPTION, first_help=BatchConfig.first_help)
    with user_errors(PROG):
        from lmm_r1.tools.batch.run import run_batch

        report = run_batch(config, progress=job_progress)
    for line in _lines(config, report):
        print(line)
    if report.skipped:
        report_skipped(PROG, report.skipped)


def _lines(config: BatchConfig, report: BatchReport) -> list[str]:
    totals, seconds = report.totals, report.seconds
    told = [report.summary] if report.summary else []
    if report.done_before == report.rows:
        lines = [f"{config.output}: all {report.rows} rows were done before"]
    else:
        before = f", {report.done_before} were done before" if report.done_before else ""
        left_out = f", {totals.skipped} left out" if totals.skipped else ""
        what = "responses" if config.agent is None else "episodes"
        lines = [
            f"{config.output}: {totals.rows} rows{before}{left_out}; {totals.responses} {what} of {totals.tokens:,} "
            f"tokens in {seconds:.1f} s"
        ]
    if report.selected is not None:
        lines.append(f"{config.selected}: {report.selected} rows by {config.select}")
    return [*told, *lines]


if __name__ == "__main__":
    run_command(main)
