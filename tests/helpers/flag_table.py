"""The table of flags in docs/flags.md: what each is for, its default, and the test that sees its effect.

Another one in docs/migrating.md says which defaults are not OpenRLHF's. `python tests/helpers/flag_table.py` writes both,
with the repository in PYTHONPATH.
"""

import re
from pathlib import Path

import yaml

from lmm_r1 import dotted
from lmm_r1.cli.help_texts import attach_help, help_of
from lmm_r1.config import (
    DIFFERENCES,
    NOT_YET,
    DPOConfig,
    KDConfig,
    KTOConfig,
    PPOConfig,
    PRMConfig,
    RMConfig,
    SFTConfig,
)
from lmm_r1.config.differences import INSTEAD

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "flags.md"
COMMANDS: dict[str, type] = {
    "train_ppo_ray": PPOConfig,
    "train_sft": SFTConfig,
    "train_kd": KDConfig,
    "train_dpo": DPOConfig,
    "train_kto": KTOConfig,
    "train_prm": PRMConfig,
    "train_rm": RMConfig,
}
# The parts of flag_effects.yaml that are about a command, but for its own.
PARTS = {
    "train_ppo_ray": ("all",),
    "train_sft": ("all", "supervised"),
    "train_kd": ("all", "supervised", "train_sft"),
    "train_dpo": ("all", "supervised", "pairs"),
    "train_kto": ("all", "supervised"),
    "train_prm": ("all", "supervised"),
    "train_rm": ("all", "supervised", "pairs"),
}
BEGIN, END = "<!-- flags -->\n", "<!-- /flags -->\n"
DIFFERENCES_PAGE = ROOT / "docs" / "migrating.md"
DIFFERENCES_BEGIN, DIFFERENCES_END = "<!-- differences -->\n", "<!-- /differences -->\n"


def effects_of(command: str) -> dict[str, list[str]]:
    """The tests that stand for each flag of a command: `unit/rl/test_steps.py::a_name_without_test_`."""
    table = yaml.safe_load((ROOT / "tests" / "data" / "flag_effects.yaml").read_text(encoding="utf-8"))
    found: dict[str, list[str]] = {}
    for part in (*PARTS[command], command):
        for test, flags in table[part].items():
            for flag in flags:
                found.setdefault(flag, []).append(test)
    return found


def page() -> str:
    """What stands between the marks."""
    return "\n".join(f"## lmm-r1 {command}\n\n{_table(command)}" for command in COMMANDS)


def differences() -> str:
    """The table of defaults that are not OpenRLHF's, those first that change what a run trains."""
    commands: dict[tuple[bool, str, str, str, str], list[str]] = {}
    for one in DIFFERENCES:
        ours = _default(COMMANDS[one.command](), one.flag)
        cells = (not one.teaches, f"`--{one.flag}`", ours, f"`{one.theirs}`", one.reason)
        commands.setdefault(cells, []).append(f"`{one.command}`")
    lines = ["| flag | of | here | OpenRLHF | changes training | why |", "|---|---|---|---|---|---|"]
    for (same, flag, ours, theirs, reason), of in sorted(commands.items()):
        lines.append(f"| {flag} | {', '.join(of)} | {ours} | {theirs} | {'' if same else 'yes'} | {_cell(reason)} |")
    return "\n".join(lines) + "\n"


def _table(command: str) -> str:
    config_class = COMMANDS[command]
    attach_help(config_class)
    tests = effects_of(command)
    lines = ["| flag | default | effect | test |", "|---|---|---|---|"]
    for flag in dotted.leaf_types(config_class):
        said = help_of(config_class, flag)
        if flag in NOT_YET:
            said += f" **Any other value is refused**; {INSTEAD.get(flag, 'leave it out')}."
        named = "<br>".join(f"`{test}`" for test in tests.get(flag, []))
        lines.append(f"| `--{flag}` | {_default(config_class(), flag)} | {_cell(said)} | {named} |")
    return "\n".join(lines) + "\n"


def _default(config: object, flag: str) -> str:
    value = dotted.get(config, flag)
    if isinstance(value, str):
        # The time in a run's default name.
        value = re.sub(r"_\d{4}T\d\d:\d\d$", "_TIME", value)
    shown = " ".join(map(str, value)) if isinstance(value, tuple) else str(value).replace("\n", "\\n")
    return f"`{shown}`" if shown else "none"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _write(file: Path, text: str, *, begin: str, end: str) -> None:
    before, _, rest = file.read_text(encoding="utf-8").partition(begin)
    file.write_text(before + begin + text + end + rest.partition(end)[2], encoding="utf-8")


if __name__ == "__main__":
    _write(PAGE, page(), begin=BEGIN, end=END)
    _write(DIFFERENCES_PAGE, differences(), begin=DIFFERENCES_BEGIN, end=DIFFERENCES_END)
