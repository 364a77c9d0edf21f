"""Requests share one engine that is only ever called from one thread."""

import asyncio
import threading
from functools import partial

import pytest
from helpers.scripted_engines import CountingEngine

from lmm_r1.generation.engine import SamplingSettings
from lmm_r1.generation.request import sampling_params
from lmm_r1.generation.vllm_engine import InProcessEngine

in_own_thread = partial(InProcessEngine, own_thread=True)
both = pytest.mark.parametrize("own_thread", [True, False])


def asked(n, *, output_per="response"):
    """Parameters of a request with n samples."""
    sampling = SamplingSettings(n_samples=n, temperature=1.0, top_p=1.0, max_new_tokens=None)
    return sampling_params(sampling, max_tokens=1_000_000, end_token_id=0, output_per=output_per)


async def outputs_of(engine, request_id, *prompt, output_per="response"):
    """What comes of each sample, and the log-probs with it, each time that anything comes."""
    came = []
    parameters = asked(len(prompt), output_per=output_per)
    async for output in engine.generate(prompt, parameters, request_id=request_id):
        for part in output.outputs:
            assert [-float(token) for token in part.token_ids] == [
                logprobs[token].logprob for token, logprobs in zip(part.token_ids, part.logprobs, strict=True)
            ]
        came.append({part.index: list(part.token_ids) for part in output.outputs})
    return came


@both
def test_requests_run_together_in_one_thread_and_outputs_come_when_a_sample_ends(own_thread):
    counting = CountingEngine()

    async def run():
        engine = InProcessEngine(lambda: counting, own_thread=own_thread)
        return await asyncio.gather(outputs_of(engine, "a", 3), outputs_of(engine, "b", 1), outputs_of(engine, "c", 5))

    a, b, c = asyncio.run(run())
    assert [sum((one[0] for one in came), []) for came in (a, b, c)] == [[1, 2, 3], [1], [1, 2, 3, 4, 5]]
    assert len(b) == 1
    assert c == [{0: [1]}, {0: [2, 3, 4, 5]}]
    assert counting.steps < 9, "the requests were not batched"
    assert len(counting.threads) == 1 + own_thread
    assert counting.aborted == []


@both
def test_outputs_come_per_token_where_the_request_asks_for_it_and_all_at_the_end_where_not(own_thread):
    async def run(output_per):
        engine = InProcessEngine(CountingEngine, own_thread=own_thread)
        return await outputs_of(engine, "a", 3, 2, output_per=output_per)

    assert asyncio.run(run("token")) == [{0: [1]}, {1: [1]}, {0: [2]}, {1: [2]}, {0: [3]}]
    assert asyncio.run(run("prompt")) == [{0: [1, 2, 3], 1: [1, 2]}]


def test_a_call_waits_for_one_step_and_not_for_the_end_of_a_sample():
    counting = CountingEngine()

    async def run():
        engine = in_own_thread(lambda: counting)
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


@both
def test_a_failed_step_fails_every_request_with_its_error(own_thread):
    async def run():
        engine = InProcessEngine(partial(CountingEngine, fails_at_step=3), own_thread=own_thread)
        tasks = [outputs_of(engine, name, 10) for name in ("a", "b")]
        return await asyncio.gather(*tasks, return_exceptions=True)

    assert [str(error) for error in asyncio.run(run())] == ["out of memory"] * 2


def test_a_refused_request_leaves_the_others_alone():
    async def run():
        engine = in_own_thread(CountingEngine)
        return await asyncio.gather(outputs_of(engine, "a", 2), outputs_of(engine, "b", 0), return_exceptions=True)

    good, refused = asyncio.run(run())
    assert sum((one[0] for one in good), []) == [1, 2]
    assert isinstance(refused, ValueError)


@both
def test_leaving_a_request_early_aborts_it(own_thread):
    counting = CountingEngine()

    async def run():
        engine = InProcessEngine(lambda: counting, own_thread=own_thread)
        outputs = engine.generate((1, 1000), asked(2), request_id="a")
        assert [(await anext(outputs)).outputs[0].index for _ in range(2)] == [0, 1]
        await outputs.aclose()

    asyncio.run(run())
    assert counting.aborted == ["a"]
    assert counting.left == {}
