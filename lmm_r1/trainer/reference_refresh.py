"""The reference of an RL run follows the policy: every so many steps it takes the policy's weights, by way of a file."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist

from lmm_r1.checkpoints.folder import REFERENCE_FOLDER
from lmm_r1.errors import UserError
from lmm_r1.files.full_disk import writing
from lmm_r1.models.actor import KitActor
from lmm_r1.models.adapters import merged_state_dict
from lmm_r1.trainer.strategy import whole_state_dict

_NAME = re.compile(r"step(\d+)\.pt")


def reference_file(checkpoints: Path, step: int) -> Path:
    """Return where the weights are that the policy had after a step."""
    return checkpoints / REFERENCE_FOLDER / f"step{step}.pt"


def write_reference(policy: KitActor, file: Path) -> None:
    """Write the policy's weights, adapters merged, under the names of the bare model; every rank must call it.

    The file is there whole or not at all. Raises UserError where the disk is full.
    """
    engine = policy.model
    weights = whole_state_dict(engine)
    if dist.get_rank() == 0:
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_name(f".{file.name}.partial")
        # Of weights that are views of one buffer, saving would write all of it.
        merged = {
            name: value.detach().cpu().clone() for name, value in merged_state_dict(engine.module, weights).items()
        }
        try:
            with writing(file), partial.open("wb") as stream:
                torch.save(merged, stream)
                stream.flush()
                os.fsync(stream.fileno())
            partial.replace(file)
        finally:
            partial.unlink(missing_ok=True)
    dist.barrier()


@torch.no_grad()
def load_reference(reference: KitActor, file: Path) -> None:
    """Put a file's weights in the place of the reference's; every rank must call it.

    Raises UserError where the file is not there.
    """
    if not file.is_file():
        raise UserError(
            f"{file}: the reference that the stopped run had (--ref.refresh_steps) is not there; all machines of a run must "
            "share --ckpt.path. Put it back, or train anew with --ckpt.overwrite"
        )
    weights = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    for name, parameter in reference.model.module.named_parameters():
        assert name in weights, f"the policy has no {name}, and the reference is the same model"
        # With ZeRO-3 rank 0 has the weight whole, and gives all ranks their parts of what it becomes.
        sharded = hasattr(parameter, "ds_id")
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0, enabled=sharded):
            if not sharded or dist.get_rank() == 0:
                parameter.data.copy_(weights[name])
    reference.forget_features()
    dist.barrier()


def drop_references(checkpoints: Path, *, steps: Iterable[int], kept: Collection[int]) -> None:
    """Delete the files that no checkpoint goes on with: those are the newest at each of their steps.

    Args:
        steps: of the run's checkpoints.
        kept: steps whose files stay: a checkpoint with them may be saved yet.
    """
    folder = checkpoints / REFERENCE_FOLDER
    found = {int(match[1]): path for path in folder.glob("*.pt") if (match := _NAME.fullmatch(path.name))}
    needed = {max((step for step in found if step <= at), default=0) for at in steps} | set(kept)
    for step, path in found.items():
        if step not in needed:
            path.unlink()
