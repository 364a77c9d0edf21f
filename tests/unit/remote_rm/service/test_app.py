import asyncio
import json
import re
from collections.abc import Iterator

import pytest
from fastapi.testclient import TestClient

from remote_rm.math_verifier import MathVerifier
from remote_rm.reward_function import reward_func_of
from remote_rm.service.app import INLINE_BYTES, create_app
from remote_rm.verifier import ServiceLimits


@pytest.fixture
def client() -> TestClient:
    # Not entered as a context: the workers stay unstarted, and what is posted here is decided without them.
    return TestClient(create_app(MathVerifier(), workers=1, item_timeout_seconds=1.0))


def test_a_batch_is_answered_in_its_order(client):
    request = {
        "query": ["q"] * 3,
        "prompts": ["p"] * 3,
        "labels": ["1", "2", "3"],
        "responses": ["<think>t</think><answer>1</answer>", "<answer>9</answer>", "<answer>3</answer>"],
    }
    assert client.post("/get_reward", json=request).json() == {
        "rewards": [1.5, 0.0, 1.0],
        "scores": [1.0, 0.0, 1.0],
        "extra_logs": {
            "accuracy": [1.0, 0.0, 1.0],
            "format": [1.0, 0.0, 0.0],
            "ungradable": [0.0, 0.0, 0.0],
            "timed_out": [0.0, 0.0, 0.0],
        },
    }


def test_without_responses_the_response_is_found_in_the_query(client):
    query = "<|im_start|>user\n6*7?<|im_end|>\n<|im_start|>assistant\n<think>t</think><answer>42</answer><|im_end|>"
    reply = client.post("/get_reward", json={"query": [query], "prompts": ["p"], "labels": ["42"]})
    assert reply.json()["rewards"] == [1.5]


@pytest.mark.parametrize("padding", ["", "x" * INLINE_BYTES])
def test_numbers_are_texts_and_a_prompt_may_be_null(client, padding):
    request = {
        "query": ["q", 7, "q", "q", "q"],
        "prompts": ["p", None, 1, "p", "p"],
        "labels": [7, 7.0, 0.5, True, "yes"],
        "responses": [7, "7", 0.50, "<answer>True</answer>", False],
        "image_scales": [[[0.5, 2]], [], [], [], []],
        "note": padding,
    }
    reply = client.post("/get_reward", json=request)
    assert reply.status_code == 200, reply.text
    assert reply.json()["scores"] == [1.0, 1.0, 1.0, 1.0, 0.0]
    assert reward_func_of("math")(["7"], ["p"], [7.0], responses=["7"])["scores"] == [1.0]


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"labels": [["1"], "2"]}, "labels"),
        ({"labels": ["1", float("nan")]}, "labels"),
        ({"labels": ["1"]}, "labels has 1"),
        ({"responses": ["x"]}, "responses has 1"),
        ({"labels": ["1", ""]}, "labels[1]"),
        ({"labels": ["1", None]}, "labels"),
        ({"prompts": None}, "prompts"),
    ],
)
def test_a_request_that_cannot_be_judged_is_a_422(client, changed, told):
    request = {"query": ["q", "q"], "prompts": ["p", "p"], "labels": ["1", "2"]} | changed
    reply = client.post("/get_reward", content=json.dumps(request), headers={"content-type": "application/json"})
    assert reply.status_code == 422
    assert told in reply.text


def test_an_empty_request_gets_an_empty_reply(client):
    reply = client.post("/get_reward", json={"query": [], "prompts": [], "labels": []})
    assert reply.json()["rewards"] == []


GRADED = {
    "sample": {"output_text": "<think>t</think><answer>4</answer>", "output_tools": [], "choices": []},
    "item": {"reference_answer": "4", "messages": [{"role": "user", "content": "2+2?"}]},
}


@pytest.mark.parametrize(
    ("item", "score", "reward"),
    [({"reference_answer": "4"}, 1.0, 1.5), ({"answer": 4, "id": 7}, 1.0, 1.5), ({"label": "5"}, 0.0, 0.5)],
)
def test_an_endpoint_grader_gets_a_score_from_0_to_1(client, item, score, reward):
    reply = client.post("/grade", json=GRADED | {"item": item, "trace_id": "t"})
    assert reply.status_code == 200, reply.text
    graded = reply.json()
    assert (graded["score"], graded["reward"], graded["parts"]["format"]) == (score, reward, 1.0)
    assert client.get("/health").json()["items"] == 1


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"item": {}}, "reference_answer"),
        ({"item": {"answer": ""}}, "labels[0]"),
        ({"sample": {"output_json": {}}}, "output_text"),
        ({"sample": {"output_text": None}}, "output_text"),
    ],
)
def test_a_sample_that_cannot_be_graded_is_a_422(client, changed, told):
    reply = client.post("/grade", json=GRADED | changed)
    assert reply.status_code == 422
    assert told in reply.text
    long = client.post("/grade", content='{"item": ' + "9" * 5000 + "}", headers={"content-type": "application/json"})
    assert (long.status_code, "more than 400 digits" in long.text) == (422, True)


def test_a_grade_without_the_content_type_of_json_is_a_422(client):
    assert client.post("/grade", content=json.dumps(GRADED), headers={"content-type": "text/plain"}).status_code == 422


def test_health_names_the_verifier_and_counts_items(client):
    client.post("/get_reward", json={"query": ["q"], "prompts": ["p"], "labels": ["1"], "responses": ["1"]})
    health = client.get("/health").json()
    assert (health["status"], health["verifier"], health["items"], health["quick"]) == ("ok", "math", 1, 1)


RIGHT = {"query": ["q"], "prompts": ["p"], "labels": ["4"], "responses": ["<answer>4</answer>"]}


def app_with(**settings: object) -> TestClient:
    return TestClient(create_app(MathVerifier(), workers=1, item_timeout_seconds=1.0, **settings))


def test_only_the_right_token_opens_the_service():
    client = app_with(token="s3cret")
    for header in (
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": "s3cret"},
        {"Authorization": "Basic s3cret"},
    ):
        reply = client.post("/get_reward", json=RIGHT, headers=header)
        assert (reply.status_code, reply.headers["WWW-Authenticate"]) == (401, "Bearer")
    for header in ("Bearer s3cret", "bearer s3cret"):
        assert client.post("/get_reward", json=RIGHT, headers={"Authorization": header}).status_code == 200


def test_with_a_token_only_health_stays_open():
    client = app_with(token="s3cret")
    assert client.get("/health").status_code == 200
    assert {client.get(path).status_code for path in ("/metrics", "/docs", "/openapi.json", "/nowhere")} == {401}


def test_a_body_over_the_limit_is_refused_by_its_announced_length():
    client = app_with(limits=ServiceLimits(max_request_bytes=2 * 2**20))
    reply = client.post("/get_reward", json=RIGHT | {"responses": ["x" * (3 * 2**20)]})
    assert reply.status_code == 413
    assert "larger than 2 MiB" in reply.json()["detail"]
    assert client.post("/get_reward", json=RIGHT | {"responses": ["x" * 40_000]}).status_code == 200


def test_a_body_without_a_length_is_refused_while_it_comes_in():
    taken = 0

    def endless() -> Iterator[bytes]:
        nonlocal taken
        for _ in range(1000):
            taken += 1
            yield b"x" * 2**16

    async def count_and_ask() -> int:
        # Asked of the application itself: the test client would gather the whole body before it sends any.
        sent = []
        parts = endless()

        async def receive() -> dict:
            return {"type": "http.request", "body": next(parts), "more_body": True}

        async def send(message: dict) -> None:
            sent.append(message)

        scope = {
            "type": "http",
            "method": "POST",
            "path": "/get_reward",
            "raw_path": b"/get_reward",
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
            "scheme": "http",
            "http_version": "1.1",
            "root_path": "",
        }
        app = create_app(
            MathVerifier(), workers=1, item_timeout_seconds=1.0, limits=ServiceLimits(max_request_bytes=2**20)
        )
        await app(scope, receive, send)
        return sent[0]["status"]

    assert asyncio.run(count_and_ask()) == 413
    # 16 parts are 1 MiB, and the 17th is too much.
    assert taken == 17


def test_metrics_count_requests_and_items():
    client = app_with()
    client.post("/get_reward", json=RIGHT)
    client.post("/get_reward", json=RIGHT | {"labels": [""]})
    client.get("/some/path")
    metrics = client.get("/metrics").text
    for line in (
        'remote_rm_requests_total{path="/get_reward",status="200"} 1.0',
        'remote_rm_requests_total{path="/get_reward",status="422"} 1.0',
        'remote_rm_requests_total{path="other",status="404"} 1.0',
        'remote_rm_items_total{kind="quick"} 1.0',
        'remote_rm_items_total{kind="worker"} 0.0',
        "remote_rm_request_seconds_count 2.0",
        "remote_rm_queued_items 0.0",
    ):
        assert re.search(f"^{re.escape(line)}$", metrics, re.MULTILINE), line


def test_two_applications_count_for_themselves():
    first, second = app_with(), app_with()
    first.post("/get_reward", json=RIGHT)
    assert 'kind="quick"} 1.0' in first.get("/metrics").text
    assert 'kind="quick"} 0.0' in second.get("/metrics").text


def test_half_a_surrogate_pair_is_judged_like_any_other_character(client):
    body = json.dumps(RIGHT | {"query": ["\ud800"], "responses": ["\ud800 <answer>4</answer> \udfff"]})
    assert "\\ud800" in body
    reply = client.post("/get_reward", content=body, headers={"Content-Type": "application/json"})
    assert (reply.status_code, reply.json()["scores"]) == (200, [1.0])


def test_a_refusal_does_not_send_the_request_back(client):
    reply = client.post("/get_reward", json=RIGHT | {"labels": [["x" * 10_000]]})
    assert reply.status_code == 422
    assert reply.json()["detail"] == [
        {"loc": ["body", "labels", 0], "msg": "Input should be a valid string", "type": "string_type"}
    ]


def test_without_workers_what_needs_one_is_no_reward(client):
    # The workers of this client were never started.
    with pytest.raises(RuntimeError, match="the pool is not running"):
        client.post("/get_reward", json=RIGHT | {"responses": [r"<answer>\binom{4}{1}+x-x</answer>"]})


def test_the_openapi_document_describes_every_field_and_refusal():
    document = app_with().get("/openapi.json").json()
    assert {"/get_reward", "/grade", "/health", "/metrics"} <= set(document["paths"])
    assert set(document["paths"]["/get_reward"]["post"]["responses"]) == {"200", "401", "408", "413", "422", "503"}
    for model in (
        "RewardRequest",
        "RewardReply",
        "GradeRequest",
        "GradedSample",
        "GradedItem",
        "GradeReply",
        "Health",
    ):
        fields = document["components"]["schemas"][model]["properties"]
        assert all(len(field.get("description", "")) >= 10 for field in fields.values()), model
