"""Saving and loading DeepSpeed checkpoints such that a run can be killed at any moment."""

from __future__ import annotations

import contextlib
import gc
import logging
import shutil
import socket
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from openrlhf.utils.deepspeed import DeepspeedStrategy

from lmm_r1.errors import UserError
from lmm_r1.files import atomic
from lmm_r1.host import checkpoint_folder
from lmm_r1.host.checkpoint_folder import ResumePoint, defect, resume_point, saving_name
from lmm_r1.host.optimizer import ADAMS, as_configured, masters, put_masters

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
                own = []
                if model.save_non_zero_checkpoint:
                    own.append(Path(model._get_ckpt_name(save_dir, saving_name(tag))))
                if model.save_zero_checkpoint:
                    own.append(Path(model._get_zero_ckpt_name(save_dir, saving_name(tag))))
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
        checkpoint_folder.evict(folder, saved=tag, max_num=max_num, max_mem=max_mem)

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
        folder = Path(load_dir)
        tag = tag or self.resume_tag or self._agreed_tag(folder)
        if tag is None:
            return None, {}
        lack = defect(folder, tag)
        if lack is not None:
            raise UserError(
                f"--ckpt.path {load_dir}: {tag} cannot be loaded on {socket.gethostname()}: {lack}; "
                "all machines of a run must share this folder"
            )
        self.loaded_tag = tag
        with as_configured(model):
            if self.use_ds_universal_ckpt or saved_layout(folder / tag) != own_layout(model):
                return str(folder / tag), load_resharded(model, folder / tag)
            settings = (load_module_strict, load_optimizer_states, load_lr_scheduler_states, load_module_only)
            return super().load_ckpt(model, load_dir, tag, *settings)

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


_MASTER, _MOMENTS = "fp32", ("exp_avg", "exp_avg_sq")


def saved_layout(folder: Path) -> tuple[bool, int]:
    """Return whether ZeRO-3 has saved a checkpoint, and the number of ranks that have; 0 for ZeRO-0."""
    return not (folder / "mp_rank_00_model_states.pt").is_file(), len(list(folder.glob("*_optim_states.pt")))


def own_layout(engine: Any) -> tuple[bool, int]:
    """Return the `saved_layout` of what an engine saves."""
    stage = engine.zero_optimization_stage()
    return stage == 3, dist.get_world_size() if stage else 0


def load_resharded(engine: Any, folder: Path) -> dict[str, object]:
    """Load what any number of ranks with ZeRO-1, 2 or 3 have saved, and return the run's states in it.

    Every rank must call it. Frozen weights stay as they are. Raises UserError for another optimizer than AdamW.
    """
    load = partial(torch.load, map_location="cpu", mmap=True, weights_only=False)
    common = load(sorted(folder.glob("*_model_states.pt"))[0])
    (sharded, ranks), inner = saved_layout(folder), engine.basic_optimizer
    files = [file for rank in range(ranks) for file in folder.glob(f"*zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")]
    saved = [load(file)["optimizer_state_dict"] for file in files]
    flats = [shard["fp32_flat_groups" if sharded else "single_partition_of_fp32_groups"] for shard in saved]
    states = [shard["optimizer_state_dict" if sharded else "base_optimizer_state"]["state"] for shard in saved]
    known = type(inner) in ADAMS and own_layout(engine)[1] and 0 < len(files) == ranks
    if not known or any(key not in state for rank in states for state in rank.values() for key in _MOMENTS):
        raise UserError(
            f"{folder}: another number of GPUs or another --ds.zero_stage can load only AdamW's state with ZeRO-1, 2 or 3, and "
            "without tensor parallelism; take as many GPUs as before and their stage"
        )
    # A policy that was not trained yet has none.
    keys = (_MASTER, *_MOMENTS) if states[0] else (_MASTER,)
    parts: dict[tuple[str, str], list[torch.Tensor]] = defaultdict(list)
    for rank, groups in enumerate(flats):
        for group, name, start, length, _ in _places(common["param_shapes"], groups, (sharded, ranks), rank=rank):
            for key in keys:
                flat = groups[group] if key == _MASTER else states[rank][group][key]
                parts[name, key].append(flat[start : start + length])
    own = [{_MASTER: master} | {key: torch.zeros_like(master) for key in keys[1:]} for master in masters(engine)]
    places = _places(engine._get_zero_param_shapes(), masters(engine), own_layout(engine), rank=dist.get_rank())
    for group, name, start, length, offset in places:
        for key, flat in own[group].items():
            flat.data[start : start + length] = torch.cat(parts[name, key])[offset : offset + length]
    for state in own if states[0] else ():
        inner.state[state.pop(_MASTER)] = {**state, "step": states[0][0]["step"]}
    put_masters(engine, masters(engine))
    engine.optimizer.loss_scaler = saved[0]["loss_scaler"]
    engine.lr_scheduler.load_state_dict(common["lr_scheduler"])
    for counter in ("global_steps", "global_samples", "skipped_steps"):
        setattr(engine, counter, common[counter])
    return {name: value for name, value in common.items() if name != "module"}


def _places(
    shapes: Any, flats: Sequence[torch.Tensor], layout: tuple[bool, int], *, rank: int
) -> Iterator[tuple[int, str, int, int, int]]:
    """Yield group and name of each weight of which a rank has a part, and of that its start, length, and start in the weight.

    ZeRO-3 splits each weight, ZeRO-1 and 2 what a group's weights are one after another.

    Args:
        shapes: of the weights, by name, by group.
        flats: what the rank has of each group.
    """
    sharded, ranks = layout
    for group, (weights, flat) in enumerate(zip(shapes, flats, strict=True)):
        at = 0 if sharded else -rank * flat.numel()
        for name, shape in weights.items():
            size = -(-shape.numel() // ranks) if sharded else shape.numel()
            offset = rank * size if sharded else max(0, -at)
            start = max(0, at)
            length = min(size, shape.numel() - offset, flat.numel() - start)
            if length > 0:
                yield group, name, start, length, offset
            at += size
