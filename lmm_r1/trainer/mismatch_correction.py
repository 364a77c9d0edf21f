"""Weights that correct policy losses for an engine that samples from other probabilities than the trainer's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

# As in OpenRLHF: probabilities are held this far from 0 and 1, whose logarithms would be infinite.
LEAST_PROBABILITY = 1e-6


@dataclass(frozen=True, kw_only=True)
class Correction:
    """As the flags `--algo.advantage.is_correction_*` say it."""

    level: Literal["off", "token", "seq"] = "off"
    mode: Literal["mask", "clip"] = "mask"
    gating: Literal["ratio", "binary_kl", "tv"] = "ratio"
    bounds: tuple[float, float] = (0.5, 5.0)


@dataclass(frozen=True, kw_only=True)
class CorrectionWeights:
    weights: torch.Tensor
    """(B, A) or (B, 1), of the tokens' losses."""
    filtered: torch.Tensor
    """The share that is outside the bounds, of loss tokens or of sequences that have some."""


def correction_weights(
    log_probs: torch.Tensor, rollout_log_probs: torch.Tensor, mask: torch.Tensor, correction: Correction
) -> CorrectionWeights:
    """Return what token losses are multiplied by, from the trainer's log-probs and the engine's of the same tokens, (B, A).

    With r = pi_train / pi_engine of a token:

    - level token, mode clip: r within the bounds (truncated importance sampling, fengyao.notion.site/off-policy-rl);
    - level token, mode mask: r, and 0 outside the bounds (IcePop);
    - level seq: by the geometric mean of a sequence's r, which length does not blow up as it does their product ("When Speed
      Kills Stability", the geometric level of verl's rollout correction). Mode mask leaves sequences out whose mean is
      outside the bounds, with tokens of others weighted by their r; mode clip weighs all tokens by the mean within the bounds.

    The bounds of mode mask may be those of a divergence of each token, or its mean over a sequence, in place of r. All but
    the geometric mean as a weight is OpenRLHF's.

    Args:
        mask: (B, A), 1 for loss tokens.
    """
    low, high = correction.bounds
    log_ratios = torch.where(mask.bool(), log_probs - rollout_log_probs, 0.0).detach()
    per_sequence = correction.level == "seq"
    if correction.gating == "ratio":
        found = (sequence_means(log_ratios, mask) if per_sequence else log_ratios).exp()
    else:
        found = _divergences(log_probs.detach(), rollout_log_probs, gating=correction.gating)
        found = sequence_means(found, mask) if per_sequence else found
    within = (found >= low) & (found <= high)
    units = (mask.sum(dim=-1, keepdim=True) > 0) if per_sequence else mask.bool()
    weights = found.clamp(low, high) if correction.mode == "clip" else torch.where(within, log_ratios.exp(), 0.0)
    return CorrectionWeights(weights=weights, filtered=(~within & units).sum() / units.sum().clamp(min=1))


def sequence_means(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return each sequence's mean over its loss tokens, (B, 1), of values and mask (B, A); 0 for one that has none."""
    kept = torch.where(mask.bool(), values, 0.0)
    return kept.sum(dim=-1, keepdim=True) / mask.sum(dim=-1, keepdim=True).clamp(min=1)


def _divergences(log_probs: torch.Tensor, rollout_log_probs: torch.Tensor, *, gating: str) -> torch.Tensor:
    """Return the divergence of each token, (B, A), of the two-valued distributions of being sampled or not."""
    engine, trainer = (
        values.exp().clamp(LEAST_PROBABILITY, 1 - LEAST_PROBABILITY) for values in (rollout_log_probs, log_probs)
    )
    if gating == "tv":
        return (engine - trainer).abs()
    return engine * (engine / trainer).log() + (1 - engine) * ((1 - engine) / (1 - trainer)).log()
