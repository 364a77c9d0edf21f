import pytest
from fastapi.testclient import TestClient

from remote_rm.app import create_app
from remote_rm.math_verifier import MathVerifier

pytestmark = pytest.mark.unit


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


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"labels": ["1"]}, "labels has 1"),
        ({"responses": ["x"]}, "responses has 1"),
        ({"labels": ["1", ""]}, "labels[1]"),
        ({"labels": ["1", None]}, "labels"),
        ({"prompts": None}, "prompts"),
    ],
)
def test_a_request_that_cannot_be_judged_is_a_422(client, changed, told):
    request = {"query": ["q", "q"], "prompts": ["p", "p"], "labels": ["1", "2"]} | changed
    reply = client.post("/get_reward", json=request)
    assert reply.status_code == 422
    assert told in reply.text


def test_an_empty_request_gets_an_empty_reply(client):
    reply = client.post("/get_reward", json={"query": [], "prompts": [], "labels": []})
    assert reply.json()["rewards"] == []


def test_health_names_the_verifier_and_counts_items(client):
    client.post("/get_reward", json={"query": ["q"], "prompts": ["p"], "labels": ["1"], "responses": ["1"]})
    health = client.get("/health").json()
    assert (health["status"], health["verifier"], health["items"], health["quick"]) == ("ok", "math", 1, 1)
