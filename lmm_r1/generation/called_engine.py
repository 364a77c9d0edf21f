"""An engine as agents of OpenRLHF's form call it, which keeps what it was given and what it gave."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from PIL import Image

from lmm_r1.agents.openrlhf_agent import AgentFault
from lmm_r1.data.sample import WeightSpan
from lmm_r1.generation.engine import TokenEngine
from lmm_r1.generation.engine_weights import EngineWeights
from lmm_r1.generation.request import Request
from lmm_r1.generation.sampling import as_asked

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.outputs import RequestOutput


@dataclass(frozen=True, kw_only=True)
class EngineCall:
    """A turn that was generated for an agent."""

    read: tuple[int, ...]
    """All tokens before it, as the engine has read them."""
    generated: tuple[int, ...]
    log_probs: tuple[float, ...] | None
    images: tuple[Image.Image, ...]
    finish_reason: str
    ended_by_token: bool
    """Whether the last token is an end token."""
    weights: tuple[WeightSpan, ...]
    """Which weights the generated tokens came of; empty where nobody notes it."""


class CalledEngine:
    """May be called from any event loop; what it samples by is what training needs, and else what the agent asks for."""

    def __init__(
        self,
        engine: TokenEngine,
        *,
        collapsed: Callable[[Sequence[int]], list[int]],
        needed: Callable[[int], SamplingParams],
        max_len: int,
        guesses: bool,
        weights: EngineWeights | None = None,
    ) -> None:
        """Keep to the running event loop, which is the engine's own.

        Args:
            collapsed: returns tokens with one placeholder per image.
            needed: returns what training needs of a turn for which there is room for so many tokens; it is the same for all
                episodes, since nobody says of which of those under way a call is.
            max_len: longest prompt and response together, in tokens.
            guesses: the engine guesses tokens ahead.
            weights: of the engine, where updates may come while it generates.
        """
        self._engine = engine
        self._collapsed = collapsed
        self._needed = needed
        self._max_len = max_len
        self._guesses = guesses
        self._weights = weights
        self._home = asyncio.get_running_loop()
        self._running = 0
        self._idle_since = time.monotonic()
        # By what was read and what was generated, in the order in which they ended.
        self._calls: dict[tuple[tuple[int, ...], tuple[int, ...]], list[EngineCall]] = defaultdict(list)

    @property
    def idle_s(self) -> float:
        """For how long it has been asked for nothing."""
        return 0.0 if self._running else time.monotonic() - self._idle_since

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling_params: SamplingParams,
        multi_modal_data: Mapping[str, Any] | None = None,
    ) -> RequestOutput:
        """Return the whole output to a prompt, in whose tokens an image is one placeholder or all of its own.

        Raises ValueError for a prompt that leaves no room, and AgentFault for media that are no images.
        """
        if other := sorted(set(multi_modal_data or ()) - {"image"}):
            raise AgentFault(f"multi_modal_data has {', '.join(other)}, and an agent's turns may show images alone")
        work = self._generate(list(prompt_token_ids), sampling_params, multi_modal_data or {})
        if asyncio.get_running_loop() is self._home:
            return await work
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._home))

    async def _generate(self, token_ids: list[int], asked: SamplingParams, media: Mapping[str, Any]) -> RequestOutput:
        from vllm.inputs import TokensPrompt

        most = self._max_len
        if len(token_ids) >= most:
            raise ValueError(f"the prompt of {len(token_ids)} tokens leaves no room in --data.max_len {most}")
        prompt = TokensPrompt(prompt_token_ids=self._collapsed(token_ids))
        if media:
            prompt["multi_modal_data"] = dict(media)
        needed = self._needed(most - len(token_ids))
        parameters = as_asked(asked, needed=needed, engine_guesses=self._guesses)
        request = Request(prompt, parameters, weights=self._weights)
        self._running += 1
        try:
            async for _ in request.sent_to(self._engine):
                pass
        finally:
            self._running -= 1
            self._idle_since = time.monotonic()
        assert request.output is not None, "an engine answers"
        self._keep(request.output, images=tuple(media.get("image") or ()), weights=request.responses[0].weights)
        return request.output

    def _keep(
        self, output: RequestOutput, *, images: tuple[Image.Image, ...], weights: tuple[WeightSpan, ...]
    ) -> None:
        (part,) = output.outputs
        generated = tuple(part.token_ids)
        log_probs = None
        if part.logprobs is not None:
            pairs = zip(generated, part.logprobs, strict=True)
            log_probs = tuple(logprobs[token].logprob for token, logprobs in pairs)
        read = tuple(output.prompt_token_ids)
        self._calls[tuple(self._collapsed(read)), generated].append(
            EngineCall(
                read=read,
                generated=generated,
                log_probs=log_probs,
                images=images,
                finish_reason=str(part.finish_reason),
                ended_by_token=part.finish_reason == "stop" and not isinstance(part.stop_reason, str),
                weights=weights,
            )
        )

    def call_of(self, before: Sequence[int], generated: Sequence[int]) -> EngineCall:
        """Return the call that has generated tokens behind others; raises AgentFault where there was none.

        Of several that have generated the same, by other weights perhaps, each is returned once, the last one for ever.
        """
        calls = self._calls.get((tuple(self._collapsed(before)), tuple(generated)))
        if not calls:
            raise AgentFault(
                f"execute returns {len(generated)} tokens behind the first {len(before)} as generated, which the engine has "
                "not generated there; ids must go in and come out as they are, and no text be tokenized again"
            )
        return calls.pop(0) if len(calls) > 1 else calls[0]

    def forget(self) -> None:
        """Let go of all calls."""
        self._calls.clear()
