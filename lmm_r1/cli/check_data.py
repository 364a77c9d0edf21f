"""Look at a row file before training on it: `lmm-r1 check_data FILE --model MODEL`."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lmm_r1.cli import ProgressLines, run_command, user_errors
from lmm_r1.cli.arguments import parse
from lmm_r1.config.evaluate import CheckDataConfig, check_rows_flags
from lmm_r1.data.reading import grouped
from lmm_r1.files.json_files import write_json_object

if TYPE_CHECKING:
    from lmm_r1.tools.data_check import CheckedData

CONFIG = CheckDataConfig
PROG = "lmm-r1 check_data"
DESCRIPTION = (
    "Print statistics of a row file and problems that training would have with it: rows that cannot be used, broken images, "
    "sequences that are too long, answers that no response could match, duplicate rows, and rows that are also in a held-out "
    "file. Nothing is changed. The exit code is 3 if there are findings."
)
FOUND_CODE = 3
# Different findings of one kind that the terminal shows.
LISTED = 5


def main(argv: list[str] | None = None) -> None:
    config = parse(CheckDataConfig, argv, prog=PROG, description=DESCRIPTION)
    with user_errors(PROG):
        check_rows_flags(config)
        check_data(config)


def check_data(config: CheckDataConfig) -> None:
    """Print the findings, and write the JSON file."""
    from lmm_r1.tools.data_check import check_rows

    show = ProgressLines()
    checked = check_rows(
        config, progress=lambda what, done, total: show(f"{PROG}: {what}, {done:,} of {total:,} rows")
    )
    _print(checked)
    if config.output is not None:
        write_json_object(config.output, asdict(checked))
        print(f"findings: {config.output}", flush=True)
    if checked.findings:
        raise SystemExit(FOUND_CODE)


def _print(checked: CheckedData) -> None:
    from lmm_r1.tools.data_check.contents import KINDS

    console = Console(highlight=False, soft_wrap=True)
    if checked.kind == "prompts":
        prompts = checked.usable - checked.conversations
        what = f"rows, of them {prompts:,} prompts and {checked.conversations:,} conversations"
    else:
        what = f"rows of the kind {checked.kind}: " + ", ".join(f"{n:,} {name}" for name, n in checked.counts.items())
    console.print(f"{checked.source}: {checked.rows:,} {what}", markup=False)
    if checked.distributions:
        console.print(_distributions(checked))
    for note in checked.notes:
        console.print(note, markup=False)
    for kind, what in KINDS.items():
        findings = [finding for finding in checked.findings if finding.kind == kind]
        if not findings:
            continue
        rows = "1 row, which" if len(findings) == 1 else f"{len(findings):,} rows, each of which"
        console.print(f"{kind}: {rows} {what}", markup=False)
        for line in grouped(((finding.location, finding.what) for finding in findings), most=LISTED):
            console.print(f"  {line}", markup=False)
    if not checked.findings:
        console.print("No problems found.", markup=False)


def _distributions(checked: CheckedData) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for name in ("least", "median", "90 %", "99 %", "most", "limit"):
        table.add_column(name, justify="right")
    for spread in checked.distributions:
        values = (spread.least, spread.median, spread.most_of_90, spread.most_of_99, spread.largest, spread.limit)
        shown = ["" if value is None else f"{value:,.4g}" if value % 1 else f"{value:,.0f}" for value in values]
        table.add_row(Text(spread.name), *shown)
    return table


if __name__ == "__main__":
    run_command(main)
