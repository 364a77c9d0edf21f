"""A finished run's model on the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from lmm_r1 import hub
from lmm_r1.config import PPOConfig, SupervisedConfig
from lmm_r1.models.adapters import ADAPTER_FOLDER
from lmm_r1.records.run_folder import RunFolder
from lmm_r1.trainer.moving_average import EMA_FOLDER
from lmm_r1.trainer.stopping import ERROR_FILE

FLAG = "--ckpt.push_to_hub"
# Of weights, configs, tokenizers and chat templates.
_SUFFIXES = (".safetensors", ".json", ".jinja", ".txt", ".model", ".bin")


def publish(config: PPOConfig | SupervisedConfig, folder: Path) -> None:
    """Upload the model of a finished run where `--ckpt.push_to_hub` names a repository, and say where it is.

    Raises UserError, with the command that does it by hand, where it cannot be uploaded.
    """
    repo = config.ckpt.push_to_hub
    if repo is None:
        return
    console = Console(highlight=False, markup=False, soft_wrap=True)
    averaged = isinstance(config, PPOConfig) and config.train.enable_ema
    files = model_files(folder, averaged=averaged)
    console.print(f"uploading {len(files)} files to {repo} ...")
    console.print(f"the model is at {hub.upload(folder, repo, private=True, flag=FLAG, files=files)}")


def model_files(folder: Path, *, averaged: bool = False) -> list[str]:
    """Return the files of a run folder that are the model's: neither records, which hold rows, nor checkpoints.

    Args:
        averaged: with the moving average of its weights, a model in a folder of its own.
    """
    records = {path.name for path in RunFolder.files(folder)} | {ERROR_FILE}
    own = [path for path in folder.iterdir() if path.is_file() and path.name not in records]
    adapter = (folder / ADAPTER_FOLDER).glob("*")
    # Of a run with adapters it has one of its own.
    average = (folder / EMA_FOLDER).rglob("*") if averaged else ()
    return sorted(str(path.relative_to(folder)) for path in (*own, *adapter, *average) if path.suffix in _SUFFIXES)
