"""The models of a supervised run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from lmm_r1.config import DPOConfig, SupervisedConfig, model_path
from lmm_r1.host.strategy import KitStrategy
from lmm_r1.models.actor import KitActor
from lmm_r1.models.adapters import adapters_off
from lmm_r1.models.loading import load_settings, trained_settings
from lmm_r1.models.packed.packing import ModelSample
from lmm_r1.models.packed.self_check import check_packing
from lmm_r1.models.packed.sequence_parallel import bare
from lmm_r1.models.value_model import KitValueModel
from lmm_r1.train.start import Frame
from lmm_r1.train.update import prepared

ConfigT = TypeVar("ConfigT", bound=SupervisedConfig)


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
