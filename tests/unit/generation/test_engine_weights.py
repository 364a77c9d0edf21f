"""Which weights the tokens of a request came of that an update has come in the middle of."""

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.scripted_engines import CountingEngine

from lmm_r1.data.sample import WeightSpan
from lmm_r1.generation.engine import SamplingSettings
from lmm_r1.generation.request import EngineWeights, Request, Response, sampling_params
from lmm_r1.generation.turns import first_tokens
from lmm_r1.generation.vllm_engine import InProcessEngine


def parameters(n: int) -> Any:
    sampling = SamplingSettings(n_samples=n, temperature=1.0, top_p=1.0, max_new_tokens=None)
    return sampling_params(sampling, max_tokens=1000, end_token_id=0, output_per="response")


class Held:
    """An engine that ends its first response at once, and the others when it is let go."""

    def __init__(self) -> None:
        self.begun, self.goes_on = asyncio.Event(), asyncio.Event()
        self.request_id = ""

    async def generate(self, prompt: Any, parameters: Any, request_id: str) -> AsyncIterator[SimpleNamespace]:
        self.request_id = request_id
        yield of(0, 4, finish="stop")
        self.begun.set()
        await self.goes_on.wait()
        yield of(1, 9, finish="stop")
        yield of(2, 6, finish="length")


def of(index: int, tokens: int, *, finish: str) -> SimpleNamespace:
    part = SimpleNamespace(
        index=index, token_ids=list(range(tokens)), logprobs=None, finish_reason=finish, stop_reason=None
    )
    return SimpleNamespace(outputs=[part], prompt_token_ids=None)


def test_tokens_are_told_apart_where_updates_came_and_ended_responses_are_left_alone():
    async def run() -> list[Response]:
        engine, weights = Held(), EngineWeights(version=5)
        request = Request({}, parameters(3), weights=weights)

        async def whole() -> None:
            async for _ in request.sent_to(engine):
                pass

        task = asyncio.create_task(whole())
        await engine.begun.wait()
        # The third has not begun with its first token at the first update.
        weights.replaced({engine.request_id: {1: 3, 2: 0}})
        weights.replaced({engine.request_id: {1: 7, 2: 2}})
        engine.goes_on.set()
        await task
        # Nobody asks for one that is over.
        weights.replaced({})
        return request.responses

    first, second, third = asyncio.run(run())
    assert first.weights == ((5, 4),)
    assert second.weights == ((5, 3), (6, 4), (7, 2))
    assert third.weights == ((6, 2), (7, 4))


def test_a_request_that_the_engine_has_not_begun_is_of_the_new_weights_as_a_whole():
    weights = EngineWeights()
    request = Request({}, parameters(2), weights=weights)
    for response in request.responses:
        response.begins = [(0, 0)]
    weights.under_way["a"] = request
    weights.replaced({"b": {0: 7}})
    for response in request.responses:
        response.token_ids = [1, 2, 3]
    assert [response.weights for response in request.responses] == [((1, 3),), ((1, 3),)]


def test_a_turn_keeps_the_versions_of_the_tokens_that_it_keeps():
    spans = (WeightSpan(1, 4), WeightSpan(2, 3))
    assert first_tokens(spans, 5) == ((1, 4), (2, 1))
    assert first_tokens(spans, 4) == ((1, 4),)
    assert first_tokens(spans, 9) == spans


@pytest.mark.parametrize("own_thread", [True, False])
def test_a_paused_engine_makes_no_step_takes_calls_and_requests_and_goes_on(own_thread):
    counting = CountingEngine()

    async def run() -> tuple[int, int, list[int]]:
        engine = InProcessEngine(lambda: counting, own_thread=own_thread)
        lengths: list[int] = []

        async def whole(length: int) -> None:
            async for output in engine.generate((length,), parameters(1), request_id=str(length)):
                lengths.extend(output.outputs[0].token_ids)

        first = asyncio.create_task(whole(5000))
        while counting.steps < 10:
            await asyncio.sleep(0.001)
        await engine.pause_generation(mode="keep", clear_cache=False)
        steps = counting.steps
        second = asyncio.create_task(whole(3))
        assert await engine.call(lambda: "called") == "called"
        await asyncio.sleep(0.05)
        held = counting.steps
        assert not second.done()
        await engine.resume_generation()
        await asyncio.gather(first, second)
        return steps, held, lengths

    steps, held, lengths = asyncio.run(run())
    assert steps == held < 5000
    assert sorted(lengths) == sorted([*range(1, 5001), *range(1, 4)])
