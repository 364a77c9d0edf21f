"""vLLM's engine inside the rollout actor, for machines without CUDA."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any


class InProcessEngine:
    """An `LLMEngine` behind the methods of vLLM's `AsyncLLM` that rollouts call, driven by one thread.

    `AsyncLLM` always puts its engine into a process of its own, which imports vLLM once more (10 s on two cores) and
    exchanges every token through a socket. One thread makes every call, since `LLMEngine` allows no two at a time.
    """

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine")
        self._waiting: dict[str, asyncio.Queue[Any]] = {}
        self._stepping: asyncio.Task[None] | None = None

    @classmethod
    def from_engine_args(cls, arguments: Any) -> InProcessEngine:
        """Build the engine that `AsyncLLM.from_engine_args` would build."""
        from vllm.v1.engine.llm_engine import LLMEngine

        return cls(LLMEngine.from_engine_args(arguments, enable_multiprocessing=False))

    @property
    def output_processor(self) -> Any:
        """What OpenRLHF asks for the number of unfinished requests."""
        return self.engine.output_processor

    async def generate(self, prompt: Any, sampling_params: Any, request_id: str) -> AsyncIterator[Any]:
        """Yield the request's outputs as they come; leaving early aborts it. A failed step fails every request."""
        outputs: asyncio.Queue[Any] = asyncio.Queue()
        self._waiting[request_id] = outputs
        finished = False
        try:
            await self._call(self.engine.add_request, request_id, prompt, sampling_params)
            if self._stepping is None or self._stepping.done():
                self._stepping = asyncio.create_task(self._step_while_busy())
            while not finished:
                output = await outputs.get()
                if isinstance(output, Exception):
                    finished = True
                    raise output
                finished = output.finished
                yield output
        finally:
            del self._waiting[request_id]
            if not finished:
                await self._call(self.engine.abort_request, [request_id])

    async def collective_rpc(
        self, method: str, timeout: float | None = None, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> list[Any]:
        """Call a method of every vLLM worker and return their results."""
        return await self._call(self.engine.collective_rpc, method, timeout, args, kwargs)

    async def reset_prefix_cache(self) -> bool:
        return await self._call(self.engine.reset_prefix_cache)

    async def reset_encoder_cache(self) -> None:
        await self._call(self.engine.reset_encoder_cache)

    async def reset_mm_cache(self) -> None:
        await self._call(self.engine.reset_mm_cache)

    async def _step_while_busy(self) -> None:
        try:
            while await self._call(self.engine.has_unfinished_requests):
                for output in await self._call(self.engine.step):
                    if output.request_id in self._waiting:
                        self._waiting[output.request_id].put_nowait(output)
        except Exception as error:  # the requests raise it where they are awaited
            for outputs in self._waiting.values():
                outputs.put_nowait(error)

    async def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)
