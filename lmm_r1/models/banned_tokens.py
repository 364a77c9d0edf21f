"""Tokens that must not be sampled, as both sides see them: the engine that samples and the model that is trained."""

from __future__ import annotations

import torch

# Added to the logits of banned tokens on both sides; the largest bias that vLLM takes.
BAN_BIAS = -100.0


def ban(logits: torch.Tensor, banned_token_ids: torch.Tensor) -> torch.Tensor:
    """Return logits (..., V) with the bias that the engine adds to banned tokens (K,)."""
    bias = torch.zeros(logits.shape[-1], dtype=logits.dtype, device=logits.device)
    bias[banned_token_ids.to(logits.device)] = BAN_BIAS
    return logits + bias
