"""A prompt that is sent to an engine, and what comes back of its responses."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import AbstractContextManager, aclosing, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

from lmm_r1.data.sample import WHOLE, WeightSpan
from lmm_r1.generation.engine import TokenEngine

if TYPE_CHECKING:
    pass
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt
    from vllm.outputs import CompletionOutput, RequestOutput


@dataclass(kw_only=True)
class EngineWeights:
    """The weights of one engine: their version, and the requests that they generate for."""

    version: int = 0
    """How many updates of the run they have had."""
    _under_way: dict[str, Request] = field(default_factory=dict)

    @contextmanager
    def generating(self, request_id: str, request: Request) -> Iterator[None]:
        """Tell a request, while the block runs, of each update that comes in the middle of its responses."""
        self._under_way[request_id] = request
        try:
            yield
        finally:
            del self._under_way[request_id]

    def replaced(self, counts: Mapping[str, Mapping[int, int]]) -> None:
        """Count an update.

        Args:
            counts: how many tokens the unfinished responses had before it, by request and place; a request that the engine
                has not begun is not among them.
        """
        self.version += 1
        for request_id, request in self._under_way.items():
            request.note_update(counts.get(request_id, {}), version=self.version)


def tokens_under_way(engine: Any) -> dict[str, dict[int, int]]:
    """Return how many tokens each unfinished response has that a vLLM engine generates, by request and place.

    Of an engine that is paused: of one with a process of its own, what has come from there by then.
    """
    counts: dict[str, dict[int, int]] = {}
    for state in engine.output_processor.request_states.values():
        counts.setdefault(state.external_req_id, {})[state.request_index] = state.detokenizer.num_output_tokens()
    return counts


@dataclass(kw_only=True)
class Response:
    """What the engine has given of one response so far."""

    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    """Of every token, where the request asks for them."""
    finish_reason: Literal["stop", "length", "abort", "error", "repetition"] | None = None
    """How it has ended, in vLLM's words."""
    stop_text: str | None = None
    """The text that has ended it, where one did: the last token is then no end token."""
    begins: list[tuple[int, int]] = field(default_factory=list)
    """From which token on it came of which weight version; empty where nobody notes that."""

    @property
    def weights(self) -> tuple[WeightSpan, ...]:
        """Which weight versions its tokens came of, as far as that is noted."""
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
        """Args: weights: of the engine that it will be sent to; None where nobody updates them."""
        self.prompt = prompt
        self.parameters = parameters
        self._weights = weights
        self.responses = [Response() for _ in range(parameters.n)]
        self.read_token_ids: list[int] | None = None
        """The prompt as the engine has read it, its placeholders expanded; None until it has said so."""
        self.output: RequestOutput | None = None
        """What the engine has given last, as it gave it."""

    async def sent_to(self, engine: TokenEngine) -> AsyncGenerator[Response, None]:
        """Yield each response whenever it has grown, for the last time when it has ended; leaving early aborts them all.

        How often that is, is the parameters' `output_kind` and `stream_interval`.
        """
        request_id = uuid.uuid4().hex
        with self._noting_weights(request_id):
            async with aclosing(engine.generate(self.prompt, self.parameters, request_id)) as outputs:
                async for output in outputs:
                    self.output, self.read_token_ids = output, output.prompt_token_ids
                    for part in output.outputs:
                        response = self.responses[part.index]
                        response.add(part)
                        yield response

    def _noting_weights(self, request_id: str) -> AbstractContextManager[None]:
        if self._weights is None:
            return nullcontext()
        for response in self.responses:
            response.begins = [(0, self._weights.version)]
        return self._weights.generating(request_id, self)

    def note_update(self, counts: Mapping[int, int], *, version: int) -> None:
        """Note that what the engine generates from now on comes of new weights.

        Args:
            counts: how many tokens the unfinished responses have; none where the engine has not begun.
        """
        for place, response in enumerate(self.responses):
            # One that is not among the others has ended.
            if response.finish_reason is None and (place in counts or not counts):
                response.begins.append((counts.get(place, 0), version))

    @property
    def broken(self) -> Counter[str | None]:
        """How the responses ended that are not whole; None for those that never did."""
        return Counter(response.finish_reason for response in self.responses if response.finish_reason not in WHOLE)
