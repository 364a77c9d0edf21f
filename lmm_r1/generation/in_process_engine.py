"""vLLM's engine inside this process, behind the methods of its engine that has a process of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt
    from vllm.outputs import RequestOutput


class InProcessEngine:
    """An `LLMEngine` as a `TokenEngine`, driven by a thread of its own or by the event loop's.

    `AsyncLLM` always puts its engine into a process of its own, which imports vLLM once more (10 s on two cores) and
    exchanges every token through a socket. One thread makes every call, since `LLMEngine` allows no two at a time.
    A thread of its own goes on from step to step by itself, as the event loop's work would hold up the next step; where
    nobody else needs the event loop, its thread makes one step at each turn.

    Whatever else of PyTorch runs in this process must run in that thread, too: where two threads have each started
    OpenMP's helpers, these outnumber the cores, and GNU's OpenMP puts them to sleep between operations.
    """

    def __init__(self, make_engine: Callable[[], Any], *, own_thread: bool) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine") if own_thread else None
        self.engine = self._thread.submit(make_engine).result() if self._thread is not None else make_engine()
        self._waiting: dict[str, asyncio.Queue[RequestOutput | Exception]] = {}
        self._stepping: asyncio.Task[None] | None = None
        # Calls that the thread has not finished.
        self._calls = 0
        # Whether steps may be made; whether none is being made, and what came of the last one is with those who wait.
        self._going, self._between = asyncio.Event(), asyncio.Event()
        self._going.set()
        self._between.set()

    @property
    def output_processor(self) -> Any:
        """What OpenRLHF asks for the number of unfinished requests."""
        return self.engine.output_processor

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything; for who drives it from its own thread."""
        return self.engine.has_unfinished_requests()

    async def generate(
        self, prompt: TokensPrompt, sampling_params: SamplingParams, request_id: str
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the request's outputs; leaving early aborts it, and a failed step fails every request."""
        outputs: asyncio.Queue[RequestOutput | Exception] = asyncio.Queue()
        self._waiting[request_id] = outputs
        finished = False
        try:
            await self.call(self.engine.add_request, request_id, prompt, sampling_params)
            if self._stepping is None or self._stepping.done():
                self._stepping = asyncio.create_task(self._step_while_busy())
                # An interrupt by the user is told where it is caught, and not once more by asyncio.
                self._stepping.add_done_callback(lambda task: task.cancelled() or task.exception())
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

    async def pause_generation(
        self, *, mode: Literal["keep"], wait_for_inflight_requests: bool | None = None, clear_cache: bool = True
    ) -> None:
        """Let every request wait where it is, until `resume_generation`; what they have been given so far has come."""
        assert mode == "keep", mode
        assert not clear_cache, "it is emptied behind this"
        self._going.clear()
        # Steps without news go on until there is a call.
        await self.call(lambda: None)
        await self._between.wait()

    async def resume_generation(self) -> None:
        """Let the requests go on."""
        self._going.set()

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        return await self.call(self.engine.reset_prefix_cache, reset_running_requests)

    async def reset_encoder_cache(self) -> None:
        await self.call(self.engine.reset_encoder_cache)

    async def reset_mm_cache(self) -> None:
        await self.call(self.engine.reset_mm_cache)

    async def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return the result of a function that the engine's thread runs, between two steps."""
        if self._thread is None:
            return function(*arguments)
        self._calls += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)
        finally:
            self._calls -= 1

    async def _step_while_busy(self) -> None:
        try:
            while await self.call(self.engine.has_unfinished_requests):
                await self._going.wait()
                self._between.clear()
                try:
                    for output in await self.call(self._step_until_news):
                        if output.request_id in self._waiting:
                            self._waiting[output.request_id].put_nowait(output)
                finally:
                    self._between.set()
                # Without a thread of its own: whoever got an output acts on it before the next step.
                await asyncio.sleep(0)
        except Exception as error:  # the requests raise it where they are awaited
            for outputs in self._waiting.values():
                outputs.put_nowait(error)

    def _step_until_news(self) -> list[RequestOutput]:
        """Make steps until there are outputs or another call waits; in the event loop's thread one step."""
        outputs: list[RequestOutput] = []
        while not outputs and self.engine.has_unfinished_requests():
            outputs = self.engine.step()
            if self._calls != 1:
                break
        return outputs
