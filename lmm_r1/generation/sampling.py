"""How responses to one prompt are sampled by vLLM, in training and outside of it."""

from __future__ import annotations

from collections.abc import Sequence

from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from lmm_r1.lmm_kits.checkpoint import BAN_BIAS


def sampling_params(
    *,
    n_samples: int,
    temperature: float,
    top_p: float,
    max_tokens: int,
    banned_token_ids: Sequence[int],
    end_token_id: int,
    logprobs: bool = False,
    ignore_eos: bool = False,
    streamed: bool = True,
) -> SamplingParams:
    """Return vLLM's parameters for all responses to one prompt.

    Args:
        logprobs: the engine reports the log-probs of the sampled tokens.
        ignore_eos: responses run to `max_tokens`.
        streamed: tokens come as they are sampled, so that each response can be scored when it ends; else with the last.
    """
    return SamplingParams(
        n=n_samples,
        temperature=temperature,
        top_p=top_p,
        max_tokens=max_tokens,
        # No seed per request: vLLM's CPU backend fails on it. The engine's own seed makes runs repeatable.
        # Beside those of the checkpoint's generation config, which some released checkpoints fill in wrongly.
        stop_token_ids=[] if ignore_eos else [end_token_id],
        ignore_eos=ignore_eos,
        skip_special_tokens=False,
        detokenize=False,
        # The sampled token's alone, and no top ones beside it.
        logprobs=0 if logprobs else None,
        logit_bias=dict.fromkeys(banned_token_ids, BAN_BIAS),
        output_kind=RequestOutputKind.DELTA if streamed else RequestOutputKind.FINAL_ONLY,
    )
