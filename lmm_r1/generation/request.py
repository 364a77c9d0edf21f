"""A request to an engine: its sampling parameters and its responses so far."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from lmm_r1.data.sample import WHOLE, WeightSpan
from lmm_r1.generation.codec import PromptCodec, TextStream
from lmm_r1.generation.engine import SamplingSettings, TokenEngine

if TYPE_CHECKING:
    from vllm.inputs import TokensPrompt
    from vllm.outputs import CompletionOutput, RequestOutput


def sampling_params(
    sampling: SamplingSettings,
    *,
    max_tokens: int,
    end_token_id: int,
    output_per: Literal["token", "response", "prompt"],
    logprobs: bool = False,
    ignore_eos: bool = False,
    stops: Sequence[str] = (),
) -> SamplingParams:
    """Return vLLM's parameters for all responses to one prompt.

    Args:
        max_tokens: the longest response to this prompt.
        output_per: when the engine returns output: for every token, for each response when it ends (and for its first
            token), or for all responses when the last has ended.
        logprobs: the engine reports the log-probs of the sampled tokens.
        ignore_eos: responses run to `max_tokens`.
        stops: texts that end a response and belong to it.
    """
    return SamplingParams(
        n=sampling.n_samples,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=max_tokens,
        seed=sampling.seed,
        # In addition to those of the checkpoint's generation config, which some released checkpoints fill in wrongly.
        stop_token_ids=[] if ignore_eos else [end_token_id],
        ignore_eos=ignore_eos,
        skip_special_tokens=False,
        # The engine can only find stop texts in text.
        detokenize=bool(stops),
        stop=list(stops),
        include_stop_str_in_output=bool(stops),
        # With 0, only the sampled token's log-prob, without the most likely tokens.
        logprobs=0 if logprobs else None,
        output_kind=RequestOutputKind.FINAL_ONLY if output_per == "prompt" else RequestOutputKind.DELTA,
        stream_interval=max_tokens if output_per == "response" else None,
    )


@dataclass(kw_only=True)
class EngineWeights:
    """The weights of one engine: their version, and the requests in progress."""

    version: int = 0
    """The number of updates so far."""
    under_way: dict[str, Request] = field(default_factory=dict)
    """The requests in which updates are recorded, by id."""

    def replaced(self, counts: Mapping[str, Mapping[int, int]]) -> None:
        """Count an update.

        Args:
            counts: the tokens of unfinished responses before it, by request and place; without requests that the engine has
                not begun.
        """
        self.version += 1
        for request_id, request in self.under_way.items():
            request.note_update(counts.get(request_id, {}), version=self.version)


def tokens_under_way(engine: Any) -> dict[str, dict[int, int]]:
    """Return the number of tokens of each unfinished response of a paused vLLM engine, by request and place.

    For an engine in a process of its own, these are the tokens that have arrived.
    """
    counts: dict[str, dict[int, int]] = {}
    for state in engine.output_processor.request_states.values():
        counts.setdefault(state.external_req_id, {})[state.request_index] = state.detokenizer.num_output_tokens()
    return counts


@dataclass(kw_only=True)
class Response:
    """One response so far."""

    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    """Of every token, if requested."""
    finish_reason: Literal["stop", "length", "abort", "error", "repetition"] | None = None
    """Why it ended, in vLLM's words."""
    stop_text: str | None = None
    """The text that ended it, if any; the last token is then no end token."""
    begins: list[tuple[int, int]] = field(default_factory=list)
    """The first token of each weight version, with the version; empty if that is not recorded."""

    @property
    def weights(self) -> tuple[WeightSpan, ...]:
        """The weight versions of its tokens, as far as recorded."""
        bounds = pairwise([*self.begins, (len(self.token_ids), 0)])
        spans = (WeightSpan(version, end - start) for (start, version), (end, _) in bounds)
        return tuple(span for span in spans if span.tokens > 0)

    def add(self, part: CompletionOutput) -> None:
        self.token_ids.extend(part.token_ids)
        if part.logprobs is not None:
            pairs = zip(part.token_ids, part.logprobs, strict=True)
            self.log_probs.extend(logprobs[token].logprob for token, logprobs in pairs)
        self.finish_reason = part.finish_reason
        self.stop_text = part.stop_reason if isinstance(part.stop_reason, str) else None


class Request:
    """One prompt and its responses."""

    def __init__(
        self, prompt: TokensPrompt, parameters: SamplingParams, *, weights: EngineWeights | None = None
    ) -> None:
        """Args: weights: those of the engine; None if they are never updated."""
        self.prompt = prompt
        self.parameters = parameters
        self._weights = weights
        self.responses = [Response() for _ in range(parameters.n)]
        self.read_token_ids: list[int] | None = None
        """The prompt as the engine read it, with expanded placeholders; None before its first output."""
        self.output: RequestOutput | None = None
        """The engine's last output."""

    async def sent_to(self, engine: TokenEngine) -> AsyncGenerator[Response, None]:
        """Yield each response whenever it has grown, and when it has ended; leaving early aborts all of them.

        The parameters' `output_kind` and `stream_interval` decide how often.
        """
        request_id = uuid.uuid4().hex
        if self._weights is not None:
            for response in self.responses:
                response.begins = [(0, self._weights.version)]
            self._weights.under_way[request_id] = self
        try:
            async with aclosing(engine.generate(self.prompt, self.parameters, request_id)) as outputs:
                async for output in outputs:
                    self.output, self.read_token_ids = output, output.prompt_token_ids
                    for part in output.outputs:
                        response = self.responses[part.index]
                        response.add(part)
                        yield response
        finally:
            if self._weights is not None:
                del self._weights.under_way[request_id]

    def note_update(self, counts: Mapping[int, int], *, version: int) -> None:
        """Record that the following tokens come from new weights.

        Args:
            counts: the tokens of unfinished responses; empty if the engine has not begun.
        """
        for place, response in enumerate(self.responses):
            # A response that is missing among others has ended.
            if response.finish_reason is None and (place in counts or not counts):
                response.begins.append((counts.get(place, 0), version))

    @property
    def broken(self) -> Counter[str | None]:
        """Why incomplete responses ended; None for those that did not end."""
        return Counter(response.finish_reason for response in self.responses if response.finish_reason not in WHOLE)


async def hand_on(
    request: Request, engine: TokenEngine, *, codec: PromptCodec, on_text: Callable[[str], None]
) -> None:
    """Send a request for one response, and pass on its text as it grows, also if this is cancelled."""
    text, read = TextStream(codec.tokenizer), 0
    try:
        async with aclosing(request.sent_to(engine)) as grown:
            async for response in grown:
                ended = response.finish_reason == "stop" and response.stop_text is None
                words = codec.words(response.token_ids, ended=ended)
                if piece := text.add(words[read:]):
                    on_text(piece)
                read = len(words)
    finally:
        if piece := text.rest():
            on_text(piece)
