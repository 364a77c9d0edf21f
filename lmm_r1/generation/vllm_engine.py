"""A checkpoint in vLLM, in this process."""

from __future__ import annotations

import asyncio
import atexit
import gc
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from vllm import LLM

from lmm_r1 import cpu
from lmm_r1.data.messages import Row
from lmm_r1.data.sample import WHOLE, Completion
from lmm_r1.errors import UserError
from lmm_r1.generation.engine import (
    EngineSettings,
    Outcome,
    SamplingSettings,
    end_tasks,
    merged_checkpoint,
    outcomes_in,
)
from lmm_r1.generation.engine_arguments import engine_arguments, free_share
from lmm_r1.generation.request import LimitedCodec, Request, Response, hand_on, sampling_params
from lmm_r1.generation.worker_extension import FileWeights
from lmm_r1.lmm_kits import EncodedPrompt

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt
    from vllm.outputs import RequestOutput


class InProcessEngine:
    """An `LLMEngine` as a `TokenEngine`, driven by a thread of its own or by the event loop's.

    `AsyncLLM` always starts its engine in a separate process, which imports vLLM once more (10 s on two cores) and
    exchanges every token through a socket. One thread makes all calls, because `LLMEngine` is not thread-safe.
    With a thread of its own, steps do not wait for the event loop's other work; without one, the event loop's thread makes
    one step per turn.

    All other PyTorch code must run in this thread: if two threads start OpenMP pools, their threads outnumber the cores,
    and GNU's OpenMP puts them to sleep between operations.
    """

    def __init__(self, make_engine: Callable[[], Any], *, own_thread: bool) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine") if own_thread else None
        self.engine = self._thread.submit(make_engine).result() if self._thread is not None else make_engine()
        self._waiting: dict[str, asyncio.Queue[RequestOutput | Exception]] = {}
        self._stepping: asyncio.Task[None] | None = None
        # The number of unfinished calls.
        self._calls = 0
        # Whether steps may be made; whether no step is in progress and the outputs of the last one are delivered.
        self._going, self._between = asyncio.Event(), asyncio.Event()
        self._going.set()
        self._between.set()

    @property
    def output_processor(self) -> Any:
        """The output processor, which OpenRLHF reads for the number of unfinished requests."""
        return self.engine.output_processor

    @property
    def has_work(self) -> bool:
        """Whether there are unfinished requests."""
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
                # The caller reports the interrupt; asyncio must not report it again.
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
        """Pause all requests until `resume_generation`; all outputs so far have been delivered."""
        assert mode == "keep", mode
        assert not clear_cache, "the caller clears the cache afterwards"
        self._going.clear()
        # Steps without outputs continue until there is a call.
        await self.call(lambda: None)
        await self._between.wait()

    async def resume_generation(self) -> None:
        """Resume the requests."""
        self._going.set()

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        return await self.call(self.engine.reset_prefix_cache, reset_running_requests)

    async def reset_encoder_cache(self) -> None:
        await self.call(self.engine.reset_encoder_cache)

    async def reset_mm_cache(self) -> None:
        await self.call(self.engine.reset_mm_cache)

    async def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Run a function in the engine's thread between two steps, and return its result."""
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
                # Without a thread of its own: outputs are handled before the next step.
                await asyncio.sleep(0)
        except Exception as error:  # the requests raise it where they are awaited
            for outputs in self._waiting.values():
                outputs.put_nowait(error)

    def _step_until_news(self) -> list[RequestOutput]:
        """Make steps until there are outputs or another call waits; one step in the event loop's thread."""
        outputs: list[RequestOutput] = []
        while not outputs and self.engine.has_unfinished_requests():
            outputs = self.engine.step()
            if self._calls != 1:
                break
        return outputs


# While the engine is idle, wait for tools of episodes without a busy loop.
IDLE_TURNS = 10
IDLE_S = 0.01
# An engine's process gives its worker 5 s to end, and 4 s more, before it releases shared memory. vLLM would kill it
# after 5 s, and leak that memory.
_ENDING_S = 30.0


def arguments_of(folder: str, *, codec: LimitedCodec, settings: EngineSettings) -> dict[str, object]:
    """Return arguments of vLLM's `EngineArgs` and `LLM` for an engine outside of training.

    Args:
        folder: the checkpoint without adapters.
    """
    share = settings.gpu_memory_utilization
    if share is None:
        share = free_share(
            codec.config,
            kit=codec.kit,
            dtype=settings.dtype,
            max_len=codec.max_len,
            responses=settings.responses,
            gpus=settings.tensor_parallel_size,
        )
    arguments = engine_arguments(
        folder,
        kit=codec.kit,
        config=codec.config,
        trust_remote_code=settings.trust_remote_code,
        dtype=settings.dtype,
        max_model_len=codec.max_len,
        max_images=settings.max_images,
        max_videos=settings.max_videos,
        tensor_parallel_size=settings.tensor_parallel_size,
        gpu_memory_utilization=share,
        enforce_eager=settings.enforce_eager,
        speculation=settings.speculation,
    )
    extension = f"{FileWeights.__module__}.{FileWeights.__qualname__}"
    return arguments | {"seed": settings.seed, "worker_extension_cls": extension}


class VllmEngine:
    """Adds rows to vLLM as earlier ones end, so that it is never idle between batches."""

    def __init__(self, path: str, settings: EngineSettings) -> None:
        self.codec = LimitedCodec(path, settings)
        self.guesses = settings.speculation is not None
        self.responses = settings.responses
        with merged_checkpoint(path, settings) as folder:
            arguments = arguments_of(folder, codec=self.codec, settings=settings)
            self.engine = InProcessEngine(lambda: LLM(**arguments).llm_engine, own_thread=False)
        atexit.register(_leave_group)
        self._loop = asyncio.new_event_loop()
        # On a CPU, all PyTorch code runs in the engine's thread: see InProcessEngine.
        self._beside = ThreadPoolExecutor(max_workers=1, thread_name_prefix="beside")
        banned = (self.codec.banned_token_ids,)
        self._loop.run_until_complete(self.engine.collective_rpc("ban_tokens", args=banned))

    def respond(self, rows: Iterable[tuple[int, Row]], sampling: SamplingSettings) -> Iterator[Outcome]:
        """Yield the outcome of each (index, row), in the order in which they end."""
        outcome_of = partial(self._outcome, sampling=sampling)
        return self.outcomes(rows, outcome_of, responses_per_row=sampling.n_samples)

    def outcomes(
        self,
        source: Iterable[tuple[int, Row]],
        outcome_of: Callable[[int, Row], Coroutine[Any, Any, Outcome]],
        *,
        responses_per_row: int,
    ) -> Iterator[Outcome]:
        """Yield what `outcome_of` returns for each (index, row), in the order in which they end.

        `outcome_of` sends requests to `engine`, for several rows at a time.
        """
        return outcomes_in(self._loop, source, outcome_of, at_once=max(2, self.responses // responses_per_row))

    def stream(
        self, row: Row, sampling: SamplingSettings, *, on_text: Callable[[str], None], should_stop: Callable[[], bool]
    ) -> Completion:
        """Return one response, reporting its text as it grows; raises UserError for a row that the engine refuses."""
        request = self._request_of(self.codec.encode(row), sampling, output_per="token")
        [response] = request.responses
        self.run(hand_on(request, self.engine, codec=self.codec, on_text=on_text), should_stop=should_stop)
        return self._completion(response)

    def run(self, work: Coroutine[Any, Any, None], *, should_stop: Callable[[], bool]) -> None:
        """Run a coroutine that sends requests to `engine`; if `should_stop`, cancel it and abort its requests.

        Raises what the coroutine raises.
        """

        async def watched() -> None:
            task, idle_turns = asyncio.ensure_future(work), 0
            try:
                while not (task.done() or should_stop()):
                    idle_turns = 0 if self.engine.has_work else idle_turns + 1
                    await (asyncio.sleep(0) if idle_turns <= IDLE_TURNS else asyncio.wait({task}, timeout=IDLE_S))
            finally:
                task.cancel()
                await asyncio.wait({task})
            if not task.cancelled():
                task.result()

        watching = self._loop.create_task(watched())
        try:
            self._loop.run_until_complete(watching)
        finally:
            end_tasks(self._loop, {watching})

    async def in_thread(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Run a function in another thread, one at a time, and return its result; on a CPU, in the engine's thread."""
        if cpu.has_cuda():
            return await self._loop.run_in_executor(self._beside, partial(function, *arguments))
        return function(*arguments)

    def close(self) -> None:
        """Stop the engine and free its memory."""
        end_tasks(self._loop, asyncio.all_tasks(self._loop))
        self._loop.close()
        self._beside.shutdown(wait=False)
        self.engine.engine.engine_core.shutdown(timeout=_ENDING_S)
        del self.engine
        gc.collect()

    async def _outcome(self, index: int, row: Row, *, sampling: SamplingSettings) -> Outcome:
        began = time.perf_counter()
        try:
            encoded = self.codec.encode(row)
            request = self._request_of(encoded, sampling, output_per="prompt")
            async for _ in request.sent_to(self.engine):
                pass
            if request.broken:
                raise UserError(f"{row.location}: vLLM aborted a response ({next(iter(request.broken))})")
        except UserError as error:
            return Outcome(index=index, row=row, reason=str(error))
        begun = self.codec.begun_with(row, request.prompt["prompt_token_ids"])
        completions = tuple(
            replace(one, text=begun + one.text, image_scales=encoded.image_scales)
            for one in map(self._completion, request.responses)
        )
        return Outcome(index=index, row=row, completions=completions, seconds=time.perf_counter() - began)

    def _request_of(
        self, encoded: EncodedPrompt, sampling: SamplingSettings, *, output_per: Literal["token", "prompt"]
    ) -> Request:
        parameters = sampling_params(
            sampling,
            max_tokens=self.codec.room(encoded, max_new_tokens=sampling.max_new_tokens),
            end_token_id=self.codec.tokenizer.eos_token_id,
            output_per=output_per,
        )
        return Request(self.codec.engine_prompt(encoded), parameters)

    def _completion(self, response: Response) -> Completion:
        end = response.finish_reason if response.finish_reason in WHOLE else "aborted"
        return self.codec.completion(response.token_ids, end)


def _leave_group() -> None:
    """Leave the process group that vLLM set up in this process; NCCL warns about a remaining one."""
    from vllm.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel

    destroy_model_parallel()
    destroy_distributed_environment()
