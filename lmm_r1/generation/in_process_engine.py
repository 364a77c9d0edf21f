"""vLLM's engine inside the rollout actor, for machines without CUDA."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any


class InProcessEngine:
    """An `LLMEngine` behind the methods of vLLM's `AsyncLLM` that rollouts call, driven by one thread.

    `AsyncLLM` always puts its engine into a process of its own, which imports vLLM once more (10 s on two cores) and
    exchanges every token through a socket. One thread makes every call, since `LLMEngine` allows no two at a time; it
    goes on from step to step by itself, since the event loop's work on every token would hold up the next step.

    Whatever else of PyTorch runs in this process must run in that thread, too: where two threads have each started
    OpenMP's helpers, these outnumber the cores, and GNU's OpenMP puts them to sleep between operations.
    """

    def __init__(self, make_engine: Callable[[], Any]) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine")
        self.engine = self._thread.submit(make_engine).result()
        self._waiting: dict[str, asyncio.Queue[Any]] = {}
        self._stepping: asyncio.Task[None] | None = None
        # Calls that the thread has not finished.
        self._calls = 0

    @classmethod
    def from_engine_args(cls, arguments: Any) -> InProcessEngine:
        """Build the engine that `AsyncLLM.from_engine_args` would build."""
        from vllm.v1.engine.llm_engine import LLMEngine

        return cls(partial(LLMEngine.from_engine_args, arguments, enable_multiprocessing=False))

    @property
    def output_processor(self) -> Any:
        """What OpenRLHF asks for the number of unfinished requests."""
        return self.engine.output_processor

    async def generate(self, prompt: Any, sampling_params: Any, request_id: str) -> AsyncIterator[Any]:
        """Yield the request's outputs, those between two finished samples as one; leaving early aborts it.

        A failed step fails every request.
        """
        outputs: asyncio.Queue[Any] = asyncio.Queue()
        self._waiting[request_id] = outputs
        finished = False
        try:
            await self.call(self.engine.add_request, request_id, prompt, sampling_params)
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
                await self.call(self.engine.abort_request, [request_id])

    async def collective_rpc(
        self, method: str, timeout: float | None = None, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> list[Any]:
        """Call a method of every vLLM worker and return their results."""
        return await self.call(self.engine.collective_rpc, method, timeout, args, kwargs)

    async def reset_prefix_cache(self) -> bool:
        return await self.call(self.engine.reset_prefix_cache)

    async def reset_encoder_cache(self) -> None:
        await self.call(self.engine.reset_encoder_cache)

    async def reset_mm_cache(self) -> None:
        await self.call(self.engine.reset_mm_cache)

    async def _step_while_busy(self) -> None:
        try:
            while await self.call(self.engine.has_unfinished_requests):
                for output in await self.call(self._step_until_news):
                    if output.request_id in self._waiting:
                        self._waiting[output.request_id].put_nowait(output)
        except Exception as error:  # the requests raise it where they are awaited
            for outputs in self._waiting.values():
                outputs.put_nowait(error)

    def _step_until_news(self) -> list[Any]:
        """Make steps until a sample is finished or another call waits; return one output per request."""
        outputs: dict[str, Any] = {}
        news = False
        while not news and self._calls == 1 and self.engine.has_unfinished_requests():
            for output in self.engine.step():
                news |= output.finished or any(part.finish_reason is not None for part in output.outputs)
                if output.request_id in outputs:
                    outputs[output.request_id].add(output, aggregate=True)
                else:
                    outputs[output.request_id] = output
        return list(outputs.values())

    async def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return the result of a function that the engine's thread runs, between two steps."""
        self._calls += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)
        finally:
            self._calls -= 1
