"""Builds docs/metrics.md, the table of other defaults in docs/migrating.md, and the site's page of each trainer's flags.

`python docs/flags_page.py` writes the first two, docs/site.py the others. Help texts are the docstrings in
`lmm_r1/config/`, and metrics are those of `lmm_r1/tools/report/metrics.yaml`.
"""

import importlib
import re
from pathlib import Path

from lmm_r1 import cli, dotted
from lmm_r1.cli.arguments import help_of, value_name
from lmm_r1.config import DIFFERENCES
from lmm_r1.tools.report.curves import METRICS

DOCS = Path(__file__).resolve().parent
METRICS_PAGE, MIGRATING_PAGE = DOCS / "metrics.md", DOCS / "migrating.md"
BEGIN, END = "<!-- differences -->\n", "<!-- /differences -->\n"
# By command, RL first.
CONFIGS: dict[str, type] = {
    name: importlib.import_module(f"lmm_r1.cli.{name}").CONFIG for name in cli.COMMANDS if name.startswith("train_")
}
FLAGS_INTRODUCTION = """\
# {command}

`lmm-r1 {command} --help-all` prints the same texts.
"""
METRICS_INTRODUCTION = """\
# Metrics

What a training logs in `metrics.jsonl` and in [trackers](loggers.md). Bold: the chart of `lmm-r1 report`. `*` stands for any
text. Other names are [parts of your reward](reward_parts.md).

`make docs` builds this page from `lmm_r1/tools/report/metrics.yaml`: edit that.
"""


def flags_page(command: str) -> str:
    """Return the page of a command's flags: a heading for each first word, and below it one for each flag."""
    config_class = CONFIGS[command]
    groups: dict[str, list[str]] = {}
    for flag, hint in dotted.leaf_types(config_class).items():
        first, dot, _ = flag.partition(".")
        title = f"{first}: {help_of(config_class, first).rstrip('.')}" if dot else "Without a group"
        # A code span for each choice, so that lines break between them.
        kind = ", ".join(f"`{name}`" for name in value_name(hint).strip("{}").split(",") if name) or "switch"
        effect = " ".join(help_of(config_class, flag).split())
        entry = f"### `--{flag}` {{#{flag}}}\n\n{effect} ({kind}; default {_default(config_class(), flag)})\n"
        groups.setdefault(title, []).append(entry)
    sections = ["\n".join((f"## {title}\n", *entries)) for title, entries in groups.items()]
    return "\n".join((FLAGS_INTRODUCTION.format(command=command), *sections))


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
        flags.setdefault((same, "<br>".join(used_by), ours, theirs, reason), []).append(flag)
    lines = ["| flag | of | here, OpenRLHF | changes training | why |", "|---|---|---|---|---|"]
    for (same, of, ours, theirs, reason), names in flags.items():
        shown = " ".join(reason.split()).replace("|", "\\|")
        lines.append(f"| {'<br>'.join(names)} | {of} | {ours}<br>{theirs} | {'' if same else 'yes'} | {shown} |")
    return "\n".join(lines) + "\n"


def _default(config: object, flag: str) -> str:
    value = dotted.get(config, flag)
    if isinstance(value, str):
        # The time in a run's default name.
        value = re.sub(r"_\d{4}T\d\d:\d\d$", "_TIME", value)
    shown = " ".join(map(str, value)) if isinstance(value, tuple) else str(value).replace("\n", "\\n")
    return f"`{shown}`" if shown else "none"


def main() -> None:
    """Write the pages."""
    METRICS_PAGE.write_text(metrics_page(), encoding="utf-8")
    before, _, rest = MIGRATING_PAGE.read_text(encoding="utf-8").partition(BEGIN)
    text = before + BEGIN + differences_table() + END + rest.partition(END)[2]
    MIGRATING_PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
