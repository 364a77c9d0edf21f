"""The reference of a preference loss: a model that stays as it is, or the policy without its adapter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from lmm_r1.models.actor import KitActor
from lmm_r1.models.adapters import adapters_off
from lmm_r1.models.packed.sequence_parallel import bare
from lmm_r1.trainer.sft_samples import SFTBatch


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
