"""The final model of a run, and the moving average of its weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console

from lmm_r1 import hub
from lmm_r1.config import PPOConfig, SupervisedConfig
from lmm_r1.errors import UserError
from lmm_r1.host.checkpoints import own_layout, saved_layout
from lmm_r1.host.models import DeepSpeedEngine, GatheredParameters
from lmm_r1.host.optimizer import masters, put_masters
from lmm_r1.models.adapters import ADAPTER_FOLDER, adapted_layers, merged_as, merged_layer
from lmm_r1.records.run_folder import RunFolder
from lmm_r1.train.stopping import ERROR_FILE

EMA_FOLDER = "ema"
"""The folder next to a model's files with the same model with averaged weights."""


class MovingAverage:
    """The average of the master weights of this rank, in host memory: 4 bytes for each weight of its share.

    OpenRLHF averages a second model in the precision of the passes, where bf16 loses updates below 1/256 of a weight.
    Weights that are not trained have no master weights and do not change. Of layers with adapters, rank 0 averages the
    merged weights: a product of averages is not the average of products.
    """

    def __init__(self, engine: DeepSpeedEngine, *, beta: float) -> None:
        """Args:
        engine: with ZeRO-1, 2 or 3; the average begins with its weights.
        beta: the share of the old average in the new one.
        """
        self._engine = engine
        self._beta = beta
        self._average = [_in_host(part) for part in self._parts()]

    @torch.no_grad()
    def update(self) -> None:
        """Include the weights after an optimizer step: average = beta average + (1 - beta) weights."""
        for average, part in zip(self._average, self._parts(), strict=True):
            average.lerp_(part.detach().to(average.device, average.dtype), 1 - self._beta)

    def _parts(self) -> Iterator[torch.Tensor]:
        """Yield what this rank averages; every rank must take all of it."""
        yield from masters(self._engine)
        for layer in adapted_layers(self._engine.module).values():
            # Without ZeRO-3 the weights are whole, and this does nothing.
            with GatheredParameters(list(layer.parameters())):
                merged = merged_layer(layer)
            if dist.get_rank() == 0:
                yield merged

    @contextmanager
    def in_weights(self) -> Iterator[None]:
        """Give the model the averaged weights during the block; every rank must enter it, without updates inside."""
        own = [_in_host(part) for part in masters(self._engine)]
        put_masters(self._engine, self._average[: len(own)])
        merged = dict(zip(adapted_layers(self._engine.module), self._average[len(own) :], strict=False))
        try:
            with merged_as(self._engine.module, merged):
                yield
        finally:
            # The weights of passes are the rounded master weights, so this restores them exactly.
            put_masters(self._engine, own)

    def save(self, folder: Path) -> Path:
        """Write this rank's part next to its shards of a checkpoint, and return the file."""
        file = folder / _file_name()
        torch.save(self._average, file)
        return file

    def load(self, folder: Path) -> None:
        """Continue from the part that `save` wrote; raises UserError if this rank has none."""
        file = folder / _file_name()
        saved = torch.load(file, map_location="cpu", weights_only=True) if file.is_file() else []
        if len(saved) != len(self._average) or saved_layout(folder) != own_layout(self._engine):
            raise UserError(
                f"{file}: the checkpoint holds no moving average of this rank's weights (--train.enable_ema); go on with as "
                "many ranks as saved it and their --ds.zero_stage, or train anew with --ckpt.overwrite"
            )
        self._average = saved


def _in_host(part: torch.Tensor) -> torch.Tensor:
    return part.detach().to("cpu", torch.float, copy=True)


def _file_name() -> str:
    return f"ema_rank_{dist.get_rank()}.pt"


FLAG = "--ckpt.push_to_hub"
# The files of weights, configs, tokenizers and chat templates.
_SUFFIXES = (".safetensors", ".json", ".jinja", ".txt", ".model", ".bin")


def publish(config: PPOConfig | SupervisedConfig, folder: Path) -> None:
    """Upload the model of a finished run, if `--ckpt.push_to_hub` names a repository, and print where it is.

    Raises UserError, with the command to upload it by hand, if the upload fails.
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
    """Return the model's files in a run folder: neither records, which hold rows, nor checkpoints.

    Args:
        averaged: whether to include the model with averaged weights, in its own folder.
    """
    records = {path.name for path in RunFolder.files(folder)} | {ERROR_FILE}
    own = [path for path in folder.iterdir() if path.is_file() and path.name not in records]
    adapter = (folder / ADAPTER_FOLDER).glob("*")
    average = (folder / EMA_FOLDER).rglob("*") if averaged else ()
    return sorted(str(path.relative_to(folder)) for path in (*own, *adapter, *average) if path.suffix in _SUFFIXES)
