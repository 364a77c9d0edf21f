"""Log-probs and the loss of the policy's update, as the trainer computes them, on a machine without the training stack.

Also the ways in which the installed code can run a vision tower's attention over windows and images.

Made of the parts that `lmm_r1.models.actor.KitActor` is made of, which itself needs OpenRLHF and DeepSpeed; a test holds
the two together.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from train_batches import GroupBatch
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lmm_r1.lmm_kits import LmmKit
from lmm_r1.models.image_features import join_windows, multiply_patches
from lmm_r1.models.output_layer import TokenDistribution, TokenOutcomes, token_outcomes
from lmm_r1.models.packed.attention import PACKED_ATTENTION, packed_as
from lmm_r1.models.packed.packing import BatchInputs

VisionWay: TypeAlias = Callable[[PreTrainedModel], None]
"""Switches a loaded model's vision tower to it, and leaves its text tower as it is."""

LOOP = "loop"
# The prefix of our attention implementations in transformers' registry.
PREFIX = "lmm_"

LAYOUTS = ("padded", "packed", "shared")
# Log-probs from all logits at once, or without them, as the trainer has them of most models.
LOGITS = ("chunked", "whole")


@dataclass(frozen=True, kw_only=True)
class Policy:
    """A kit's model whose text tower takes packed sequences."""

    kit: LmmKit
    model: PreTrainedModel
    run: Callable[..., Any]
    """What is called: the model, or DeepSpeed's engine around it."""
    sampler: TokenDistribution

    @classmethod
    def of(cls, kit: LmmKit, model: PreTrainedModel, *, banned: tuple[int, ...], temperature: float = 1.0) -> Policy:
        """Return the policy of a model, whose rollout never samples `banned` tokens."""
        place = next(model.parameters()).device
        banned_token_ids = torch.tensor(banned, dtype=torch.long, device=place)
        sampler = TokenDistribution(temperature=temperature, banned_token_ids=banned_token_ids)
        return cls(kit=kit, model=model, run=model, sampler=sampler)

    def log_probs(self, batch: GroupBatch, *, layout: str, logits: str) -> torch.Tensor:
        """Return the responses' log-probs (B, T - 1), 0 elsewhere.

        Args:
            layout: one of `LAYOUTS`.
            logits: one of `LOGITS`.
        """
        wanted = batch.action_mask
        place, dtype = self.sampler.banned_token_ids.device, next(self.model.parameters()).dtype
        inputs = BatchInputs(kit=self.kit, config=self.model.config, dtype=dtype, device=place)
        if layout == "padded":
            rows, width = wanted.shape
            padded = inputs.padded(batch.for_model)
            target_ids = torch.zeros_like(padded["input_ids"])
            target_ids[:rows, :width] = batch.sequences[:, 1:].to(place)
            log_probs = self._predicted(padded, target_ids, logits=logits)[:rows, :width]
            return log_probs * wanted.to(place)
        packed, arguments = inputs.packed(batch.for_model, wanted=wanted, share_prefix=layout == "shared")
        with packed_as(packed.layout):
            arguments = {**arguments, "logits_to_keep": packed.sources}
            log_probs = self._predicted(arguments, packed.target_ids[None], logits=logits)
        return packed.scatter(log_probs[0])

    def _predicted(self, arguments: Mapping[str, Any], target_ids: torch.Tensor, *, logits: str) -> torch.Tensor:
        """Return the log-probs of target tokens (B, K), of which the model computes logits."""
        layer = self.model.get_output_embeddings()
        if logits == "chunked" and type(layer) is torch.nn.Linear:
            outcomes = TokenOutcomes(targets=target_ids, sampler=self.sampler, entropy=False)
            with token_outcomes(layer, outcomes):
                output = self.run(**arguments, use_cache=False)
            found = outcomes.of(output["logits"])
            if found is not None:
                return found[0]
        scores = self.sampler(self.run(**arguments, use_cache=False)["logits"])
        return scores.gather(-1, target_ids.unsqueeze(-1)).squeeze(-1) - scores.logsumexp(-1)


def policy_loss(
    log_probs: torch.Tensor, advantages: torch.Tensor, action_mask: torch.Tensor, *, clip: float = 0.2
) -> torch.Tensor:
    """Return PPO's clipped loss of an on-policy step, the mean over response tokens (https://arxiv.org/abs/1707.06347).

    Args:
        log_probs: (B, T - 1).
        advantages: (B, T - 1) or (B, 1).
        action_mask: (B, T - 1).
    """
    ratio = (log_probs - log_probs.detach()).exp()
    gains = torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)
    return -(gains * action_mask).sum() / action_mask.sum()


def prepare_tower(model: PreTrainedModel, kit: LmmKit) -> None:
    """Do to a vision tower what `lmm_r1.models.loading` does to it for training; what it does more belongs here, too."""
    multiply_patches(model)
    join_windows(model, kit)


def vision_ways() -> Mapping[str, VisionWay]:
    """Return the ways by name; add a switch here if it is not an attention implementation.

    `loop` is a call of PyTorch's SDPA per window and image; the others take all of them in one call.
    """
    ways: dict[str, VisionWay] = {LOOP: partial(set_vision_attention, name="sdpa")}
    # The compiled part of flash-attn; the stand-in in compat/ has none.
    if importlib.util.find_spec("flash_attn_2_cuda"):
        ways["flash_attn"] = partial(set_vision_attention, name="flash_attention_2")
    for name in ALL_ATTENTION_FUNCTIONS.valid_keys():
        if name.startswith(PREFIX) and name != PACKED_ATTENTION:
            ways[name.removeprefix(PREFIX)] = partial(set_vision_attention, name=name)
    return ways


def set_vision_attention(model: PreTrainedModel, *, name: str) -> None:
    """Let all towers but the text's use an attention implementation by transformers' name."""
    text = model.config.get_text_config()
    inner = {key: getattr(model.config, key) for key in model.config.sub_configs}
    names = {"": model.config._attn_implementation}
    names |= {
        key: config._attn_implementation if config is text else name
        for key, config in inner.items()
        if config is not None
    }
    model.set_attn_implementation(names)
