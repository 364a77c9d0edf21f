"""How the responses of a group are sampled."""

from __future__ import annotations

from collections.abc import Sequence

from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from lmm_r1.models.banned_tokens import BAN_BIAS


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
