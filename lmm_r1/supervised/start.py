"""A supervised run from its flags to its model: checks, the process group, the run's folder and the loop."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from rich.console import Console

from lmm_r1.config import KDConfig, SupervisedConfig, sized_supervised
from lmm_r1.data.messages import Row
from lmm_r1.data.training_rows import AnyRow, KeptRows
from lmm_r1.errors import UserError
from lmm_r1.host.strategy import KitStrategy, default_to_one_process, leave_group, make_strategy
from lmm_r1.lifecycle.publication import publish
from lmm_r1.lifecycle.start import Fingerprint, check_start, open_run
from lmm_r1.lifecycle.stopping import StopRequests, reported_ends
from lmm_r1.lmm_kits import Checkpoint
from lmm_r1.lmm_kits.checkpoint import (
    ImageFitting,
    check_embeddings,
    check_images_taken,
    check_pixel_bounds,
    check_weights,
)
from lmm_r1.models.image_features import share_features
from lmm_r1.models.load_balancing import check_balanced
from lmm_r1.models.packed.sequence_parallel import check_heads
from lmm_r1.models.rope_scaling import check_rope, tell_factors
from lmm_r1.planning.choices import planned_supervised
from lmm_r1.records.metrics import NO_CALLBACKS, Callbacks
from lmm_r1.records.run_folder import RunFolder
from lmm_r1.records.tracker_backends import open_trackers
from lmm_r1.records.trackers import Trackers
from lmm_r1.supervised import SampleEncoder, chat_template, first_fitting, updates_per_epoch
from lmm_r1.supervised.loop import SupervisedRun
from lmm_r1.supervised.models import ConfigT, SupervisedSession, model_path


def train(
    run_class: type[SupervisedRun[ConfigT, Any, Any, Any]], config: ConfigT, *, callbacks: Callbacks = NO_CALLBACKS
) -> None:
    """Train on `--data.dataset` and write the model to `--ckpt.output_dir`; raises UserError for wrong flags or rows."""
    checkpoint = _opened(config)
    check_pixel_bounds(config.data, checkpoint, model=_model(checkpoint), prefix="--data.")
    encode = run_class.encoder.of(config, kit=checkpoint.kit, processor=checkpoint.processor)
    fitting = _image_fitting(config, checkpoint)
    check = partial(_checked_row, run_class, checkpoint, encode, fitting)
    rows, held_out = run_class.training_rows(config, check=check), run_class.evaluation_rows(config, check=check)
    default_to_one_process()
    if told := fitting.told(prefix="--data.") if fitting else None:
        Console(highlight=False, markup=False, soft_wrap=True, quiet=os.environ["RANK"] != "0").print(told)
    config = _sized(config, rows=len(rows))
    shown = run_class.conversations(rows)
    run_class.check(config, checkpoint, shown + run_class.conversations(held_out))
    filler = first_fitting(config, rows, encode).filler
    every = KeptRows.blended((), [rows, held_out])
    with session(run_class, config, checkpoint, rows=rows, shown=shown, every=every, callbacks=callbacks) as begun:
        run = run_class.of(begun, rows=rows, encode=encode, filler=filler)
        if held_out:
            run.evaluate_on(held_out)
        run.train(steps=begun.steps)


def _sized(config: ConfigT, *, rows: int) -> ConfigT:
    """Return the settings with the sizes that were left open; rank 0 prints them."""
    sized, told = sized_supervised(config, rows=rows, processes=int(os.environ["WORLD_SIZE"]))
    if told is not None:
        Console(highlight=False, soft_wrap=True, quiet=os.environ["RANK"] != "0").print(told)
    return sized


def _opened(config: SupervisedConfig) -> Checkpoint:
    """Return the checkpoint that the run trains; raises UserError if it cannot be trained with these flags."""
    path = model_path(config)
    checkpoint = Checkpoint(
        path, trust_remote_code=config.train.trust_remote_code, chat_template=chat_template(config)
    )
    model = _model(checkpoint)
    # Missing parts of a checkpoint are reported in this order: kit, processor, weights.
    _ = checkpoint.kit, checkpoint.processor
    check_weights(path)
    check_embeddings(checkpoint)
    check_heads(checkpoint.config, size=config.ds.ulysses_size, model=model)
    coef = config.model.aux_loss_coef
    check_balanced(checkpoint.config, kit=checkpoint.kit, coef=coef, flag="model.aux_loss_coef", model=model)
    check_rope(checkpoint.config, model=model)
    return checkpoint


def _image_fitting(config: SupervisedConfig, checkpoint: Checkpoint) -> ImageFitting | None:
    """Return what scales images of rows that are too long by them, with room for a student's own response."""
    wanted = config.rollout.max_new_tokens if isinstance(config, KDConfig) and config.rollout.on_policy_share else 0
    fitting = ImageFitting(checkpoint=checkpoint, max_len=config.data.max_len, least=0, wanted=wanted)
    return fitting if config.data.overlong_images == "scale" else None


def _checked_row(
    run_class: type[SupervisedRun[Any, Any, Any, Any]],
    checkpoint: Checkpoint,
    encode: SampleEncoder,
    fitting: ImageFitting | None,
    row: AnyRow,
) -> AnyRow:
    check_images_taken(run_class.conversations([row]), kit=checkpoint.kit, model=_model(checkpoint))
    return encode.check(row, fitting)


def _model(checkpoint: Checkpoint) -> str:
    return f"--model.model_name_or_path {checkpoint.path}"


@contextmanager
def session(
    run_class: type[SupervisedRun[ConfigT, Any, Any, Any]],
    config: ConfigT,
    checkpoint: Checkpoint,
    *,
    rows: Sequence[AnyRow],
    shown: Sequence[Row],
    every: KeptRows[Any] | None = None,
    callbacks: Callbacks = NO_CALLBACKS,
) -> Iterator[SupervisedSession[ConfigT]]:
    """Start a run's processes and its folder, and finish both after the block.

    Raises UserError, before anything is written, for a run that must not begin; RunStopped and UserError if it ends early.

    Args:
        rows: the training rows.
        shown: conversations of the rows; the plan uses one with an image.
        every: the origins of all rows, including held-out ones, and the rows that were left out.
    """
    every = KeptRows() if every is None else every
    folder = RunFolder(
        path=Path(config.ckpt.output_dir),
        name=config.logger.stage_name,
        kind=run_class.kind,
        origins=every.origins,
        callbacks=callbacks,
    )
    _check_processes(config, count=int(os.environ["WORLD_SIZE"]))
    fingerprint = Fingerprint.of(config, models=run_class.models(config), rows={"data.dataset": rows})
    config = _planned(config, shown)
    check_start(config, fingerprint)
    tell_factors(checkpoint.config, max_len=config.data.max_len, flag="--data.max_len")
    # One process acts for all ranks, which end together.
    is_first = os.environ["RANK"] == "0"
    with (
        StopRequests() as stops,
        folder.locked() if is_first else nullcontext(),
        reported_ends(stops, folder=folder.path),
        _joined(config) as strategy,
    ):
        if dist.get_world_size() > 1:
            share_features(f"{os.environ['MASTER_ADDR']} {os.environ['MASTER_PORT']}")
        resumed = False
        if strategy.is_rank_0():
            resumed = open_run(config, fingerprint, folder=folder)
            folder.left_out(every.left_out)
        # The folder must be ready for all ranks.
        dist.barrier()
        steps = updates_per_epoch(len(rows), config.train.batch_size) * config.train.max_epochs
        if config.train.max_steps > 0:
            steps = min(steps, config.train.max_steps)
        trackers = open_trackers(config, folder=folder.path, resumed=resumed) if strategy.is_rank_0() else Trackers()
        kept = folder.session() if strategy.is_rank_0() else nullcontext()
        console = Console(highlight=False, markup=False, soft_wrap=True, quiet=not strategy.is_rank_0())
        console.print(f"{folder.name}: {len(rows)} rows, loading {checkpoint.path} ...")
        with kept:
            with trackers:
                yield SupervisedSession(
                    config=config,
                    checkpoint=checkpoint,
                    strategy=strategy,
                    folder=folder,
                    stops=stops,
                    trackers=trackers,
                    steps=steps,
                )
            if strategy.is_rank_0():
                console.print(folder.finish(steps=steps if folder.ended_at is None else folder.ended_at))
        first = strategy.is_rank_0()
        # Every rank continues only after the run is finished.
        dist.barrier()
    if first:
        publish(config, folder.path)


@contextmanager
def _joined(config: SupervisedConfig) -> Iterator[KitStrategy]:
    strategy = make_strategy(config)
    strategy.setup_distributed()
    try:
        yield strategy
    except BaseException:
        leave_group(failed=True)
        raise
    leave_group()


def _check_processes(config: SupervisedConfig, *, count: int) -> None:
    size = config.ds.ulysses_size
    if count % size:
        raise UserError(f"--ds.ulysses_size {size} does not divide the {count} processes of this run")


def _planned(config: ConfigT, rows: Sequence[Row]) -> ConfigT:
    """Return the settings that fit into memory, the same on every rank; rank 0 prints the estimate.

    Raises UserError, on every rank, for a run that cannot fit.
    """
    processes = int(os.environ["WORLD_SIZE"])
    console = Console(highlight=False, quiet=os.environ["RANK"] != "0")
    per_machine = int(os.environ.get("LOCAL_WORLD_SIZE", processes))
    return planned_supervised(config, console=console, processes=processes, per_machine=per_machine, rows=rows)
