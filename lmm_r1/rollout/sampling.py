"""How responses are sampled, and how the training side sees the same distribution."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from vllm import SamplingParams

# Added to the logits of banned tokens on both sides; the largest bias that vLLM takes.
BAN_BIAS = -100.0


def sampling_params(
    *,
    n_samples: int,
    temperature: float,
    top_p: float,
    max_tokens: int,
    banned_token_ids: Sequence[int],
    logprobs: bool,
) -> SamplingParams:
    """Return vLLM's parameters for one group; each response is streamed, so that it can be scored when it ends."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        n=n_samples,
        temperature=temperature,
        top_p=top_p,
        max_tokens=max_tokens,
        min_tokens=1,
        skip_special_tokens=False,
        detokenize=False,
        logprobs=1 if logprobs else None,
        logit_bias=dict.fromkeys(banned_token_ids, BAN_BIAS),
        output_kind=RequestOutputKind.DELTA,
    )


def ban(logits: torch.Tensor, banned_token_ids: torch.Tensor) -> torch.Tensor:
    """Return logits (..., V) with the bias that the engine adds to banned tokens (K,)."""
    import torch

    bias = torch.zeros(logits.shape[-1], dtype=logits.dtype, device=logits.device)
    bias[banned_token_ids] = BAN_BIAS
    return logits + bias
