"""A supervised run from its flags to its model: its rows, its process group and its loop, in the frame of every run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from lmm_r1.config import SupervisedConfig
from lmm_r1.data.training_rows import AnyRow
from lmm_r1.errors import UserError
from lmm_r1.host.strategy import KitStrategy, default_to_one_process, leave_group, make_strategy
from lmm_r1.lmm_kits.checkpoint import ImageFitting, check_images_taken
from lmm_r1.records.metrics import NO_CALLBACKS, Callbacks
from lmm_r1.supervised import chat_template, first_fitting, updates_per_epoch
from lmm_r1.supervised.loop import SupervisedRun
from lmm_r1.supervised.models import ConfigT
from lmm_r1.train.start import Plan, framed, is_first, model_flag, opened, say, sized


def train(
    run_class: type[SupervisedRun[ConfigT, Any, Any, Any]],
    config: ConfigT,
    *,
    plan: Plan | None = None,
    callbacks: Callbacks = NO_CALLBACKS,
) -> None:
    """Train on `--data.dataset` and write the model to `--ckpt.output_dir`; raises UserError for wrong flags or rows.

    Args:
        plan: chooses open settings by memory, as `planning.choices.planned`; None leaves nothing to memory.
    """
    checkpoint = opened(config, chat_template=chat_template(config))
    encode = run_class.encoder.of(config, kit=checkpoint.kit, processor=checkpoint.processor)
    scaling = ImageFitting(checkpoint=checkpoint, max_len=config.data.max_len, least=0, wanted=0)
    fitting = scaling if config.data.overlong_images == "scale" else None

    def check(row: AnyRow) -> AnyRow:
        check_images_taken(run_class.conversations([row]), kit=checkpoint.kit, model=model_flag(config))
        return encode.check(row, fitting)

    rows, held_out = run_class.training_rows(config, check=check), run_class.evaluation_rows(config, check=check)
    default_to_one_process()
    say(scaling.told(prefix="--data."))
    config = sized(config, rows=len(rows))
    shown = run_class.conversations(rows)
    run_class.check(config, checkpoint, shown + run_class.conversations(held_out))
    filler = first_fitting(config, rows, encode).filler
    size, count = config.ds.ulysses_size, int(os.environ["WORLD_SIZE"])
    if count % size:
        raise UserError(f"--ds.ulysses_size {size} does not divide the {count} processes of this run")
    with framed(
        config,
        checkpoint,
        kind=run_class.kind,
        rows=rows,
        held_out=held_out,
        shown=shown,
        plan=plan,
        callbacks=callbacks,
        processes=_joined,
    ) as frame:
        config, folder = frame.config, frame.folder
        # The folder must be ready for all ranks.
        dist.barrier()
        steps = updates_per_epoch(len(rows), config.train.batch_size) * config.train.max_epochs
        if config.train.max_steps > 0:
            steps = min(steps, config.train.max_steps)
        say(f"{folder.name}: {len(rows)} rows, loading {checkpoint.path} ...")
        run = run_class.of(replace(frame, steps=steps), rows=rows, encode=encode, filler=filler)
        if held_out:
            run.evaluate_on(held_out)
        run.train(steps=steps)
        if is_first():
            say(folder.finish(steps=steps if folder.ended_at is None else folder.ended_at))
        # Every rank continues only after the run is finished.
        dist.barrier()


@contextmanager
def _joined(config: SupervisedConfig) -> Iterator[KitStrategy]:
    """Join the process group of the run for the block."""
    strategy = make_strategy(config)
    strategy.setup_distributed()
    try:
        yield strategy
    except BaseException:
        leave_group(failed=True)
        raise
    leave_group()
