"""What must be quick to import loads none of the training stack; measured in fresh interpreters."""

import json
import subprocess
import sys

import pytest

from lmm_r1.cli import COMMANDS

pytestmark = pytest.mark.unit

HEAVY = ("ray", "vllm", "deepspeed", "openrlhf", "torch", "transformers")
SHOW_LOADED = f"import json, sys; print(json.dumps([name for name in {HEAVY!r} if name in sys.modules]))"


def heavy_modules_after(statements: str) -> list[str]:
    """Return which of HEAVY a fresh interpreter has loaded after running the statements."""
    done = subprocess.run(
        [sys.executable, "-c", f"{statements}\n{SHOW_LOADED}"], capture_output=True, text=True, timeout=60, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    "module", ["lmm_r1", "lmm_r1.agents", "lmm_r1.config", "lmm_r1.data", "lmm_r1.tasks", "remote_rm"]
)
def test_a_light_package_and_all_its_modules_load_none_of_the_training_stack(module):
    walk = (
        f"import importlib, pkgutil, {module} as package\n"
        "for found in pkgutil.walk_packages(package.__path__, package.__name__ + '.'):\n"
        "    importlib.import_module(found.name)\n"
    )
    assert heavy_modules_after(f"import {module}" if module == "lmm_r1" else walk) == []


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_a_command_loads_none_of_the_training_stack(command):
    show_help = (
        "from lmm_r1.cli import main\n"
        "try:\n"
        f"    main([{command!r}, '--help'])\n"
        "except SystemExit as stopped:\n"
        "    assert stopped.code == 0, stopped.code\n"
    )
    assert heavy_modules_after(show_help) == []


@pytest.mark.parametrize(
    "command", ["train_ppo_ray", "train_sft", "train_kd", "train_dpo", "train_kto", "train_prm", "train_rm"]
)
def test_a_refused_flag_loads_none_of_the_training_stack(command):
    refuse = f"from lmm_r1.cli import main\ntry:\n    main([{command!r}, '--zzz'])\nexcept SystemExit:\n    pass\n"
    assert heavy_modules_after(refuse) == []
