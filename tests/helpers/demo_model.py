"""The demo's checkpoint, made by the demo's own commands in half a minute: one or two digits, a short cold start."""

import subprocess
from pathlib import Path

from helpers.warm_python import warm_python

COLD_START = Path(__file__).parents[2] / "examples/scripts/lmm_r1/configs/demo/cold_start.yaml"
STEPS = 100
DIGITS = ("--min_digits", "1", "--max_digits", "2", "--max_image_digits", "1", "--seed", "1")


def lmm_r1(command: str, *arguments: object) -> None:
    """Run a command to its end; raises CalledProcessError where it fails."""
    subprocess.run([warm_python(), "-m", f"lmm_r1.cli.{command}", *map(str, arguments)], check=True)


def build_demo(folder: Path) -> None:
    """Write `tiny`, `model` and the rows `text` and `image` into a folder."""
    lmm_r1("make_tiny_model", "--arch", "qwen2_5_vl", "--seed", 1, "--output", folder / "tiny")
    task = ("make_task", "digits", *DIGITS)
    lmm_r1(*task, "--modality", "mixed", "--solutions", "--rows", 32 * STEPS, "--output", folder / "solutions")
    for modality in ("text", "image"):
        lmm_r1(*task, "--modality", modality, "--split", "test", "--rows", 16, "--output", folder / modality)
    lmm_r1(
        "train_sft",
        *(
            "--config",
            COLD_START,
            "--model.model_name_or_path",
            folder / "tiny",
            "--data.dataset",
            folder / "solutions",
        ),
        *("--ckpt.output_dir", folder / "model", "--ckpt.disable_ds", "--train.max_steps", STEPS),
    )
