"""Requests share one engine that is only ever called from one thread."""

import asyncio
import threading
from functools import partial

import pytest
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, RequestOutput

from lmm_r1.generation.in_process_engine import InProcessEngine

pytestmark = pytest.mark.unit


def piece(request_id: str, token: int, *, index: int = 0, finished: bool, ends: bool) -> RequestOutput:
    """One token of one sample of a request, as the engine streams it."""
    completion = CompletionOutput(
        index=index,
        text="",
        token_ids=[token],
        cumulative_logprob=None,
        logprobs=[{token: Logprob(-float(token))}],
        finish_reason="length" if ends else None,
    )
    return RequestOutput(request_id, None, None, None, [completion], finished)


class CountingEngine:
    """Counts up to what each sample of a prompt says, one number per step, and notes who called it."""

    def __init__(self, *, fails_at_step=None):
        self.left, self.aborted = {}, []
        self.threads, self.steps, self.fails_at_step = {threading.get_ident()}, 0, fails_at_step

    def add_request(self, request_id, prompt, params):
        self.threads.add(threading.get_ident())
        if min(prompt) < 1:
            raise ValueError(f"prompt {prompt}")
        self.left[request_id] = {index: list(range(1, count + 1)) for index, count in enumerate(prompt)}

    def has_unfinished_requests(self):
        self.threads.add(threading.get_ident())
        return bool(self.left)

    def step(self):
        self.threads.add(threading.get_ident())
        self.steps += 1
        if self.steps == self.fails_at_step:
            self.left.clear()
            raise RuntimeError("out of memory")
        outputs = []
        for request_id, samples in list(self.left.items()):
            for index, numbers in list(samples.items()):
                token = numbers.pop(0)
                if not numbers:
                    del samples[index]
                outputs.append(piece(request_id, token, index=index, finished=not samples, ends=not numbers))
            if not samples:
                del self.left[request_id]
        return outputs

    def abort_request(self, request_ids):
        self.threads.add(threading.get_ident())
        self.aborted += request_ids
        for request_id in request_ids:
            self.left.pop(request_id, None)


async def outputs_of(engine, request_id, *prompt):
    """What comes of each sample, and the log-probs with it, each time that anything comes."""
    came = []
    async for output in engine.generate(prompt, None, request_id=request_id):
        for part in output.outputs:
            assert [-float(token) for token in part.token_ids] == [
                logprobs[token].logprob for token, logprobs in zip(part.token_ids, part.logprobs, strict=True)
            ]
        came.append({part.index: list(part.token_ids) for part in output.outputs})
    return came


def test_requests_run_together_in_one_thread_and_outputs_come_when_a_sample_ends():
    counting = CountingEngine()

    async def run():
        engine = InProcessEngine(lambda: counting)
        return await asyncio.gather(outputs_of(engine, "a", 3), outputs_of(engine, "b", 1), outputs_of(engine, "c", 5))

    a, b, c = asyncio.run(run())
    assert [sum((one[0] for one in came), []) for came in (a, b, c)] == [[1, 2, 3], [1], [1, 2, 3, 4, 5]]
    assert len(b) == 1
    # The first two steps may each have been interrupted by a request that was waiting.
    assert len(c) <= 5
    assert c[-1] == {0: [4, 5]}, "after the end of the request with three steps"
    assert counting.steps < 9, "the requests were not batched"
    assert len(counting.threads) == 2
    assert counting.aborted == []


def test_a_sample_of_a_group_comes_as_soon_as_it_ends_and_the_others_with_what_they_have():
    async def run():
        return await outputs_of(InProcessEngine(CountingEngine), "a", 2, 4, 2)

    assert asyncio.run(run()) == [{0: [1, 2], 1: [1, 2], 2: [1, 2]}, {1: [3, 4]}]


def test_a_call_waits_for_one_step_and_not_for_the_end_of_a_sample():
    counting = CountingEngine()

    async def run():
        engine = InProcessEngine(lambda: counting)
        request = asyncio.create_task(outputs_of(engine, "a", 100_000))
        while not counting.steps:
            await asyncio.sleep(0.001)
        steps, thread = await engine.call(lambda: (counting.steps, threading.get_ident()))
        request.cancel()
        return steps, thread

    steps, thread = asyncio.run(run())
    assert 0 < steps < 100_000
    assert thread in counting.threads
    assert thread != threading.get_ident()


def test_a_later_request_starts_the_steps_again():
    async def run():
        engine = InProcessEngine(CountingEngine)
        return await outputs_of(engine, "a", 2), await outputs_of(engine, "b", 1)

    assert asyncio.run(run()) == ([{0: [1, 2]}], [{0: [1]}])


def test_a_failed_step_fails_every_request_with_its_error():
    async def run():
        engine = InProcessEngine(partial(CountingEngine, fails_at_step=3))
        tasks = [outputs_of(engine, name, 10) for name in ("a", "b")]
        return await asyncio.gather(*tasks, return_exceptions=True)

    assert [str(error) for error in asyncio.run(run())] == ["out of memory"] * 2


def test_a_refused_request_leaves_the_others_alone():
    async def run():
        engine = InProcessEngine(CountingEngine)
        return await asyncio.gather(outputs_of(engine, "a", 2), outputs_of(engine, "b", 0), return_exceptions=True)

    good, refused = asyncio.run(run())
    assert sum((one[0] for one in good), []) == [1, 2]
    assert isinstance(refused, ValueError)


def test_leaving_a_request_early_aborts_it():
    counting = CountingEngine()

    async def run():
        engine = InProcessEngine(lambda: counting)
        outputs = engine.generate((1, 1000), None, request_id="a")
        assert [part.index for part in (await anext(outputs)).outputs] == [0, 1]
        await outputs.aclose()

    asyncio.run(run())
    assert counting.aborted == ["a"]
    assert counting.left == {}
