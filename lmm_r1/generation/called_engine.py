"""An engine as agents of OpenRLHF's form call it, which keeps what it was given and what it gave."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from PIL import Image

from lmm_r1.agents.openrlhf_agent import AgentFault
from lmm_r1.generation.engine import TokenEngine
from lmm_r1.generation.group import GroupSettings
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


class CalledEngine:
    """May be called from any event loop; what it samples by is what training needs, and else what the agent asks for."""

    def __init__(
        self,
        engine: TokenEngine,
        *,
        collapsed: Callable[[Sequence[int]], list[int]],
        needed: Callable[[GroupSettings, int], SamplingParams],
        settings: GroupSettings,
        guesses: bool,
    ) -> None:
        """Keep to the running event loop, which is the engine's own.

        Args:
            collapsed: returns tokens with one placeholder per image.
            needed: returns what training needs of a turn for which there is room for so many tokens.
            guesses: the engine guesses tokens ahead.
        """
        self._engine = engine
        self._collapsed = collapsed
        self._needed = needed
        self._guesses = guesses
        self.settings = settings
        """Of the episodes that are played now."""
        self._home = asyncio.get_running_loop()
        self._running = 0
        self._idle_since = time.monotonic()
        self._calls: dict[tuple[tuple[int, ...], tuple[int, ...]], EngineCall] = {}

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

        most = self.settings.max_len
        if len(token_ids) >= most:
            raise ValueError(f"the prompt of {len(token_ids)} tokens leaves no room in --data.max_len {most}")
        prompt = TokensPrompt(prompt_token_ids=self._collapsed(token_ids))
        if media:
            prompt["multi_modal_data"] = dict(media)
        needed = self._needed(self.settings, most - len(token_ids))
        parameters = as_asked(asked, needed=needed, engine_guesses=self._guesses)
        output = None
        self._running += 1
        try:
            async with aclosing(self._engine.generate(prompt, parameters, uuid.uuid4().hex)) as outputs:
                async for part in outputs:
                    output = part
        finally:
            self._running -= 1
            self._idle_since = time.monotonic()
        assert output is not None, "an engine answers"
        self._keep(output, images=tuple(media.get("image") or ()))
        return output

    def _keep(self, output: RequestOutput, *, images: tuple[Image.Image, ...]) -> None:
        (part,) = output.outputs
        generated = tuple(part.token_ids)
        log_probs = None
        if part.logprobs is not None:
            pairs = zip(generated, part.logprobs, strict=True)
            log_probs = tuple(logprobs[token].logprob for token, logprobs in pairs)
        read = tuple(output.prompt_token_ids)
        self._calls[tuple(self._collapsed(read)), generated] = EngineCall(
            read=read,
            generated=generated,
            log_probs=log_probs,
            images=images,
            finish_reason=str(part.finish_reason),
            ended_by_token=part.finish_reason == "stop" and not isinstance(part.stop_reason, str),
        )

    def call_of(self, before: Sequence[int], generated: Sequence[int]) -> EngineCall:
        """Return the call that has generated tokens behind others; raises AgentFault where there was none."""
        call = self._calls.get((tuple(self._collapsed(before)), tuple(generated)))
        if call is None:
            raise AgentFault(
                f"execute returns {len(generated)} tokens behind the first {len(before)} as generated, which the engine has "
                "not generated there; ids must go in and come out as they are, and no text be tokenized again"
            )
        return call

    def forget(self) -> None:
        """Let go of all calls."""
        self._calls.clear()
