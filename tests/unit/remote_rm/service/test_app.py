import json

import pytest
from fastapi.testclient import TestClient

from remote_rm.math_verifier import MathVerifier
from remote_rm.reward_function import reward_func_of
from remote_rm.service.app import create_app
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


def test_numbers_are_texts_and_a_prompt_may_be_null(client):
    request = {
        "query": ["q", 7, "q", "q", "q"],
        "prompts": ["p", None, 1, "p", "p"],
        "labels": [7, 7.0, 0.5, True, "yes"],
        "responses": [7, "7", 0.50, "<answer>True</answer>", False],
        "image_scales": [[[0.5, 2]], [], [], [], []],
        "note": "ignored",
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
    assert {client.get(path).status_code for path in ("/docs", "/openapi.json", "/nowhere")} == {401}


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
    reply = client.post("/get_reward", json=RIGHT | {"responses": [r"<answer>\binom{4}{1}+x-x</answer>"]})
    assert (reply.status_code, reply.json()["detail"]) == (503, "the pool is not running")


def test_a_request_with_too_many_samples_is_a_413():
    client = app_with(limits=ServiceLimits(max_request_items=2))
    three = {name: values * 3 for name, values in RIGHT.items()}
    reply = client.post("/get_reward", json=three)
    assert (reply.status_code, "a request may hold 2 samples" in reply.text) == (413, True)


def test_the_openapi_document_describes_every_field():
    document = app_with().get("/openapi.json").json()
    assert {"/get_reward", "/health"} == set(document["paths"])
    for model in ("RewardRequest", "RewardReply"):
        fields = document["components"]["schemas"][model]["properties"]
        assert all(len(field.get("description", "")) >= 10 for field in fields.values()), model
