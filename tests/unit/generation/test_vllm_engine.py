"""Rows and chats outside of training, on an engine whose responses count."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.conversations import message, picture, row
from helpers.scripted_engines import ENGINE, CountingEngine

from lmm_r1 import cpu
from lmm_r1.data.messages import ImagePart, Row
from lmm_r1.generation import vllm_engine
from lmm_r1.generation.engine import SamplingSettings
from lmm_r1.generation.vllm_engine import VllmEngine

SETTINGS = replace(ENGINE, max_images=1)
ONE = SamplingSettings(n_samples=1, temperature=0.0, top_p=1.0, max_new_tokens=100)
BAD = row(message("user", ImagePart("/nowhere.png"), "?"))


@pytest.fixture
def load(
    tiny_checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[CountingEngine], VllmEngine]]:
    """Returns a function that puts a counting engine in the place of vLLM's."""
    loaded: list[VllmEngine] = []

    def put(counting: CountingEngine) -> VllmEngine:
        monkeypatch.setattr(vllm_engine, "LLM", lambda **arguments: SimpleNamespace(llm_engine=counting))
        loaded.append(VllmEngine(str(tiny_checkpoint("qwen2_5_vl")), SETTINGS))
        return loaded[-1]

    monkeypatch.setattr(cpu, "has_cuda", lambda: False)
    yield put
    for engine in loaded:
        if hasattr(engine, "engine"):
            engine.close()


def questions(*texts: str) -> list[tuple[int, Row]]:
    return list(enumerate(row(message("user", text)) for text in texts))


def length(prompt: dict) -> int:
    return len(prompt["prompt_token_ids"])


def test_a_completion_says_how_the_prompts_images_were_scaled(load):
    rows = [(0, row(message("user", picture(40, 30), "?"))), (1, row(message("user", "?")))]
    outcomes = {outcome.index: outcome for outcome in load(CountingEngine(lambda prompt: [1])).respond(rows, ONE)}
    # Shown as 3 x 2 squares of 28 x 28 pixels.
    assert [outcomes[index].completions[0].image_scales for index in (0, 1)] == [((40 / 84, 30 / 56),), ()]


def test_rows_come_as_they_end_and_a_bad_one_stops_no_other(load):
    counting = CountingEngine(lambda prompt: [length(prompt)])
    engine = load(counting)
    rows = [*questions("a long question", "short"), (2, BAD)]
    outcomes = list(engine.respond(rows, ONE))
    assert [outcome.index for outcome in outcomes] == [2, 1, 0]
    assert "no image file /nowhere.png" in outcomes[0].reason
    assert [outcome.reason for outcome in outcomes[1:]] == [None, None]
    (shorter,), (longer,) = (outcome.completions for outcome in outcomes[1:])
    assert shorter.num_tokens == length(engine.codec.engine_prompt(engine.codec.encode(rows[1][1])))
    assert shorter.num_tokens < longer.num_tokens
    assert shorter.finish_reason == "length"
    assert counting.aborted == []


def test_leaving_early_aborts_what_runs(load):
    counting = CountingEngine(lambda prompt: [length(prompt) ** 2])
    engine = load(counting)
    outcomes = engine.respond(questions("a", "a longer one", "one that is longer still"), ONE)
    assert next(outcomes).index == 0
    outcomes.close()
    assert len(counting.aborted) == 2
    assert counting.left == {}
    assert len(list(engine.respond(questions("?"), ONE))) == 1, "the engine goes on"


def test_a_response_that_was_broken_off_is_told_with_its_row(load):
    engine = load(CountingEngine(lambda prompt: [3], ends=lambda prompt: "stop" if length(prompt) < 30 else "error"))
    good, broken = engine.respond(questions("?", "long " * 20), ONE)
    assert (good.reason, good.completions[0].finish_reason) == (None, "stop")
    assert broken.reason == "rows.jsonl, line 1: vLLM aborted a response (error)"
    assert broken.completions == ()


def test_a_step_that_fails_is_raised(load, caplog):
    counting = CountingEngine(lambda prompt: [5], fails_at_step=3)
    engine = load(counting)
    with caplog.at_level(logging.ERROR, logger="asyncio"), pytest.raises(RuntimeError, match="out of memory"):
        list(engine.respond(questions("a", "b"), ONE))
    counting.fails_at_step = counting.steps + 2
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.stream(row(message("user", "?")), ONE, on_text=lambda text: None, should_stop=lambda: False)
    engine.close()
    assert not caplog.records
    assert not counting.running


def test_an_answer_is_streamed_token_by_token(load):
    counting = CountingEngine(lambda prompt: [40], ends=lambda prompt: "stop")
    engine = load(counting)
    came: list[tuple[int, str]] = []
    answer = engine.stream(
        row(message("user", "?")),
        ONE,
        on_text=lambda text: came.append((counting.steps, text)),
        should_stop=lambda: False,
    )
    assert (answer.num_tokens, answer.finish_reason) == (40, "stop")
    assert answer.text == engine.codec.text(list(range(1, 41)), ended=True)
    assert "".join(text for _, text in came) == answer.text
    steps = [step for step, _ in came]
    assert len(set(steps)) == len(steps) > 20


def test_an_answer_that_is_to_stop_stops_before_the_next_step(load):
    counting = CountingEngine(lambda prompt: [1000])
    engine = load(counting)
    pieces: list[str] = []
    answer = engine.stream(
        row(message("user", "?")), ONE, on_text=pieces.append, should_stop=lambda: counting.steps >= 7
    )
    # The token of the seventh step is not waited for.
    assert (answer.num_tokens, answer.finish_reason) == (6, "aborted")
    assert "".join(pieces) == answer.text
    assert len(counting.aborted) == 1
    assert counting.left == {}
    assert counting.steps == 7


def test_an_interrupt_leaves_no_request_behind_and_nothing_for_asyncio_to_tell(load, caplog, monkeypatch):
    counting = CountingEngine(lambda prompt: [50])
    engine = load(counting)
    step = counting.step

    def interrupted() -> list:
        if counting.steps == 3:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(counting, "step", interrupted)
    with caplog.at_level(logging.ERROR, logger="asyncio"), pytest.raises(KeyboardInterrupt):
        list(engine.respond(questions("a", "b"), ONE))
    engine.close()
    assert counting.left == {}
    assert not caplog.records
