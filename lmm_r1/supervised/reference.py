"""The reference of a preference loss, a model that stays as it is or the policy without its adapter; and runs with one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from typing_extensions import Self

from lmm_r1.config.preferences import ReferredConfig
from lmm_r1.host.strategy import KitStrategy
from lmm_r1.models.actor import KitActor
from lmm_r1.models.adapters import adapters_off
from lmm_r1.models.loading import load_settings
from lmm_r1.models.packed.self_check import check_packing
from lmm_r1.models.packed.sequence_parallel import bare
from lmm_r1.supervised.loop import BatchT, RowT, SampleT, SupervisedRun
from lmm_r1.supervised.models import Session, prepare_policy
from lmm_r1.supervised.samples import SFTBatch

ReferredT = TypeVar("ReferredT", bound=ReferredConfig)


@dataclass(frozen=True, kw_only=True, eq=False)
class Reference:
    """Gives log-probs that no gradient flows into; every rank asks for them equally often."""

    actor: KitActor
    """The reference model, or the policy."""
    without_adapters: bool
    """Whether it is the policy, whose adapters are switched off while it is asked."""
    group: dist.ProcessGroup | None
    """The ranks that share sequences."""

    @torch.no_grad()
    def log_probs(self, batch: SFTBatch) -> torch.Tensor:
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

    def _run(self, batch: SFTBatch) -> torch.Tensor:
        device = torch.cuda.current_device()
        return self.actor(
            batch.sequences.to(device),
            batch.loss_mask.to(device),
            attention_mask=batch.attention_mask.to(device),
            ring_attn_group=self.group,
            media=batch.media,
        )


def prepare_reference(config: ReferredConfig, strategy: KitStrategy, *, policy: KitActor) -> Reference | None:
    """Return the reference of a run's loss, None where it has none."""
    group = strategy.ring_attn_group
    if config.refers_to_base:
        return Reference(actor=policy, without_adapters=True, group=group)
    if not config.needs_reference_model:
        return None
    assert config.ref.model_name_or_path is not None, "resolve fills it in"
    actor = KitActor(
        config.ref.model_name_or_path,
        load_settings(config, share_prefix=config.train.shared_prefix_enable),
        ds_config=strategy.get_ds_eval_config(offload=config.ref.offload),
    )
    if config.ref.offload:
        # Where upstream's strategy looks.
        actor._offload = True
    actor = strategy.prepare(actor)
    actor.eval()
    check_packing(actor, group=group, longest=config.data.max_len)
    return Reference(actor=actor, without_adapters=False, group=group)


class ReferredRun(SupervisedRun[ReferredT, RowT, SampleT, BatchT]):
    """A run whose loss compares the policy with a reference."""

    def __init__(self, *given: Any, reference: Reference | None, **learned: Any) -> None:
        """Args:
        given, learned: those of `SupervisedRun`.
        """
        super().__init__(*given, **learned)
        self.reference = reference

    @classmethod
    def models(cls, config: ReferredT) -> dict[str, str | None]:
        own = {"ref.model_name_or_path": config.ref.model_name_or_path} if config.needs_reference_model else {}
        return {**super().models(config), **own}

    @classmethod
    def of(cls, session: Session[ReferredT], **learned: Any) -> Self:
        policy = prepare_policy(session, share_prefix=session.config.train.shared_prefix_enable)
        reference = prepare_reference(session.config, session.strategy, policy=policy)
        return cls(session, policy, reference=reference, **learned)
