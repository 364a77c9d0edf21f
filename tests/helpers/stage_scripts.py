"""The shipped stage scripts: the commands that they would run, and the settings that those make."""

import os
import subprocess
import sys
from pathlib import Path

from lmm_r1.cli.arguments import parse
from lmm_r1.config import DPOConfig, KDConfig, PPOConfig, RMConfig, SFTConfig, resolve

SCRIPTS = Path(__file__).parents[2] / "examples" / "scripts"
STAGES = SCRIPTS / "lmm_r1"
TRAINERS = {
    "lmm_r1.cli.train_ppo_ray": PPOConfig,
    "lmm_r1.cli.train_sft": SFTConfig,
    "lmm_r1.cli.train_dpo": DPOConfig,
    "lmm_r1.cli.train_kd": KDConfig,
    "lmm_r1.cli.train_rm": RMConfig,
}


def printed_commands(script: Path, *flags: str, folder: Path, **variables: str) -> list[list[str]]:
    """Run a script with DRY_RUN=1 in an empty folder and return the commands it prints, argument by argument."""
    environment = {"PATH": os.environ["PATH"], "DRY_RUN": "1", "PYTHON": sys.executable} | variables
    done = subprocess.run(
        ["bash", str(script), *flags], cwd=folder, env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert list(folder.iterdir()) == []
    return [block.split("\n") for block in done.stdout.strip().split("\n\n")]


def trainer_config(command: list[str]) -> PPOConfig | SFTConfig | DPOConfig | RMConfig:
    """Return the resolved settings of a printed training command."""
    (module,) = (argument for argument in command if argument in TRAINERS)
    argv = command[command.index(module) + 1 :]
    return resolve(parse(TRAINERS[module], argv, prog=module, description=""))
