"""`python examples/reproduce.py NAME`: run a recipe from its band file and say which figures are inside their bands."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import rich.box
import yaml
from rich.console import Console
from rich.table import Table

from lmm_r1.cli import run_command, user_errors
from lmm_r1.cli.arguments import parse
from lmm_r1.config.declared import Positional
from lmm_r1.errors import UserError
from lmm_r1.files.json_files import read_json_object, write_json_object

PROG = "examples/reproduce.py"
DESCRIPTION = (
    "Run a recipe of this repository and compare its rows and figures with its band file. Without NAME, list the recipes. "
    "The exit code is 1 if rows differ or a figure lies outside its band. The same command resumes a run that was stopped."
)
CHECKOUT = Path(__file__).resolve().parents[1]
BANDS = CHECKOUT / "examples/bands"


@dataclass(frozen=True, kw_only=True)
class ReproduceConfig:
    """The recipe and where its runs go."""

    name: Positional[str | None] = None
    """Name of a band file, without `.yaml`."""
    output: Path | None = None
    """Folder of the runs, one per seed; by default runs/reproduce/NAME."""
    seeds: tuple[int, ...] = ()
    """Seeds to run; by default all of the band file."""


@dataclass(frozen=True, kw_only=True)
class ExpectedFigure:
    """A number in a JSON file that the recipe writes, and its expected range."""

    name: str
    file: str
    """Below the output folder. With `{seed}` the figure exists once per seed, otherwise once for all."""
    key: str
    """Names and keys separated by `/`; a list's entry is chosen by its number, from 0, or by its `name`."""
    low: float
    high: float

    def read(self, output: Path, *, seed: int) -> float:
        """Return the value; raises UserError if the file does not have it."""
        path = output / self.file.format(seed=seed)
        value: object = read_json_object(path)
        for part in self.key.split("/"):
            if isinstance(value, list):
                by_name = {one["name"]: one for one in value if isinstance(one, dict) and "name" in one}
                value = {str(place): one for place, one in enumerate(value)} | by_name
            value = value.get(part) if isinstance(value, dict) else None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise UserError(f"{path} has no number at {self.key}; did the recipe end?")
        return float(value)


@dataclass(frozen=True, kw_only=True)
class Band:
    """A recipe: how to run it, what its rows are, and what its figures were."""

    about: str
    model: str
    measured: str | None
    """Result file that the ranges come from; None if the recipe has not been run here."""
    ranges: str
    """How low and high were chosen."""
    seeds: tuple[int, ...]
    script: str
    """Bash, run in the checkout once per seed, with ROOT and SEED set; flags and config files are its settings."""
    rows: str
    """Folder with all row folders, below the folder of a seed."""
    data: Mapping[int, str]
    """Digest of the rows, by seed; empty if they have not been made here."""
    figures: tuple[ExpectedFigure, ...]


@dataclass(frozen=True, kw_only=True)
class Compared:
    """A figure or a digest next to what was expected."""

    name: str
    seed: int | None
    value: float | str
    expected: str
    inside: bool


def main(argv: Sequence[str] | None = None) -> None:
    """Run the recipe and print the comparison; exit code 1 if anything is outside."""
    config = parse(ReproduceConfig, argv, prog=PROG, description=DESCRIPTION)
    with user_errors(PROG):
        if config.name is None:
            _list()
            return
        inside = reproduce(
            config.name, output=config.output or Path("runs/reproduce") / config.name, seeds=config.seeds
        )
    if not inside:
        raise SystemExit(1)


def reproduce(name: str, *, output: Path, seeds: Sequence[int] = ()) -> bool:
    """Run the recipe for each seed, write reproduced.json into `output`, and return whether all is inside."""
    band = read_band(name)
    output = output.absolute()
    for seed in seeds or band.seeds:
        _run(band, output / f"seed{seed}", seed=seed)
    findings = compare(band, output, seeds=seeds or band.seeds)
    inside = all(finding.inside for finding in findings)
    record = {"name": name, "inside": inside, "findings": [vars(finding) for finding in findings]}
    write_json_object(output / "reproduced.json", record)
    _show(name, band, findings)
    return inside


def read_band(name: str) -> Band:
    """Return the band file of a recipe; raises UserError if there is none."""
    file = BANDS / f"{name}.yaml"
    if not file.is_file():
        raise UserError(f"no recipe {name}; there are {', '.join(names())}")
    fields = yaml.safe_load(file.read_text(encoding="utf-8"))
    return Band(**fields | {
        "seeds": tuple(fields["seeds"]),
        "figures": tuple(ExpectedFigure(**figure) for figure in fields["figures"]),
    })  # fmt: skip


def names() -> list[str]:
    """Return the names of all recipes."""
    return sorted(file.stem for file in BANDS.glob("*.yaml"))


def compare(band: Band, output: Path, *, seeds: Sequence[int]) -> list[Compared]:
    """Return what the finished runs show; raises UserError if a file or a figure is missing."""
    findings = []
    for seed, expected in band.data.items():
        if seed in seeds:
            digest = digest_of(output / f"seed{seed}" / band.rows)
            findings.append(
                Compared(name="rows", seed=seed, value=digest, expected=expected, inside=digest == expected)
            )
    for figure in band.figures:
        own = "{seed}" in figure.file
        for seed in seeds if own else seeds[:1]:
            value = figure.read(output, seed=seed)
            findings.append(
                Compared(
                    name=figure.name,
                    seed=seed if own else None,
                    value=value,
                    expected=f"{figure.low:g} to {figure.high:g}",
                    inside=figure.low <= value <= figure.high,
                )
            )
    return findings


def digest_of(folder: Path) -> str:
    """Return 16 hexadecimal digits over the prompts, with decoded images, and answers of a row folder or of all in `folder`.

    Raises UserError if there are no rows, or an image cannot be read.
    """
    from lmm_r1.data.files import ROWS_FILE, read_row_file
    from lmm_r1.tools.data_check.contents import contents

    digest = hashlib.sha256()
    files = [folder / ROWS_FILE] if (folder / ROWS_FILE).is_file() else sorted(folder.glob(f"*/{ROWS_FILE}"))
    if not files:
        raise UserError(f"{folder} has no rows; did the recipe end?")
    for file in files:
        for _, row in contents(read_row_file(str(file)).rows):
            if row.error:
                raise UserError(row.error)
            digest.update(row.question + row.answer.encode())
    return digest.hexdigest()[:16]


def _run(band: Band, folder: Path, *, seed: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {
        "ROOT": str(folder),
        "SEED": str(seed),
        "PYTHON": sys.executable,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    print(f"reproduce: seed {seed}, into {folder}", flush=True)
    code = subprocess.run(["bash", "-euo", "pipefail", "-c", band.script], cwd=CHECKOUT, env=environment).returncode
    if code:
        raise UserError(f"the recipe ended with exit code {code}; the same command resumes it")


def _list() -> None:
    table = Table("name", "recipe", "ranges", box=rich.box.SIMPLE)
    for name in names():
        band = read_band(name)
        table.add_row(name, band.about, band.measured or "not yet run here")
    Console().print(table)


def _show(name: str, band: Band, findings: Sequence[Compared]) -> None:
    table = Table("figure", "seed", "value", "band", "", box=rich.box.SIMPLE)
    for finding in findings:
        value = f"{finding.value:.4g}" if isinstance(finding.value, float) else finding.value
        seed = "" if finding.seed is None else str(finding.seed)
        table.add_row(finding.name, seed, value, finding.expected, "inside" if finding.inside else "[red]OUTSIDE")
    console = Console()
    console.print(table)
    outside = sum(not finding.inside for finding in findings)
    console.print(f"{name}: {outside or 'none'} of {len(findings)} outside; {band.ranges}")


if __name__ == "__main__":
    run_command(main)
