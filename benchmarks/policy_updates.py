"""The policy's update and its pass without gradients in four ways, each an actor under DeepSpeed.

Import it after `cpu.prepare_process`.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from openrlhf.models import Actor
from openrlhf.utils.vlm_utils import merge_mm_train_inputs
from train_batches import GroupBatch, optimizer_settings

from lmm_r1 import dotted
from lmm_r1.config import PPOConfig
from lmm_r1.host.strategy import KitStrategy, default_to_one_process, make_strategy
from lmm_r1.lmm_kits import LmmKit
from lmm_r1.models.actor import KitActor
from lmm_r1.models.loading import LoadSettings
from lmm_r1.rl.losses import LossSettings, PolicyLoss, PolicyPass
from lmm_r1.train.update import Counts, Terms, update

# OpenRLHF's own actor, and ours on the padded batch, on packed sequences and on those with shared prefixes.
OURS: dict[str, dict[str, Any]] = {
    "padded": {},
    "packed": {"packing_samples": True},
    "shared": {"packing_samples": True, "share_prefix": True},
}
WAYS = ("openrlhf", *OURS)


@dataclass(frozen=True, kw_only=True)
class PolicyUpdate:
    """One of the ways to make the policy's update; the learning rate is 0, so that all keep the same weights."""

    way: str
    actor: Actor
    strategy: KitStrategy
    passed: dict[str, torch.Tensor] = field(default_factory=dict)
    """Shapes and types, as meta tensors, of what the model's forward was given in the last pass."""

    def update(self, batch: GroupBatch, *, old: torch.Tensor, advantages: torch.Tensor) -> float:
        """Make the update (forward, loss, backward, AdamW's step) and return the loss.

        Args:
            old: log-probs of the policy that sampled the responses, (B, T - 1).
            advantages: (B, T - 1).
        """
        loss, tokens = PolicyLoss(LossSettings()), int(batch.action_mask.sum())
        counted = Counts(units=tokens, tokens=tokens, samples=len(batch.sequences))

        def terms(one: GroupBatch) -> Terms:
            given: dict[str, Any] = {"old_log_probs": old, "advantages": advantages, "mask": one.action_mask.long()}
            return loss(PolicyPass(log_probs=self._run(one), **given), kl_weight=0.0)

        self.actor.train()
        return update(self.strategy, self.actor, [batch], counts=lambda one: counted, terms=terms).loss

    def log_probs(self, batch: GroupBatch) -> torch.Tensor:
        """Return the responses' log-probs (B, T - 1) as the old policy's and the reference model's are computed."""
        self.actor.eval()
        with torch.no_grad():
            return self._run(batch)

    def gradients(self, batch: GroupBatch, *, advantages: torch.Tensor) -> torch.Tensor:
        """Return the gradients of the policy's loss at a ratio of 1, in one row, (N,)."""
        self.actor.train()
        engine = self.actor.model
        weights = [weight for weight in engine.module.parameters() if weight.requires_grad]
        # What comes out of DeepSpeed's engine would start its reduction of gradients.
        self.actor.model = engine.module
        loss = -(self._run(batch) * advantages * batch.action_mask).sum() / batch.action_mask.sum()
        parts = torch.autograd.grad(loss, weights, allow_unused=True)
        self.actor.model = engine
        zeros = (
            torch.zeros_like(weight) if part is None else part for weight, part in zip(weights, parts, strict=True)
        )
        return torch.cat([part.flatten() for part in zeros])

    def _run(self, batch: GroupBatch) -> torch.Tensor:
        if self.way != "openrlhf":
            return self.actor(batch.for_model)
        media = merge_mm_train_inputs([batch.media], batch.sequences.device)
        return self.actor(batch.sequences, batch.action_mask, attention_mask=batch.attention_mask, **media)


def load_updates(kit: LmmKit, folder: Path) -> list[PolicyUpdate]:
    """Return all ways for one checkpoint, in single precision, in a process group of this process alone."""
    default_to_one_process()
    strategy = make_strategy(_config(folder))
    strategy.setup_distributed()
    actors = {"openrlhf": _openrlhf_actor(kit, folder)}
    for way, settings in OURS.items():
        actors[way] = KitActor(str(folder), LoadSettings(attn_implementation="sdpa", param_dtype="fp32", **settings))
    return [_prepared(way, actor, strategy) for way, actor in actors.items()]


def _config(folder: Path) -> PPOConfig:
    """Return the trainer's settings: OpenRLHF's defaults, one pass per step, no reference model."""
    settings = {
        "actor.model_name_or_path": str(folder),
        "actor.adam.lr": 0.0,
        "algo.kl.init_coef": 0.0,
        "ds.param_dtype": "fp32",
        "train.batch_size": 1,
        "train.micro_batch_size": 1,
    }
    return dotted.replace(PPOConfig(), settings)


def _openrlhf_actor(kit: LmmKit, folder: Path) -> Actor:
    """Return OpenRLHF's actor as it makes itself; it knows no single precision, so that the weights come after."""
    actor = Actor(str(folder), attn_implementation="sdpa", param_dtype="bf16")
    exact = kit.load_model(str(folder), dtype=torch.float32, attn_implementation="sdpa", trust_remote_code=False)
    actor.model.float().load_state_dict(exact.state_dict())
    actor.computed_tokens = 0  # read by our update
    return actor


def _prepared(way: str, actor: Actor, strategy: KitStrategy) -> PolicyUpdate:
    bare = actor.model
    actor, _, _ = strategy.prepare((actor, optimizer_settings(strategy.args, steps=1)))
    made = PolicyUpdate(way=way, actor=actor, strategy=strategy)

    def note(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = {**inspect.signature(module.forward).bind_partial(*args).arguments, **kwargs}
        tensors = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
        made.passed.clear()
        made.passed.update({name: torch.empty_like(value, device="meta") for name, value in tensors.items()})

    bare.register_forward_pre_hook(note, with_kwargs=True)
    return made
