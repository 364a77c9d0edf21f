"""Requests share one engine that is only ever called from one thread."""

import asyncio
import threading
from dataclasses import dataclass

import pytest

from lmm_r1.rollout.in_process_engine import InProcessEngine

pytestmark = pytest.mark.unit


@dataclass(frozen=True)
class Output:
    request_id: str
    number: int
    finished: bool


class CountingEngine:
    """Answers each request with as many outputs as its prompt says, one per step, and notes who called it."""

    def __init__(self, *, fails_at_step=None):
        self.left, self.given, self.aborted = {}, {}, []
        self.threads, self.steps, self.fails_at_step = set(), 0, fails_at_step

    def add_request(self, request_id, prompt, params):
        self.threads.add(threading.get_ident())
        if prompt < 1:
            raise ValueError(f"prompt {prompt}")
        self.left[request_id], self.given[request_id] = prompt, 0

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
        for request_id in list(self.left):
            self.left[request_id] -= 1
            self.given[request_id] += 1
            outputs.append(Output(request_id, self.given[request_id], finished=self.left[request_id] == 0))
            if not self.left[request_id]:
                del self.left[request_id]
        return outputs

    def abort_request(self, request_ids):
        self.threads.add(threading.get_ident())
        self.aborted += request_ids
        for request_id in request_ids:
            self.left.pop(request_id, None)


async def numbers(engine, request_id, prompt):
    return [output.number async for output in engine.generate(prompt, None, request_id=request_id)]


def test_requests_run_together_and_each_gets_its_own_outputs_from_one_thread():
    counting = CountingEngine()

    async def run():
        engine = InProcessEngine(counting)
        return await asyncio.gather(*(numbers(engine, f"r{count}", count) for count in (3, 1, 5)))

    assert asyncio.run(run()) == [[1, 2, 3], [1], [1, 2, 3, 4, 5]]
    assert counting.steps < 9, "the requests were not batched"
    assert len(counting.threads) == 1
    assert threading.get_ident() not in counting.threads
    assert counting.aborted == []


def test_a_later_request_starts_the_steps_again():
    async def run():
        engine = InProcessEngine(CountingEngine())
        return await numbers(engine, "a", 2), await numbers(engine, "b", 1)

    assert asyncio.run(run()) == ([1, 2], [1])


def test_a_failed_step_fails_every_request_with_its_error():
    async def run():
        engine = InProcessEngine(CountingEngine(fails_at_step=3))
        tasks = [numbers(engine, name, 10) for name in ("a", "b")]
        return await asyncio.gather(*tasks, return_exceptions=True)

    assert [str(error) for error in asyncio.run(run())] == ["out of memory"] * 2


def test_a_refused_request_leaves_the_others_alone():
    async def run():
        engine = InProcessEngine(CountingEngine())
        return await asyncio.gather(numbers(engine, "a", 2), numbers(engine, "b", 0), return_exceptions=True)

    good, refused = asyncio.run(run())
    assert good == [1, 2]
    assert isinstance(refused, ValueError)


def test_leaving_a_request_early_aborts_it():
    counting = CountingEngine()

    async def run():
        engine = InProcessEngine(counting)
        outputs = engine.generate(1000, None, request_id="a")
        assert (await anext(outputs)).number == 1
        await outputs.aclose()

    asyncio.run(run())
    assert counting.aborted == ["a"]
    assert counting.left == {}
