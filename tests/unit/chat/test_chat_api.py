"""The OpenAI chat API in front of an engine that says the question again."""

import asyncio
import threading
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from helpers.conversations import message, row

from lmm_r1.chat.chat_model import ChatModel
from lmm_r1.chat.server import ChatService, EngineFailed, ServedModel, create_app
from lmm_r1.data.messages import Row
from lmm_r1.data.sample import Completion
from lmm_r1.data.sent_prompt import MediaAccess
from lmm_r1.generation.engine import Outcome, SamplingSettings
from remote_rm.verifier import PoolUnavailable, ServiceLimits

pytestmark = pytest.mark.unit

SAMPLING = SamplingSettings(n_samples=1, temperature=0.0, top_p=1.0, max_new_tokens=8)


class Echo:
    """Says each conversation's last text again; keeps what it was asked, batch by batch, and may wait or break."""

    def __init__(self) -> None:
        self.batches: list[tuple[SamplingSettings, list[str]]] = []
        self.go_on = threading.Event()
        self.go_on.set()
        self.closed = False

    def respond(self, rows: Iterable[tuple[int, Row]], sampling: SamplingSettings) -> Iterator[Outcome]:
        texts: list[str] = []
        self.batches.append((sampling, texts))
        for index, asked in rows:
            text = asked.messages[-1].parts[0].text
            texts.append(text)
            assert self.go_on.wait(timeout=20)
            if text == "break":
                raise RuntimeError("out of memory")
            if text == "long":
                yield Outcome(index=index, row=asked, reason="messages: the prompt takes 9 tokens")
                continue
            said = Completion(text=text, num_tokens=2, finish_reason="stop" if text != "cut" else "length")
            yield Outcome(index=index, row=asked, completions=(said,) * sampling.n_samples, prompt_tokens=5)

    def close(self) -> None:
        self.closed = True


def model_of(engine: Echo) -> ChatModel:
    return ChatModel(
        engine=engine,
        name="tiny",
        takes_images=True,
        takes_videos=False,
        max_images=8,
        max_videos=0,
        opens_thought=False,
    )


@pytest.fixture
def engine() -> Echo:
    return Echo()


@pytest.fixture
def client(engine: Echo) -> Iterator[TestClient]:
    service = ChatService(
        ServedModel(lambda: model_of(engine), max_waiting=4),
        name="tiny",
        media=MediaAccess(roots=(), allow_urls=False),
        max_new_tokens=16,
        max_choices=3,
    )
    app = create_app(service, limits=ServiceLimits(max_request_bytes=10_000), token="secret", log_sample_share=0.0)
    with TestClient(app, headers={"Authorization": "Bearer secret"}) as client:
        yield client
    assert engine.closed


def body(text: str = "1+1?", **fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": text}], **fields}


def test_a_conversation_is_answered_as_the_api_has_it(client, engine):
    reply = client.post("/v1/chat/completions", json=body(temperature=0, max_tokens=8, n=2))
    assert reply.status_code == 200
    told = reply.json()
    assert [(one["index"], one["message"], one["finish_reason"]) for one in told["choices"]] == [
        (0, {"role": "assistant", "content": "1+1?"}, "stop"),
        (1, {"role": "assistant", "content": "1+1?"}, "stop"),
    ]
    assert told["usage"] == {"prompt_tokens": 5, "completion_tokens": 4, "total_tokens": 9}
    assert (told["object"], told["model"]) == ("chat.completion", "tiny")
    assert engine.batches[0][0] == replace(SAMPLING, n_samples=2)
    cut = client.post("/v1/chat/completions", json=body("cut")).json()
    assert cut["choices"][0]["finish_reason"] == "length"
    # OpenAI's own defaults, and the server's for the length.
    assert engine.batches[1][0] == SamplingSettings(n_samples=1, temperature=1.0, top_p=1.0, max_new_tokens=16)


def test_the_model_is_listed_and_its_health_needs_no_token(client):
    assert [one["id"] for one in client.get("/v1/models").json()["data"]] == ["tiny"]
    wrong = {"Authorization": "Bearer guess"}
    assert client.get("/v1/models", headers=wrong).status_code == 401
    assert client.post("/v1/chat/completions", json=body(), headers=wrong).status_code == 401
    assert client.get("/health", headers=wrong).json() == {"status": "ok", "waiting": 0, "open": 0}


IMAGE = {"type": "image_url", "image_url": {"url": "/etc/passwd"}}


@pytest.mark.parametrize(
    ("asked", "status", "said"),
    [
        (body(seed=3), 400, "seed: Extra inputs are not permitted; the fields are model, messages, temperature"),
        (body(stream=True), 400, "stream: Input should be False"),
        (body(temperature=-1), 400, "temperature: Input should be greater than or equal to 0"),
        (body(n=4), 400, "n 4 is more than --max_request_items 3"),
        (body() | {"model": "other"}, 404, "there is no model 'other' here; this server has 'tiny'"),
        (body() | {"messages": []}, 400, "messages: List should have at least 1 item"),
        (body() | {"messages": [{"role": "user"}]}, 400, 'messages: message 1 of "messages" (user) needs a'),
        (body() | {"messages": [{"content": "?"}]}, 400, "messages: each must be an object with role and content"),
        (body() | {"messages": [{"role": "assistant", "content": "2"}]}, 400, "the last is the assistant's"),
        (body() | {"messages": [{"role": "user", "content": [IMAGE]}]}, 400, "this server reads no image files"),
        (body("long"), 400, "messages: the prompt takes 9 tokens"),
    ],
)
def test_what_cannot_be_answered_is_refused_in_one_sentence(client, asked, status, said):
    reply = client.post("/v1/chat/completions", json=asked)
    assert (reply.status_code, said in reply.json()["error"]["message"]) == (status, True), reply.json()


def test_what_is_no_json_or_too_large_is_refused(client):
    assert client.post("/v1/chat/completions", content=b"{").status_code == 400
    assert client.post("/v1/chat/completions", json=body("x" * 10_000)).status_code == 413


def test_an_engine_that_breaks_fails_those_that_it_answered_and_goes_on(client):
    broken = client.post("/v1/chat/completions", json=body("break"))
    assert (broken.status_code, broken.json()["error"]["type"]) == (500, "server_error")
    assert client.post("/v1/chat/completions", json=body()).status_code == 200


async def waiting(served: ServedModel, *texts: str) -> list[asyncio.Task[Outcome]]:
    """Ask for these answers, one after the other; the first is then under way."""
    tasks = []
    for text in texts:
        asked = served.answer(row(message("user", text)), replace(SAMPLING, n_samples=len(text)))
        tasks.append(asyncio.create_task(asked))
        await asyncio.sleep(0.05)
    return tasks


def test_those_with_the_same_settings_are_computed_together_in_their_order(engine):
    async def play() -> None:
        served = ServedModel(lambda: model_of(engine), max_waiting=100)
        await served.start()
        engine.go_on.clear()
        tasks = await waiting(served, "a", "b", "cc", "d")
        assert (served.open, served.waiting) == (4, 4), "one is being answered, and two responses are of one"
        engine.go_on.set()
        outcomes = await asyncio.gather(*tasks)
        assert [outcome.completions[0].text for outcome in outcomes] == ["a", "b", "cc", "d"]
        await served.stop()

    asyncio.run(asyncio.wait_for(play(), timeout=20))
    assert [texts for _, texts in engine.batches] == [["a", "b"], ["cc"], ["d"]]


def test_a_client_that_went_away_is_not_answered_and_a_queue_that_is_full_takes_no_more(engine):
    async def play() -> None:
        served = ServedModel(lambda: model_of(engine), max_waiting=3)
        await served.start()
        engine.go_on.clear()
        first, gone, *others = await waiting(served, "a", "b", "c", "d")
        with pytest.raises(PoolUnavailable, match="^3 responses wait to be generated, and the limit is 3"):
            await served.answer(row(message("user", "e")), SAMPLING)
        gone.cancel()
        await asyncio.wait([gone])
        engine.go_on.set()
        await asyncio.gather(first, *others)
        assert served.open == 0
        await served.stop()
        with pytest.raises(PoolUnavailable, match="stopping"):
            await served.answer(row(message("user", "f")), SAMPLING)

    asyncio.run(asyncio.wait_for(play(), timeout=20))
    assert [text for _, texts in engine.batches for text in texts] == ["a", "c", "d"]


def test_a_server_that_stops_answers_what_waits_with_503(engine):
    async def play() -> None:
        served = ServedModel(lambda: model_of(engine), max_waiting=9)
        await served.start()
        engine.go_on.clear()
        tasks = await waiting(served, "a", "b")
        served.refuse()
        engine.go_on.set()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(one, PoolUnavailable) for one in found)
        await served.stop()

    asyncio.run(asyncio.wait_for(play(), timeout=20))
    assert engine.closed


def test_a_model_that_cannot_be_loaded_is_told(tmp_path: Path):
    def load() -> ChatModel:
        raise EngineFailed("no such checkpoint")

    with pytest.raises(EngineFailed, match="no such checkpoint"):
        ServedModel(load, max_waiting=1)
