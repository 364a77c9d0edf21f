"""A supervised run from its flags to its models: its rows, its process group and its loop, in the frame of every run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from lmm_r1.config import DPOConfig, SupervisedConfig, model_path
from lmm_r1.data.training_rows import AnyRow
from lmm_r1.errors import UserError
from lmm_r1.host.strategy import KitStrategy, default_to_one_process, leave_group, make_strategy
from lmm_r1.lmm_kits.checkpoint import ImageFitting, check_images_taken
from lmm_r1.models.actor import KitActor, KitValueModel
from lmm_r1.models.adapters import adapters_off
from lmm_r1.models.loading import load_settings, trained_settings
from lmm_r1.models.packed.packing import ModelSample
from lmm_r1.models.packed.self_check import check_packing
from lmm_r1.models.packed.sequence_parallel import bare
from lmm_r1.records.metrics import NO_CALLBACKS, Callbacks
from lmm_r1.supervised import chat_template, first_fitting, updates_per_epoch
from lmm_r1.train.start import Frame, Plan, framed, is_first, model_flag, opened, say, sized
from lmm_r1.train.update import prepared

if TYPE_CHECKING:
    from lmm_r1.supervised.loop import SupervisedRun


ConfigT = TypeVar("ConfigT", bound=SupervisedConfig)


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


def prepare_trained(session: Frame[Any], model: KitActor | KitValueModel) -> Any:
    """Return a loaded model with its optimizer under DeepSpeed, which wraps all of a value model.

    Raises UserError if it does not run on packed sequences.
    """
    config, strategy = session.config, session.strategy
    trained = prepared(strategy, model, config, checkpointing=config.model, steps=session.steps)
    run = None if trained is model else trained
    check_packing(model, run=run, group=strategy.ring_attn_group, longest=config.data.max_len)
    if config.model.aux_loss_coef:
        trained.balance_experts()
    return trained


def prepare_policy(session: Frame[Any], *, share_prefix: bool = False) -> KitActor:
    """Return the trained model under DeepSpeed."""
    settings = trained_settings(session.config, share_prefix=share_prefix)
    path, ds_config = model_path(session.config), session.strategy.get_ds_train_config()
    return prepare_trained(session, KitActor(path, settings, ds_config=ds_config))


def prepare_frozen(
    config: SupervisedConfig, strategy: KitStrategy, *, path: str, offload: bool, share_prefix: bool = False
) -> KitActor:
    """Return a model that is not trained, under DeepSpeed."""
    settings = load_settings(config, share_prefix=share_prefix)
    actor = KitActor(path, settings, ds_config=strategy.get_ds_eval_config(offload=offload))
    # OpenRLHF's strategy reads it.
    actor._offload = offload
    actor = strategy.prepare(actor)
    actor.eval()
    check_packing(actor, group=strategy.ring_attn_group, longest=config.data.max_len)
    return actor


@dataclass(frozen=True, kw_only=True, eq=False)
class Reference:
    """Computes log-probs without gradients; every rank asks for them equally often."""

    actor: KitActor
    """The reference model, or the policy."""
    without_adapters: bool
    """Whether it is the policy, with its adapters switched off."""
    group: dist.ProcessGroup | None
    """The ranks that share sequences."""

    @torch.no_grad()
    def log_probs(self, batch: list[ModelSample]) -> torch.Tensor:
        """Return those of loss tokens, (B, T - 1), 0 elsewhere, without dropout."""
        if not self.without_adapters:
            return self._run(batch)
        model: Any = self.actor.model
        trains = model.training
        model.eval()
        try:
            with adapters_off(bare(model)):
                return self._run(batch)
        finally:
            model.train(trains)

    def _run(self, batch: list[ModelSample]) -> torch.Tensor:
        return self.actor(batch, ring_attn_group=self.group)


def prepare_reference(config: DPOConfig, strategy: KitStrategy, *, policy: KitActor) -> Reference | None:
    """Return the reference of a run's loss, None if it has none."""
    group = strategy.ring_attn_group
    if config.refers_to_base:
        return Reference(actor=policy, without_adapters=True, group=group)
    if not config.needs_reference_model:
        return None
    path, shares = config.ref.model_name_or_path, config.train.shared_prefix_enable
    assert path is not None, "resolve fills it in"
    actor = prepare_frozen(config, strategy, path=path, offload=config.ref.offload, share_prefix=shares)
    return Reference(actor=actor, without_adapters=False, group=group)
