"""The judge beside the rule `exact`: who is asked, what is paid, and what goes on when the judge does not answer."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web
from helpers.judge_server import Answer, Asked, JudgeServer, completion, failure, fair

from remote_rm import llm_judge as asker_module
from remote_rm.llm_judge import AskingJudge
from remote_rm.llm_judge_verifier import LlmJudge
from remote_rm.service.pool import VerifierPool, judge_of
from remote_rm.verifier import Item, NotReady, Score

ASKED = {"judge_asked": 1.0, "judge_disagrees": 0.0, "judged_by_rule": 0.0}
OVERRULED = ASKED | {"judge_disagrees": 1.0}
NOT_ASKED = dict.fromkeys(ASKED, 0.0)
FAILED = NOT_ASKED | {"judged_by_rule": 1.0}


@pytest.fixture(autouse=True)
def _without_workers(monkeypatch):
    """The rule is quick, so that its workers need not be started; and no pause between attempts."""

    async def nothing(self: VerifierPool) -> None:
        pass

    monkeypatch.setattr(VerifierPool, "start", nothing)
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.01)


def item(answer: str, label: str = "Paris", *, question: str = "The capital?") -> Item:
    return Item(prompt=question, response=f"<think>so</think><answer>{answer}</answer>", label=label)


def parts(score: Score) -> dict[str, float]:
    return {name: value for name, value in score.parts.items() if name.startswith("judge")}


def verifier(url: str, folder: Path, **settings: object) -> LlmJudge:
    return LlmJudge(
        **({"judge_url": url, "judge_folder": str(folder), "judge_rule": "exact", "judge_model": "m"} | settings)
    )


@asynccontextmanager
async def judging(asks: LlmJudge) -> AsyncIterator[AskingJudge]:
    judge = judge_of(asks, workers=1, item_timeout_seconds=5.0)
    assert isinstance(judge, AskingJudge)
    await judge.start()
    try:
        yield judge
    finally:
        await judge.stop()


def run(answer: Answer, scenario: Callable[[JudgeServer], Awaitable[object]]) -> object:
    async def whole() -> object:
        async with JudgeServer(answer) as server:
            return await scenario(server)

    return asyncio.run(asyncio.wait_for(whole(), timeout=60))


def judged(answer: Answer, items: list[Item], folder: Path, **settings: object):
    """The scores of one call, and what the judge was asked."""

    async def scenario(server: JudgeServer):
        async with judging(verifier(server.url, folder, **settings)) as judge:
            return await judge.judge(items), server.asked

    return run(answer, scenario)


def test_the_judge_is_asked_only_where_the_rule_does_not_say_right(tmp_path):
    scores, asked = judged(fair, [item("Paris"), item("PARIS"), item("Rome"), item("")], tmp_path)
    assert [(score.reward, score.score) for score in scores] == [(1.5, 1.0), (1.5, 1.0), (0.5, 0.0), (0.0, 0.0)]
    assert [parts(score) for score in scores] == [NOT_ASKED, OVERRULED, ASKED, NOT_ASKED]
    assert {frozenset(score.parts) for score in scores} == {frozenset({"accuracy", "format", *ASKED})}
    assert sorted(request.answer for request in asked) == ["PARIS", "Rome"]
    assert {(request.question, request.reference) for request in asked} == {("The capital?", "Paris")}
    assert (asked[0].body["model"], asked[0].body["temperature"]) == ("m", 0.0)


def test_what_is_the_same_is_asked_once_and_never_again_after_a_restart(tmp_path):
    async def scenario(server: JudgeServer):
        asks = verifier(server.url, tmp_path)
        async with judging(asks) as judge:
            first = await judge.judge([*[item("PARIS")] * 4, item("Rome")])
        before = len(server.asked)
        async with judging(asks) as judge:
            second = await judge.judge([item("PARIS"), item("Rome"), item("Oslo")])
        return [score.score for score in first], before, second, len(server.asked)

    first, before, second, after = run(fair, scenario)
    assert (first, before) == ([1.0, 1.0, 1.0, 1.0, 0.0], 2)
    assert [score.score for score in second] == [1.0, 0.0, 0.0]
    assert [parts(score) for score in second] == [OVERRULED, ASKED, ASKED]
    assert after == 3


def test_what_passes_is_tried_again(tmp_path):
    async def failing(asked: Asked):
        return [failure(500), failure(429, **{"Retry-After": "1"}), asked.fair][asked.number]

    began = time.monotonic()
    (score,), asked = judged(failing, [item("PARIS")], tmp_path)
    assert (score.score, parts(score), len(asked)) == (1.0, OVERRULED, 3)
    assert time.monotonic() - began >= 0.95


@pytest.mark.parametrize(
    ("reply", "requests"),
    [
        (lambda: failure(503), 3),
        (lambda: failure(400), 1),
        (lambda: failure(302, Location="http://127.0.0.1:9/"), 1),
        (lambda: completion("right"), 1),
        (lambda: completion('{"verdict": "right"}'), 1),
        (lambda: completion(""), 1),
        (lambda: web.json_response({"choices": []}), 1),
        (lambda: web.Response(text="<html>"), 1),
    ],
    ids=["503", "400", "302", "a word", "no code", "empty", "no choices", "no JSON"],
)
def test_without_a_verdict_the_rule_judges_and_it_is_counted(reply, requests, tmp_path):
    async def broken(asked: Asked):
        return reply()

    async def scenario(server: JudgeServer):
        async with judging(verifier(server.url, tmp_path)) as judge:
            return await judge.judge([item("PARIS"), item("Paris")]), len(server.asked), judge.counts.failed

    (wrong, right), asked, failed = run(broken, scenario)
    assert (wrong.score, wrong.reward, parts(wrong)) == (0.0, 0.5, FAILED)
    assert (right.score, parts(right)) == (1.0, NOT_ASKED)
    assert (asked, failed) == (requests, 1)


def test_while_the_judge_hangs_other_rollouts_are_scored_at_once(tmp_path):
    async def by_question(asked: Asked):
        if asked.question == "slow":
            await asyncio.sleep(60)
        return asked.fair

    async def scenario(server: JudgeServer):
        async with judging(verifier(server.url, tmp_path, judge_deadline_seconds=2.0)) as judge:
            slow = asyncio.create_task(judge.judge([item("PARIS", question="slow")]))
            await asyncio.sleep(0.1)
            others = [(await judge.judge([item(answer)]))[0].score for answer in ("Paris", "PARIS", "Rome")]
            was_waiting = not slow.done()
            (late,) = await slow
            return others, was_waiting, late

    others, was_waiting, late = run(by_question, scenario)
    assert (others, was_waiting) == ([1.0, 1.0, 0.0], True)
    assert (late.score, parts(late)) == (0.0, FAILED)


def test_of_a_batch_as_many_are_asked_at_a_time_as_there_are_connections_and_none_is_late(tmp_path):
    async def slow(asked: Asked) -> str:
        await asyncio.sleep(0.1)
        return asked.fair

    async def scenario(server: JudgeServer):
        async with judging(verifier(server.url, tmp_path, judge_concurrency=4, judge_deadline_seconds=1.5)) as judge:
            return await judge.judge([item(f"city {number}") for number in range(24)]), server.most_at_once

    scores, most = run(slow, scenario)
    assert most == 4
    assert [parts(score) for score in scores] == [ASKED] * 24


def test_a_judge_that_is_down_is_left_alone_but_for_one_question(monkeypatch, tmp_path):
    monkeypatch.setattr(asker_module, "REST_AFTER_FAILURES", 3)
    monkeypatch.setattr(asker_module, "REST_SECONDS", 1.0)
    monkeypatch.setattr(asker_module, "ATTEMPTS", 1)
    is_down = True

    async def down(asked: Asked):
        return failure(500) if is_down else asked.fair

    async def scenario(server: JudgeServer):
        nonlocal is_down
        async with judging(verifier(server.url, tmp_path)) as judge:
            scores = [(await judge.judge([item(f"A{number}")]))[0] for number in range(10)]
            at_rest = len(server.asked)
            is_down = False
            await asyncio.sleep(1.05)
            scores += [(await judge.judge([item(f"B{number}")]))[0] for number in range(3)]
            return scores, at_rest, len(server.asked)

    scores, at_rest, after = run(down, scenario)
    assert (at_rest, after) == (3, 6)
    assert [parts(score) for score in scores] == [FAILED] * 10 + [ASKED] * 3


def test_one_who_goes_away_takes_the_question_along(tmp_path):
    async def slow(asked: Asked) -> str:
        await asyncio.sleep(30)
        return asked.fair

    async def scenario(server: JudgeServer):
        async with judging(verifier(server.url, tmp_path)) as judge:
            asking = asyncio.create_task(judge.judge([item("Rome")]))
            await asyncio.sleep(0.3)
            began_with = server.at_once
            asking.cancel()
            await asyncio.sleep(0.2)
            return began_with, server.at_once, judge.waiting

    assert run(slow, scenario) == (1, 0, 0)


def test_a_key_is_sent_and_never_told(monkeypatch, caplog, tmp_path):
    monkeypatch.setenv("LLM_JUDGE_API_KEY", "my-secret")

    async def refusing(asked: Asked):
        return failure(400, "the key Bearer my-secret is not known")

    async def scenario(server: JudgeServer):
        asks = verifier(server.url, tmp_path)
        async with judging(asks) as judge:
            await judge.judge([item("PARIS")])
        return asks, server.keys

    caplog.set_level(logging.INFO)
    asks, keys = run(refusing, scenario)
    assert set(keys) == {"Bearer my-secret"}
    assert "my-secret" not in caplog.text + repr(asks)
    assert "the key Bearer *** is not known" in caplog.text


def test_no_other_services_key_is_sent(monkeypatch, tmp_path):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-other")
    monkeypatch.delenv("LLM_JUDGE_API_KEY", raising=False)

    async def scenario(server: JudgeServer):
        async with judging(verifier(server.url, tmp_path)) as judge:
            await judge.judge([item("PARIS")])
        return server.keys

    assert set(run(fair, scenario)) == {"Bearer none"}


def test_fields_of_the_users_own_are_put_into_requests(tmp_path):
    _, asked = judged(fair, [item("PARIS")], tmp_path, judge_body='{"max_tokens": 64, "temperature": null}')
    assert asked[0].body["max_tokens"] == 64
    assert "temperature" not in asked[0].body


@pytest.mark.parametrize(
    ("settings", "status", "said"),
    [
        ({"judge_url": ""}, 200, "give its --judge-url and the --judge-model"),
        ({"judge_url": "http://127.0.0.1:9/v1"}, 200, "--judge-url http://127.0.0.1:9/v1: it cannot be asked"),
        ({"judge_url": "localhost:8000"}, 200, "--judge-url localhost:8000: it cannot be asked"),
        ({"judge_folder": "/dev/null/x"}, 200, "--judge-folder /dev/null/x cannot be used"),
        ({}, 401, r"401.*no Bearer \*\*\*.*; .* LLM_JUDGE_API_KEY$"),
    ],
)
def test_what_cannot_work_is_told_before_anything_is_judged(settings, status, said, tmp_path, monkeypatch):
    monkeypatch.setenv("LLM_JUDGE_API_KEY", "my-secret")

    async def scenario() -> None:
        async with JudgeServer(fair, models_status=status) as server:
            asks = verifier(server.url, tmp_path, **settings)
            with pytest.raises(NotReady, match=said):
                await asks.check_ready()
            with pytest.raises(NotReady, match=said):
                await judge_of(asks, workers=1, item_timeout_seconds=1.0).start()

    asyncio.run(scenario())
