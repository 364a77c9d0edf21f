"""How responses to one prompt are sampled by vLLM, in training and outside of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

from lmm_r1.generation.engine import SamplingSettings
from lmm_r1.lmm_kits.checkpoint import BAN_BIAS


def sampling_params(
    sampling: SamplingSettings,
    *,
    max_tokens: int,
    banned_token_ids: Sequence[int],
    end_token_id: int,
    output_per: Literal["token", "response", "prompt"],
    logprobs: bool = False,
    ignore_eos: bool = False,
    stops: Sequence[str] = (),
    regex: str | None = None,
) -> SamplingParams:
    """Return vLLM's parameters for all responses to one prompt.

    Args:
        max_tokens: longest response to this prompt.
        output_per: what the engine gives at once: every token, each response when it ends (and its first token before),
            or all responses when the last has ended.
        logprobs: the engine reports the log-probs of the sampled tokens.
        ignore_eos: responses run to `max_tokens`.
        stops: texts that end a response, which belong to it.
        regex: what the whole response matches, unless its longest length cuts it off.
    """
    return SamplingParams(
        n=sampling.n_samples,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=max_tokens,
        # No seed per request: vLLM's CPU backend fails on it. The engine's own seed makes runs repeatable.
        # Beside those of the checkpoint's generation config, which some released checkpoints fill in wrongly.
        stop_token_ids=[] if ignore_eos else [end_token_id],
        ignore_eos=ignore_eos,
        skip_special_tokens=False,
        # Where the engine looks for texts it must know them.
        detokenize=bool(stops),
        stop=list(stops),
        include_stop_str_in_output=bool(stops),
        structured_outputs=None if regex is None else StructuredOutputsParams(regex=regex),
        # The sampled token's alone, and no top ones beside it.
        logprobs=0 if logprobs else None,
        logit_bias=dict.fromkeys(banned_token_ids, BAN_BIAS),
        output_kind=RequestOutputKind.FINAL_ONLY if output_per == "prompt" else RequestOutputKind.DELTA,
        stream_interval=max_tokens if output_per == "response" else None,
    )
