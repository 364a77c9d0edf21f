"""Which tests see the effect of a flag: tests/data/flag_effects.yaml, and the config classes by command."""

import sys
from pathlib import Path

import yaml

sys.path.append(str(Path(__file__).resolve().parents[2] / "docs"))

from flags_page import CONFIGS

ROOT = Path(__file__).resolve().parents[2]
# The parts of flag_effects.yaml that apply to a command, besides its own.
PARTS = {
    "train_ppo_ray": ("all",),
    "train_sft": ("all", "supervised"),
    "train_kd": ("all", "supervised", "train_sft"),
    "train_dpo": ("all", "supervised", "pairs"),
    "train_kto": ("all", "supervised"),
    "train_prm": ("all", "supervised"),
    "train_rm": ("all", "supervised", "pairs"),
}
assert PARTS.keys() == CONFIGS.keys()


def effects_of(command: str) -> dict[str, list[str]]:
    """Return the tests of each flag of a command: `unit/rl/test_steps.py::a_name_without_test_`."""
    parts = yaml.safe_load((ROOT / "tests" / "data" / "flag_effects.yaml").read_text(encoding="utf-8"))
    found: dict[str, list[str]] = {}
    for part in (*PARTS[command], command):
        for test, flags in parts[part].items():
            for flag in flags:
                found.setdefault(flag, []).append(test)
    return found
