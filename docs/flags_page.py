"""Builds docs/flags.md, docs/metrics.md, and the table of other defaults in docs/migrating.md; `make docs` runs it.

`python docs/flags_page.py` writes them. Help texts are the docstrings in `lmm_r1/config/`, and metrics are those of
`lmm_r1/report/metrics.yaml`.
"""

import importlib
import re
from pathlib import Path

from lmm_r1 import cli, dotted
from lmm_r1.cli.arguments import help_of
from lmm_r1.config import DIFFERENCES
from lmm_r1.report.curves import METRICS

DOCS = Path(__file__).resolve().parent
FLAGS_PAGE, METRICS_PAGE, MIGRATING_PAGE = DOCS / "flags.md", DOCS / "metrics.md", DOCS / "migrating.md"
BEGIN, END = "<!-- differences -->\n", "<!-- /differences -->\n"
RL = "train_ppo_ray"
# By command, RL first.
CONFIGS: dict[str, type] = {
    name: importlib.import_module(f"lmm_r1.cli.{name}").CONFIG for name in cli.COMMANDS if name.startswith("train_")
}
INTRODUCTION = """\
# Flags

Every flag of the trainers, with its default and its effect. `lmm-r1 COMMAND --help-all` prints the same texts.
A flag that is not available is refused with what to use instead. Names and meanings are OpenRLHF's if it has the flag;
[this table](migrating.md#from-openrlhf-011) gives the reason for each default that differs.

`make docs` builds this page from the docstrings in `lmm_r1/config/`: edit those.
"""
METRICS_INTRODUCTION = """\
# Metrics

What a training logs in `metrics.jsonl` and in [trackers](loggers.md). Bold: the chart of `lmm-r1 report`. `*` stands for any
text. Other names are [parts of your reward](reward_parts.md).

`make docs` builds this page from `lmm_r1/report/metrics.yaml`: edit that.
"""


def flags_page() -> str:
    """Return the page: the flags that all trainers share, those that all but RL share, and each command's own."""
    rows = {command: _rows(config_class) for command, config_class in CONFIGS.items()}
    supervised = {command: own for command, own in rows.items() if command != RL}
    everywhere = _shared(list(rows.values()))
    elsewhere = _shared(list(supervised.values()), but=everywhere)
    sections = {"All trainers": everywhere, "All trainers except RL": elsewhere}
    for command, own in rows.items():
        shown = {*everywhere, *(elsewhere if command in supervised else ())}
        sections[f"lmm-r1 {command}"] = [row for row in own if row not in shown]
    head = "| flag | default | effect |\n|---|---|---|\n"
    return INTRODUCTION + "".join(f"\n## {title}\n\n{head}{''.join(own)}" for title, own in sections.items())


def metrics_page() -> str:
    """Return the page: a table for each kind of run, a row for each chart."""
    sections: dict[str, list[str]] = {}
    for spec in METRICS:
        names = [f"**{spec.title}**"] * bool(spec.title) + [f"`{name}`" for name in spec.metrics]
        cells = ("<br>".join(names), spec.unit + (f" ({spec.when})" if spec.when else ""), spec.normal, spec.do)
        sections.setdefault(spec.section, []).append(f"|{'|'.join(cells)}|\n")
    head = "|metric|unit|normal|what to do|\n|---|---|---|---|\n"
    tables = (f"\n## {title}\n\n{head}{''.join(rows)}" for title, rows in sections.items())
    return METRICS_INTRODUCTION + "".join(tables)


def differences_table() -> str:
    """Return the table of defaults that are not OpenRLHF's, those first that change what a run trains."""
    commands: dict[tuple[bool, str, str, str, str], list[str]] = {}
    for one in DIFFERENCES:
        ours = _default(CONFIGS[one.command](), one.flag)
        cells = (not one.teaches, f"`--{one.flag}`", ours, f"`{one.theirs}`", one.reason)
        commands.setdefault(cells, []).append(f"`{one.command}`")
    flags: dict[tuple[bool, str, str, str, str], list[str]] = {}
    for (same, flag, ours, theirs, reason), used_by in sorted(commands.items()):
        flags.setdefault((same, ", ".join(used_by), ours, theirs, reason), []).append(flag)
    lines = ["| flag | of | here | OpenRLHF | changes training | why |", "|---|---|---|---|---|---|"]
    for (same, of, ours, theirs, reason), names in flags.items():
        lines.append(f"| {', '.join(names)} | {of} | {ours} | {theirs} | {'' if same else 'yes'} | {_cell(reason)} |")
    return "\n".join(lines) + "\n"


def _shared(rows: list[list[str]], *, but: list[str] | None = None) -> list[str]:
    """Return the rows that are equal for all commands, in the order of the first."""
    first, *others = rows
    return [row for row in first if all(row in own for own in others) and row not in (but or [])]


def _rows(config_class: type) -> list[str]:
    """Return a row per flag of a command."""
    rows = []
    for flag in dotted.leaf_types(config_class):
        effect = help_of(config_class, flag)
        rows.append(f"| `--{flag}` | {_default(config_class(), flag)} | {_cell(effect)} |\n")
    return rows


def _default(config: object, flag: str) -> str:
    value = dotted.get(config, flag)
    if isinstance(value, str):
        # The time in a run's default name.
        value = re.sub(r"_\d{4}T\d\d:\d\d$", "_TIME", value)
    shown = " ".join(map(str, value)) if isinstance(value, tuple) else str(value).replace("\n", "\\n")
    return f"`{shown}`" if shown else "none"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def main() -> None:
    """Write the pages."""
    METRICS_PAGE.write_text(metrics_page(), encoding="utf-8")
    FLAGS_PAGE.write_text(flags_page(), encoding="utf-8")
    before, _, rest = MIGRATING_PAGE.read_text(encoding="utf-8").partition(BEGIN)
    text = before + BEGIN + differences_table() + END + rest.partition(END)[2]
    MIGRATING_PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
