"""A prompt that is sent to an engine, and what comes back of its responses."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from lmm_r1.data.sample import WHOLE
from lmm_r1.generation.engine import TokenEngine

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt
    from vllm.outputs import CompletionOutput


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

    def add(self, part: CompletionOutput) -> None:
        self.token_ids.extend(part.token_ids)
        if part.logprobs is not None:
            pairs = zip(part.token_ids, part.logprobs, strict=True)
            self.log_probs.extend(logprobs[token].logprob for token, logprobs in pairs)
        self.finish_reason = part.finish_reason
        self.stop_text = part.stop_reason if isinstance(part.stop_reason, str) else None


class Request:
    """One prompt and its responses."""

    def __init__(self, prompt: TokensPrompt, parameters: SamplingParams) -> None:
        self.prompt = prompt
        self.parameters = parameters
        self.responses = [Response() for _ in range(parameters.n)]
        self.read_token_ids: list[int] | None = None
        """The prompt as the engine has read it, its placeholders expanded; None until it has said so."""

    async def sent_to(self, engine: TokenEngine) -> AsyncGenerator[Response, None]:
        """Yield each response whenever it has grown, for the last time when it has ended; leaving early aborts them all.

        How often that is, is the parameters' `output_kind` and `stream_interval`.
        """
        async with aclosing(engine.generate(self.prompt, self.parameters, uuid.uuid4().hex)) as outputs:
            async for output in outputs:
                self.read_token_ids = output.prompt_token_ids
                for part in output.outputs:
                    response = self.responses[part.index]
                    response.add(part)
                    yield response

    @property
    def broken(self) -> Counter[str | None]:
        """How the responses ended that are not whole; None for those that never did."""
        return Counter(response.finish_reason for response in self.responses if response.finish_reason not in WHOLE)
