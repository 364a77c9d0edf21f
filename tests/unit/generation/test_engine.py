"""What both sides use of a vLLM engine is what vLLM's own has."""

import inspect

import pytest
from vllm.v1.engine.async_llm import AsyncLLM

from lmm_r1.generation.engine import TokenEngine
from lmm_r1.generation.vllm_engine import InProcessEngine

METHODS = [name for name, value in vars(TokenEngine).items() if inspect.isfunction(value) and not name.startswith("_")]


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("engine", [AsyncLLM, InProcessEngine])
def test_a_method_is_called_on_each_engine_alike(engine: type, name: str) -> None:
    wanted = list(inspect.signature(getattr(TokenEngine, name)).parameters.values())
    has = list(inspect.signature(getattr(engine, name)).parameters.values())
    assert [one.name for one in has[: len(wanted)]] == [one.name for one in wanted]
    assert all(one.default is not inspect.Parameter.empty for one in has[len(wanted) :]), "more that must be given"


def test_the_engine_is_asked_for_responses_is_held_up_and_forgets_in_three_ways() -> None:
    assert METHODS == [
        "generate",
        "collective_rpc",
        "pause_generation",
        "resume_generation",
        "reset_prefix_cache",
        "reset_encoder_cache",
        "reset_mm_cache",
    ]
