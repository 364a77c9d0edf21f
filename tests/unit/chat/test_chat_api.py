"""The OpenAI chat API in front of an engine that says the question again."""

import asyncio
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from helpers.conversations import message, row

from lmm_r1.chat.chat_model import ChatModel
from lmm_r1.chat.server import ChatService, EngineFailed, ServedModel, create_app
from lmm_r1.data.messages import Row
from lmm_r1.data.sample import Completion, TokenLogProb
from lmm_r1.data.sent_prompt import MediaAccess
from lmm_r1.generation.engine import AskedRows, Outcome, SamplingSettings, TextPiece
from remote_rm.verifier import PoolUnavailable, ServiceLimits

SAMPLING = SamplingSettings(n_samples=1, temperature=0.0, top_p=1.0, max_new_tokens=8)


class Echo:
    """Says each conversation's last text again, word by word; keeps what it was asked, and may wait or break."""

    not_supported = frozenset({"presence_penalty"})

    def __init__(self) -> None:
        self.asked: list[tuple[str, SamplingSettings]] = []
        self.rows: list[Row] = []
        self.go_on = threading.Event()
        self.go_on.set()
        self.closed = False

    def answer(self, asked: AskedRows) -> Iterator[Outcome]:
        for index, one in asked:
            text = one.row.messages[-1].parts[0].text
            self.asked.append((text, one.sampling))
            self.rows.append(one.row)
            assert self.go_on.wait(timeout=20)
            if text == "break":
                raise RuntimeError("out of memory")
            if text == "long":
                yield Outcome(index=index, row=one.row, reason="messages: the prompt takes 9 tokens")
                continue
            known = one.sampling.logprobs is not None
            words = tuple(TokenLogProb(text=word, log_prob=-0.5, likeliest=(("é", -0.25),)) for word in text.split())
            said = Completion(
                text=text,
                num_tokens=2,
                finish_reason="stop" if text != "cut" else "length",
                log_probs=words if known else (),
            )
            for word in words if one.on_piece is not None else ():
                for place in range(one.sampling.n_samples):
                    one.on_piece(TextPiece(place=place, text=word.text, log_probs=(word,) if known else ()))
                if word.text == "halfway":
                    raise RuntimeError("out of memory")
            if not asked.is_abandoned(index):
                yield Outcome(index=index, row=one.row, completions=(said,) * one.sampling.n_samples, prompt_tokens=5)

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
    assert engine.asked[0] == ("1+1?", replace(SAMPLING, n_samples=2))
    cut = client.post("/v1/chat/completions", json=body("cut")).json()
    assert cut["choices"][0]["finish_reason"] == "length"
    # OpenAI's own defaults, and the server's for the length.
    assert engine.asked[1][1] == SamplingSettings(n_samples=1, temperature=1.0, top_p=1.0, max_new_tokens=16)


def test_what_may_be_asked_reaches_the_engine(client, engine):
    fields = {"seed": 3, "stop": ["\n", "###"], "frequency_penalty": 0.5, "top_k": 4, "logprobs": True}
    assert client.post("/v1/chat/completions", json=body(**fields)).status_code == 200
    assert client.post("/v1/chat/completions", json=body(stop="###", logprobs=True, top_logprobs=2)).status_code == 200
    first, second = (sampling for _, sampling in engine.asked)
    assert (first.seed, first.stops, first.frequency_penalty, first.top_k) == (3, ("\n", "###"), 0.5, 4)
    assert (first.logprobs, second.logprobs, second.stops) == (0, 2, ("###",))


NULLS = (
    "temperature top_p top_k n stop seed stream stream_options logprobs top_logprobs max_tokens presence_penalty tools"
)
NULLS += " tool_choice response_format logit_bias reasoning_effort audio prediction web_search_options something_new"
HARMLESS = [
    *({name: None} for name in NULLS.split()),
    *({name: []} for name in ("tools", "functions", "stop", "stop_token_ids", "bad_words")),
    *({name: {}} for name in ("logit_bias", "metadata", "chat_template_kwargs", "extra_body", "stream_options")),
    *({name: 1} for name in ("n", "best_of", "repetition_penalty", "user", "priority", "top_p")),
    *({name: False} for name in ("stream", "echo", "ignore_eos", "store", "use_beam_search", "logprobs")),
    *({name: 0} for name in ("min_p", "top_k", "top_logprobs", "frequency_penalty", "min_tokens")),
    *({"tool_choice": value, "parallel_tool_calls": True} for value in ("none", "auto")),
    *({"response_format": {"type": "text"} | more} for more in ({}, {"json_schema": None})),
    *({"stream_options": value} for value in ({"include_usage": None}, {"include_obfuscation": False})),
    {"chat_template_kwargs": {"enable_thinking": None}, "verbosity": "medium", "modalities": ["text"]},
    {"service_tier": "flex", "user": "me", "prompt_cache_key": "a", "safety_identifier": "b", "metadata": {"a": "b"}},
    {"max_tokens": 16.0, "skip_special_tokens": True, "add_generation_prompt": True},
]


@pytest.mark.parametrize("fields", HARMLESS, ids=str)
def test_a_field_that_asks_for_nothing_is_as_if_it_were_not_there(client, engine, fields):
    reply = client.post("/v1/chat/completions", json=body(**fields))
    assert (reply.status_code, reply.json()["choices"][0]["message"]["content"]) == (200, "1+1?"), reply.json()
    assert engine.asked[0][1] == SamplingSettings(n_samples=1, temperature=1.0, top_p=1.0, max_new_tokens=16)


@pytest.mark.parametrize(("asked", "drawn"), [(3, 3), (0, 0), (-1, 2**62 - 1), (-(2**63), 0)])
def test_every_seed_of_the_api_reaches_the_engine_as_one_that_it_takes(client, engine, asked, drawn):
    assert client.post("/v1/chat/completions", json=body(seed=asked)).status_code == 200
    assert engine.asked[0][1].seed == drawn


# As OpenAI's Python client writes an answer down.
DUMPED = {"role": "assistant", "content": None, "refusal": None, "tool_calls": None, "audio": None, "annotations": []}


def test_empty_turns_and_tags_that_a_user_typed_are_text(client, engine):
    turns = [("system", ""), ("user", " "), ("assistant", ""), ("user", []), ("user", "Is <image> or <video> a tag?")]
    messages = [{"role": role, "content": content} for role, content in turns]
    reply = client.post("/v1/chat/completions", json=body() | {"messages": [DUMPED, *messages]})
    assert reply.status_code == 200, reply.json()
    texts = [[part.text for part in turn.parts] for turn in engine.rows[0].messages]
    assert texts == [[""], [""], [" "], [""], [""], ["Is <image> or <video> a tag?"]]
    assert client.post("/v1/chat/completions", json=body("")).status_code == 200


LOGGED = {"token": "a", "logprob": -0.5, "bytes": [97]}
LIKELIEST = {"token": "é", "logprob": -0.25, "bytes": [0xC3, 0xA9]}


def test_log_probs_come_as_the_api_has_them(client):
    told = client.post("/v1/chat/completions", json=body("a", logprobs=True, top_logprobs=1)).json()
    assert told["choices"][0]["logprobs"] == {"content": [LOGGED | {"top_logprobs": [LIKELIEST]}]}
    assert client.post("/v1/chat/completions", json=body("a")).json()["choices"][0]["logprobs"] is None


def events(client: TestClient, asked: dict[str, Any]) -> list[Any]:
    reply = client.post("/v1/chat/completions", json=asked)
    assert (reply.status_code, reply.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    lines = [line.removeprefix("data: ") for line in reply.text.split("\n\n") if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def test_an_answer_is_streamed_as_the_api_has_it(client):
    *came, usage, done = events(client, body("a b", stream=True, n=2, stream_options={"include_usage": True}))
    assert (done, usage["choices"], usage["usage"]["total_tokens"]) == ("[DONE]", [], 9)
    assert {one["object"] for one in came} == {"chat.completion.chunk"}
    assert len({one["id"] for one in [*came, usage]}) == 1
    choices = [one["choices"][0] for one in came]
    assert [(one["index"], one["delta"], one["finish_reason"]) for one in choices] == [
        *((place, {"role": "assistant", "content": ""}, None) for place in (0, 1)),
        *((place, {"content": word}, None) for word in "ab" for place in (0, 1)),
        *((place, {}, "stop") for place in (0, 1)),
    ]


def test_log_probs_are_streamed_with_their_tokens(client):
    came = events(client, body("a", stream=True, logprobs=True))
    assert came[1]["choices"][0]["logprobs"]["content"][0] == LOGGED | {"top_logprobs": [LIKELIEST]}


def test_a_stream_that_fails_says_so_and_one_that_cannot_begin_has_its_status(client):
    assert events(client, body("halfway there", stream=True))[-1]["error"]["message"].startswith("the engine failed")
    assert client.post("/v1/chat/completions", json=body("break", stream=True)).status_code == 500
    assert client.post("/v1/chat/completions", json=body("long", stream=True)).status_code == 400
    assert events(client, body("a", stream=True))[-1] == "[DONE]"


def test_the_model_is_listed_and_its_health_needs_no_token(client):
    assert [one["id"] for one in client.get("/v1/models").json()["data"]] == ["tiny"]
    wrong = {"Authorization": "Bearer guess"}
    assert client.get("/v1/models", headers=wrong).status_code == 401
    assert client.post("/v1/chat/completions", json=body(), headers=wrong).status_code == 401
    assert client.get("/health", headers=wrong).json() == {"status": "ok", "waiting": 0, "open": 0}


CHANGING = [
    *({"tools": [{}]}, {"tool_choice": "required"}, {"logit_bias": {"7": -100}}, {"best_of": 2}, {"min_p": 0.1}),
    *({name: {"type": "json_object"}} for name in ("response_format", "guided_json")),
    *({name: False} for name in ("skip_special_tokens", "add_generation_prompt", "enable_thinking")),
    *({"modalities": ["text", "audio"]}, {"reasoning_effort": "high"}, {"stream_options": {"chunk_size": 3}}),
    *({"chat_template_kwargs": {"enable_thinking": value}} for value in (False, True)),
]
IMAGE = {"type": "image_url", "image_url": {"url": "/etc/passwd"}}


@pytest.mark.parametrize(
    ("asked", "status", "said"),
    [
        *((body(**fields), 400, next(iter(fields))) for fields in CHANGING),
        (body(echo=True), 400, "echo: Extra inputs are not permitted; the fields are model, messages, temperature"),
        (body(top_logprobs=2), 400, "top_logprobs needs logprobs: true"),
        (body(logprobs=True, top_logprobs=21), 400, "top_logprobs: Input should be less than or equal to 20"),
        (body(presence_penalty=1), 400, "presence_penalty needs --backend vllm"),
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


def test_conversations_are_answered_in_their_order_whatever_their_settings(engine):
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
    assert [text for text, _ in engine.asked] == ["a", "b", "cc", "d"]


def test_a_stream_that_is_left_is_abandoned(engine):
    async def play() -> None:
        served = ServedModel(lambda: model_of(engine), max_waiting=9)
        await served.start()
        stream = served.stream(row(message("user", "a b c")), SAMPLING)
        assert (await anext(stream)).text == "a"
        await stream.aclose()
        assert served.open == 0
        assert (await served.answer(row(message("user", "d")), SAMPLING)).completions[0].text == "d"
        await served.stop()

    asyncio.run(asyncio.wait_for(play(), timeout=20))


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
    assert [text for text, _ in engine.asked] == ["a", "c", "d"]


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
