"""Saving and loading DeepSpeed checkpoints such that a run can be killed at any moment."""

from __future__ import annotations

import contextlib
import gc
import logging
import shutil
import socket
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import deepspeed
import torch.distributed as dist
from openrlhf.utils.deepspeed import DeepspeedStrategy

from lmm_r1.errors import UserError
from lmm_r1.files import atomic
from lmm_r1.host import checkpoint_folder
from lmm_r1.host.checkpoint_folder import ResumePoint, defect, resume_point, saving_name

logger = logging.getLogger(__name__)


class CheckpointStrategy(DeepspeedStrategy):
    """OpenRLHF's strategy, which saves a checkpoint before it deletes another, and resumes only from complete ones.

    All ranks must see the same folder of checkpoints, in which renaming is atomic.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # A run's workers get copies of one strategy, so this is the same in all that they save together.
        self.session = uuid.uuid4().hex
        self.resume_tag: str | None = None
        """The checkpoint that all models of a run load; None lets `load_ckpt` find one in its own folder."""
        self.loaded_tag: str | None = None
        """The checkpoint that `load_ckpt` has loaded last."""
        self._settles = True
        self.write_beside: Callable[[Path], Path] | None = None
        """Writes a file of this rank, with a name of its own, into a checkpoint that is being saved."""

    def resume_from(self, tag: str | None) -> None:
        """Let all models of a run load this checkpoint; None lets them load none."""
        self.resume_tag = tag
        self.args.ckpt.load_enable = tag is not None

    def save_ckpt(
        self,
        model: Any,
        save_dir: str,
        tag: str | None = None,
        max_num: int = 3,
        max_mem: float = 1000,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        metric_value: float | None = None,
        metric_key: str | None = None,
    ) -> None:
        """Save a checkpoint, let `latest` name it, then delete others down to the limits; every rank must call it.

        Raises ValueError for a tag that is not like global_step12, and UserError if the ranks do not share the folder or
        its disk is full.

        Args:
            max_mem: GiB that all checkpoints in the folder may take.
            save_latest: if False, the checkpoint is complete, but nothing else changes until `settle_ckpt` is called.
        """
        assert isinstance(model, deepspeed.DeepSpeedEngine)
        tag = tag or f"global_step{model.global_steps}"
        folder = Path(save_dir)
        if self.is_rank_0():
            checkpoint_folder.begin(folder, tag)
        dist.barrier()
        try:
            with atomic.writing(folder):
                model.save_checkpoint(
                    save_dir, tag=saving_name(tag), client_state=client_state or {}, save_latest=False
                )
                own = _own_shards(model, folder, tag)
                if self.write_beside is not None:
                    own.append(self.write_beside(folder / saving_name(tag)))
                written = {file.name: checkpoint_folder.flush(file) for file in own}
        except UserError:
            # An unfinished save would take disk space that is needed.
            shutil.rmtree(folder / saving_name(tag), ignore_errors=True)
            raise
        shards: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(shards, written)
        if self.is_rank_0():
            self._write_ckpt_metric(str(folder / saving_name(tag)), metric_value, metric_key=metric_key)
            files = {name: size for rank in shards for name, size in rank.items()}
            checkpoint_folder.mark_complete(folder, tag, files=files, session=self.session)
        dist.barrier()
        if save_latest and self._settles:
            self.settle_ckpt(save_dir, tag, max_num, max_mem)
        gc.collect()

    def settle_ckpt(self, save_dir: str, tag: str, max_num: int, max_mem: float) -> None:
        """Let `latest` name a saved checkpoint, then delete others down to the limits."""
        if not self.is_rank_0():
            return
        folder = Path(save_dir)
        checkpoint_folder.write_latest(folder, tag)
        for line in checkpoint_folder.evict(folder, saved=tag, max_num=max_num, max_mem=max_mem):
            self.print(line)

    @contextlib.contextmanager
    def unsettled(self) -> Iterator[None]:
        """Let saves in the block leave `latest` and other checkpoints unchanged: models of a run are settled together."""
        self._settles = False
        try:
            yield
        finally:
            self._settles = True

    def load_ckpt(
        self,
        model: Any,
        load_dir: str,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
    ) -> tuple[str | None, dict[str, Any]]:
        """Load a checkpoint and return its path and the run's states, (None, {}) if none is complete.

        Every rank must call it, and all load the same one: `tag`, or the run's `resume_tag`, or what rank 0 finds.
        Raises UserError if a rank does not see it.
        """
        # A universal checkpoint has files of its own, one of which names it.
        if not self.use_ds_universal_ckpt:
            tag = tag or self.resume_tag or self._agreed_tag(Path(load_dir))
            if tag is None:
                return None, {}
            lack = defect(Path(load_dir), tag)
            if lack is not None:
                raise UserError(
                    f"--ckpt.path {load_dir}: {tag} cannot be loaded on {socket.gethostname()}: {lack}; "
                    "all machines of a run must share this folder"
                )
        self.loaded_tag = tag
        return super().load_ckpt(
            model, load_dir, tag, load_module_strict, load_optimizer_states, load_lr_scheduler_states, load_module_only
        )

    def _agreed_tag(self, folder: Path) -> str | None:
        tags: list[str | None] = [None]
        if self.is_rank_0():
            point = resume_point([folder])
            warn_of_passed_over(point)
            tags = [point.tag]
        dist.broadcast_object_list(tags)
        return tags[0]


def warn_of_passed_over(point: ResumePoint) -> None:
    """Warn once about the checkpoints from which a run should have resumed and cannot."""
    if point.passed_over:
        start = "starts anew" if point.tag is None else f"goes on from {point.tag}"
        logger.warning("the run %s; passed over: %s", start, "; ".join(point.passed_over))


def _own_shards(engine: Any, folder: Path, tag: str) -> list[Path]:
    """Return the files of a save that this rank has written."""
    names = []
    if engine.save_non_zero_checkpoint:
        names.append(engine._get_ckpt_name(str(folder), saving_name(tag)))
    if engine.save_zero_checkpoint:
        names.append(engine._get_zero_ckpt_name(str(folder), saving_name(tag)))
    return [Path(name) for name in names]
