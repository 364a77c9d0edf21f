"""How responses to one prompt are sampled by vLLM, in training and outside of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

from lmm_r1.errors import UserError
from lmm_r1.generation.engine import SamplingSettings

# The most tokens of a request's logit_bias that vLLM's sampler on GPUs takes; a longer one ends the engine.
LOGIT_BIASES = 1024


def sampling_params(
    sampling: SamplingSettings,
    *,
    max_tokens: int,
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
        output_kind=RequestOutputKind.FINAL_ONLY if output_per == "prompt" else RequestOutputKind.DELTA,
        stream_interval=max_tokens if output_per == "response" else None,
    )


def as_asked(asked: Any, *, needed: SamplingParams, engine_guesses: bool = False) -> SamplingParams:
    """Return the parameters that an agent asks for, changed where training would not be token-exact with them.

    One response, of no more tokens than `needed` allows, which ends at its end token, with the log-probs and in the pieces
    that `needed` asks for. All else is as the agent asks: temperature, stop texts, and so on. The engine's workers ban tokens.

    Args:
        engine_guesses: the engine guesses tokens ahead.

    Raises:
        UserError: they are no vLLM parameters, or none that vLLM takes.
    """
    if not isinstance(asked, SamplingParams):
        raise UserError(f"the agent's sampling_params are a {type(asked).__name__}; give a vllm.SamplingParams")
    if asked.structured_outputs is not None or asked.allowed_token_ids is not None:
        raise UserError(
            "the agent's sampling_params bound what may be sampled (structured_outputs or allowed_token_ids), and the "
            "policy gradient would take that for the policy's choice; write an environment with TurnOptions.regex"
        )
    if engine_guesses and (asked.min_p or asked.logit_bias):
        raise UserError(
            "the agent's sampling_params ask for min_p or logit_bias, which vLLM does not apply to tokens that it guesses; "
            "leave them out, or --vllm.speculative_tokens"
        )
    if (biased := len(asked.logit_bias or ())) > LOGIT_BIASES:
        raise UserError(
            f"the agent's sampling_params give logit_bias for {biased:,} tokens, and vLLM takes {LOGIT_BIASES:,}; leave some "
            "of them out"
        )
    derived = {"output_text_buffer_length"}
    given = {
        name: getattr(asked, name)
        for name in asked.__struct_fields__
        if not name.startswith("_") and name not in derived
    }
    most = needed.max_tokens if asked.max_tokens is None else min(asked.max_tokens, needed.max_tokens)
    texts = [asked.stop] if isinstance(asked.stop, str) else list(asked.stop or ())
    stops = list(dict.fromkeys([*texts, *(needed.stop or ())]))
    log_probs = asked.logprobs if needed.logprobs is None else max(asked.logprobs or 0, needed.logprobs)
    changed = {
        "n": 1,
        "max_tokens": most,
        "min_tokens": min(asked.min_tokens, most),
        "logprobs": log_probs,
        "stop_token_ids": sorted({*(asked.stop_token_ids or ()), *(needed.stop_token_ids or ())}),
        "ignore_eos": needed.ignore_eos,
        "stop": stops,
        "structured_outputs": needed.structured_outputs,
        # Where the engine looks for texts it must know them.
        "detokenize": asked.detokenize or bool(stops),
        "output_kind": needed.output_kind,
        "stream_interval": needed.stream_interval,
    }
    try:
        return SamplingParams(**{**given, **changed})
    except ValueError as error:
        raise UserError(f"the agent's sampling_params are none that vLLM takes: {error}") from error
