import base64
import io
from pathlib import Path

import pytest
from aiohttp import web
from helpers.http_servers import ChatServer, chat_server, completion, failure
from PIL import Image

from lmm_r1.data.messages import ImagePart, Message, Row, TextPart
from lmm_r1.generation.endpoint import AnswerLog, EndpointEngine, EndpointError, GeneratorEndpoint
from lmm_r1.generation.engine import Outcome, SamplingSettings

KEY = "sk-very-secret"


def row(text: str = "What is 1+1?", *parts: object, role: str = "user") -> Row:
    message = Message(role=role, parts=(*parts, TextPart(text)))
    return Row(messages=(message,), answer="2", datasource="sums", location="rows.jsonl line 1")


def ask(
    server: ChatServer, log: Path, rows: list[Row], *, n_samples: int = 1, max_new_tokens: int = 16, **changes: object
) -> dict[int, Outcome]:
    values = {
        **{"url": server.url, "model": "m", "api_key": KEY, "concurrency": 4},
        **{"timeout_seconds": 5.0, "attempts": 3, "body": {}},
    }
    engine = EndpointEngine(GeneratorEndpoint(**(values | changes)), log=AnswerLog(log))
    sampling = SamplingSettings(n_samples=n_samples, temperature=0.5, top_p=0.9, max_new_tokens=max_new_tokens)
    try:
        return {outcome.index: outcome for outcome in engine.respond(enumerate(rows), sampling)}
    finally:
        engine.close()


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "run" / "scores.answers.jsonl"


def echo(body: dict, number: int) -> web.Response:
    return completion(f"<answer>{body['messages'][0]['content']}</answer>")


def test_a_request_holds_the_messages_the_key_and_the_sampling(log):
    with chat_server(echo) as server:
        found = ask(server, log, [row()], body={"top_k": 20, "max_tokens": None, "max_completion_tokens": 16})
    (response,) = found[0].completions
    assert (response.text, response.num_tokens, response.finish_reason) == ("<answer>What is 1+1?</answer>", 7, "stop")
    assert server.requests == [
        {
            "model": "m",
            "messages": [{"role": "user", "content": "What is 1+1?"}],
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 20,
            "max_completion_tokens": 16,
        }
    ]
    assert server.keys == [f"Bearer {KEY}"]
    assert KEY not in log.read_text()


def test_an_image_goes_as_a_data_url_with_the_pixels_that_the_row_allows(log, tmp_path):
    Image.new("RGB", (40, 20), "red").save(tmp_path / "a.png")
    with chat_server(lambda body, number: completion("red")) as server:
        ask(server, log, [row("Which colour?", ImagePart(str(tmp_path / "a.png"), max_pixels=200))], api_key=None)
    image, text = server.requests[0]["messages"][0]["content"]
    assert text == {"type": "text", "text": "Which colour?"}
    head, _, data = image["image_url"]["url"].partition(",")
    assert (image["type"], head) == ("image_url", "data:image/png;base64")
    sent = Image.open(io.BytesIO(base64.b64decode(data)))
    assert (sent.size, sent.getpixel((0, 0))) == ((20, 10), (255, 0, 0))
    assert server.keys == ["Bearer none"]


def test_several_samples_come_from_one_request_or_from_as_many_as_a_server_needs(log, tmp_path):
    with chat_server(lambda body, number: completion(*"abcd"[: body.get("n", 1)], tokens=40)) as server:
        found = ask(server, log, [row()], n_samples=3)
    # Of the three together forty tokens were counted, of none alone.
    assert [(one.text, one.num_tokens) for one in found[0].completions] == [("a", None), ("b", None), ("c", None)]
    assert [body["n"] for body in server.requests] == [3]
    with chat_server(lambda body, number: completion("abc"[number], tokens=2)) as server:
        found = ask(server, tmp_path / "other.jsonl", [row()], n_samples=3)
    assert [(one.text, one.num_tokens) for one in found[0].completions] == [("a", 2), ("b", 2), ("c", 2)]
    assert [body.get("n") for body in server.requests] == [3, 2, None]


@pytest.mark.parametrize("status", [429, 500, 503])
def test_what_passes_is_tried_again(status, log):
    def answer(body: dict, number: int) -> web.Response:
        return failure(status, "busy", **{"Retry-After": "0"}) if number < 2 else completion("2")

    with chat_server(answer) as server:
        found = ask(server, log, [row()])
    assert (len(server.requests), found[0].completions[0].text) == (3, "2")


@pytest.mark.parametrize(
    ("answer", "reason", "requests"),
    [
        (
            lambda body, number: failure(429, "no quota for sk-very-secret", **{"Retry-After": "0"}),
            "no answer from the endpoint in 3 attempts; the last: status 429 (no quota for ***)",
            3,
        ),
        (
            lambda body, number: failure(400, "the prompt is too long"),
            "the endpoint refused the row with status 400 (the prompt is too long)",
            1,
        ),
        (lambda body, number: completion("x", finish_reason="content_filter"), "response with 'content_filter'", 1),
        (lambda body, number: web.Response(text="<html>"), "the endpoint's reply is not a JSON object: <html>", 1),
        (lambda body, number: web.Response(text="[" * 100_000), "the endpoint's reply is not a JSON object: [[[", 1),
        (lambda body, number: completion(None), "the endpoint's reply has content that is not text", 1),
        (lambda body, number: completion("x", tokens=-3), "the endpoint's reply counts -3 tokens", 1),
        (lambda body, number: web.json_response({"choices": []}), "the endpoint's reply has no choices", 1),
        (
            lambda body, number: web.json_response({"choices": [{"finish_reason": "stop"}]}),
            "has a choice without a message",
            1,
        ),
    ],
)
def test_a_row_that_fails_is_left_out_with_the_reason_and_asked_again_next_time(answer, reason, requests, log):
    with chat_server(answer) as server:
        found = ask(server, log, [row()])
    assert found[0].completions == ()
    assert found[0].reason.startswith("rows.jsonl line 1: ")
    assert reason in found[0].reason
    assert len(server.requests) == requests
    assert not log.exists()
    with chat_server(echo) as server:
        assert ask(server, log, [row()])[0].reason is None


def test_a_response_whose_thinking_took_all_tokens_is_empty_and_no_error(log):
    with chat_server(lambda body, number: completion(None, finish_reason="length")) as server:
        found = ask(server, log, [row()])[0]
    assert [one.text for one in found.completions] == [""]


@pytest.mark.parametrize(
    ("status", "advice"),
    [(401, "set --api_key_env to the variable that holds a valid key"), (404, "check the address and --model m")],
)
def test_what_holds_for_every_row_ends_the_evaluation(status, advice, log):
    with chat_server(lambda body, number: failure(status, f"not with {KEY}")) as server:
        with pytest.raises(EndpointError) as error:
            ask(server, log, [row()] * 50)
    assert str(error.value) == f"--endpoint {server.url}: it answers with status {status} (not with ***); {advice}"
    assert len(server.requests) <= 8


def test_a_server_that_is_not_there_or_refuses_the_key_is_told_before_anything_is_asked(log):
    settings = {"model": "m", "api_key": None, "concurrency": 1, "timeout_seconds": 5.0, "attempts": 1, "body": {}}

    def check(url: str) -> None:
        engine = EndpointEngine(GeneratorEndpoint(url=url, **settings), log=AnswerLog(log))
        try:
            engine.check()
        finally:
            engine.close()

    with chat_server(echo, models_status=401) as server:
        with pytest.raises(EndpointError, match="status 401"):
            check(server.url)
    with pytest.raises(EndpointError, match="connection attempts failed; is the server up?"):
        check(server.url)
    # Some servers list no models.
    with chat_server(echo, models_status=404) as server:
        check(server.url)


def test_what_was_answered_is_not_asked_again(log):
    rows = [row("a"), row("a"), row("b")]
    with chat_server(lambda body, number: completion(f"{body['messages'][0]['content']}{number}")) as server:
        first = ask(server, log, rows[:2], concurrency=1)
        # As a kill leaves it: the last line is torn.
        log.write_bytes(log.read_bytes() + b'{"request": "')
        again = ask(server, log, rows, concurrency=1)
        other = ask(server, log, rows[:1], concurrency=1, max_new_tokens=17)
    said = [[found[place].completions[0].text for place in sorted(found)] for found in (first, again, other)]
    # Equal rows have answers of their own, and another limit is another request.
    assert said == [["a0", "a1"], ["a0", "a1", "b2"], ["a3"]]


def test_the_settings_do_not_show_the_key():
    settings = GeneratorEndpoint(
        url="http://h/v1", model="m", api_key=KEY, concurrency=1, timeout_seconds=1.0, attempts=1, body={}
    )
    assert KEY not in repr(settings)
