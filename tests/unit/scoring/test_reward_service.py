"""The HTTP application of a reward model: rewards of text and image samples, and what is refused."""

import asyncio
import base64
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from helpers.conversations import message, picture, row
from helpers.reward_requests import sent_by_openrlhf, sent_by_rollouts
from helpers.value_models import save_reward_model

from lmm_r1.cli import serve_rm
from lmm_r1.config import precision
from lmm_r1.data.messages import ImagePart, Row, to_json
from lmm_r1.data.sent_prompt import MediaAccess
from lmm_r1.scoring.reward_model import RewardModel
from lmm_r1.scoring.reward_service import create_app
from remote_rm.service.judge import ServiceLimits
from remote_rm.service.middleware import Abandonment

pytestmark = pytest.mark.unit

TEXT = row(message("user", "What is 12 + 34?"), answer="")
ANSWER, OTHER = "<answer>46</answer>", "What?"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    picture(84, 56).save(folder / "picture.png")
    (folder / "broken.png").write_bytes(b"no image")
    return folder


@pytest.fixture(scope="module")
def model(tiny_checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> RewardModel:
    saved = save_reward_model(tiny_checkpoint("qwen2_5_vl"), tmp_path_factory.mktemp("reward") / "model")
    return RewardModel(
        str(saved),
        dtype="fp32",
        max_len=200,
        max_batch_tokens=400,
        value_head_prefix="score",
        normalize=False,
        trust_remote_code=False,
    )


def client_of(model: RewardModel, folder: Path, **changes: Any) -> TestClient:
    settings = {"limits": ServiceLimits(max_request_bytes=100_000), "token": None, "log_sample_share": 0.0}
    media = MediaAccess(roots=(folder,), allow_urls=False)
    return TestClient(create_app(lambda: model, media=media, **(settings | changes)))


@pytest.fixture(scope="module")
def client(model: RewardModel, folder: Path) -> Iterator[TestClient]:
    with client_of(model, folder) as running:
        yield running


def image_row(folder: Path) -> Row:
    return row(message("user", ImagePart(str(folder / "picture.png")), "Which digit is this?"), answer="4")


def test_a_rollouts_samples_get_the_rewards_of_the_model(client, model, folder):
    for asked in (TEXT, image_row(folder)):
        reply = client.post("/get_reward", json=sent_by_rollouts(model, asked, [ANSWER, OTHER])).json()
        expected = model.score([model.encode(asked, ANSWER), model.encode(asked, OTHER)])
        assert reply["rewards"] == pytest.approx(expected, abs=1e-5)
        assert reply["scores"] == reply["rewards"]
        assert reply["rewards"][0] != reply["rewards"][1]


def test_openrlhfs_samples_get_the_rewards_of_the_model(client, model):
    reply = client.post("/get_reward", json=sent_by_openrlhf(model, TEXT, [ANSWER, OTHER])).json()
    expected = model.score([model.encode(TEXT, ANSWER), model.encode(TEXT, OTHER)])
    assert reply["rewards"] == pytest.approx(expected, abs=1e-5)


def test_a_response_that_was_cut_off_gets_no_end_token(client, model):
    request = sent_by_rollouts(model, TEXT, [OTHER])
    tokenizer = model.kit.tokenizer_of(model.processor)
    cut = [request["query"][0].removesuffix(tokenizer.eos_token)]
    expected = model.score([model.encode(TEXT, OTHER, ending=""), model.encode(TEXT, OTHER)])
    replies = [client.post("/get_reward", json=request | {"query": query}) for query in (cut, request["query"])]
    assert [reply.json()["rewards"][0] for reply in replies] == pytest.approx(expected, abs=1e-5)
    assert expected[0] != expected[1]


def test_an_image_may_come_within_the_request(client, model, folder):
    stream = io.BytesIO()
    picture(84, 56).save(stream, "PNG")
    uri = "data:image/png;base64," + base64.b64encode(stream.getvalue()).decode()
    asked = image_row(folder)
    request = sent_by_rollouts(model, asked, [ANSWER])
    sent = json.loads(request["prompts"][0])
    sent[0]["content"][0]["image"] = uri
    reply = client.post("/get_reward", json=request | {"prompts": [json.dumps(sent)]}).json()
    assert reply["rewards"] == pytest.approx(model.score([model.encode(asked, ANSWER)]), abs=1e-5)


def test_a_sample_that_cannot_be_scored_is_named(client, model, folder):
    good = sent_by_rollouts(model, TEXT, [ANSWER, ANSWER])
    broken = row(message("user", ImagePart(str(folder / "broken.png")), "?"))
    held = row(message("user", picture(84, 56), "?"))
    gone = row(message("user", ImagePart(str(folder.parent / "gone.png")), "?"))
    for bad, told in (
        (sent_by_rollouts(model, TEXT, ["What? " * 200]), "prompts[1]: the prompt and the response take "),
        (good | {"prompts": [*good["prompts"][:1], to_json(broken.messages)]}, "prompts[1]: cannot read the image "),
        (
            good | {"prompts": [*good["prompts"][:1], to_json(held.messages)]},
            "prompts[1]: the prompt only says <image 84x56>",
        ),
        (
            good | {"prompts": [*good["prompts"][:1], to_json(gone.messages)]},
            "is not below a folder given with --image_root",
        ),
        (
            {"query": ["a", "b<|image_pad|>"], "prompts": ["a", "b"], "labels": ["", ""]},
            "query[1]: the text holds the ",
        ),
        ({"query": ["a", ""], "prompts": ["a", ""], "labels": ["", ""]}, "query[1]: the text is empty"),
    ):
        if len(bad["query"]) == 1:
            bad = {name: [*good[name][:1], *bad[name]] for name in bad}
        reply = client.post("/get_reward", json=bad)
        assert reply.status_code == 422
        assert told in reply.json()["detail"]
    assert client.post("/get_reward", json=good).status_code == 200


def test_limits_of_the_reward_service_hold(client, model, folder):
    empty: dict[str, list[str]] = {"query": [], "prompts": [], "labels": []}
    assert client.post("/get_reward", json=empty).json()["rewards"] == []
    assert client.post("/get_reward", json=empty | {"labels": ["1"]}).status_code == 422
    assert client.post("/get_reward", json=empty | {"labels": ["1" * 200_000]}).status_code == 413
    with client_of(model, folder, token="secret") as guarded:
        assert guarded.post("/get_reward", json=empty).status_code == 401
        allowed = {"Authorization": "Bearer secret"}
        assert guarded.post("/get_reward", json=empty, headers=allowed).status_code == 200


def test_health_and_metrics_count_samples(model, folder):
    with client_of(model, folder) as client:
        client.post("/get_reward", json=sent_by_rollouts(model, TEXT, [ANSWER, OTHER]))
        health = client.get("/health").json()
        assert (health["status"], health["verifier"]) == ("ok", "reward_model")
        assert [health[name] for name in ("items", "worker", "failed", "waiting", "busy")] == [2, 2, 0, 0, 0]
        assert 'remote_rm_items_total{kind="worker"} 2.0' in client.get("/metrics").text


def test_what_is_done_for_a_client_that_went_away_is_cancelled():
    ended: list[str] = []
    app = FastAPI()
    app.add_middleware(Abandonment)

    @app.post("/slow")
    async def slow(body: list[int]) -> int:
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise
        return 1

    async def scenario() -> list[int]:
        messages = [
            {"type": "http.request", "body": b"[1,", "more_body": True},
            {"type": "http.request", "body": b"2]", "more_body": False},
            {"type": "http.disconnect"},
        ]
        sent: list[dict] = []

        async def receive() -> dict:
            return messages.pop(0)

        async def send(reply: dict) -> None:
            sent.append(reply)

        headers = [(b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": "/slow", "headers": headers, "query_string": b""}
        await asyncio.wait_for(app(scope, receive, send), timeout=10)
        return [reply["status"] for reply in sent if "status" in reply]

    assert asyncio.run(scenario()) == [499]
    assert ended == ["cancelled"]


@pytest.mark.parametrize(
    ("flags", "has_gpu", "dtype"), [([], False, "fp32"), ([], True, "bf16"), (["--dtype", "fp16"], False, "fp16")]
)
def test_a_servers_precision_is_that_of_training(flags, has_gpu, dtype, monkeypatch, tmp_path):
    loaded = {}
    monkeypatch.setattr(precision, "CPUINFO", tmp_path / "none")
    monkeypatch.setattr(precision, "has_gpu", lambda environment: has_gpu)
    monkeypatch.setattr("lmm_r1.lmm_kits.registry.kit_name_of", lambda path, **settings: "llm")
    monkeypatch.setattr("lmm_r1.cpu.prepare_process", lambda: None)
    monkeypatch.setattr("lmm_r1.scoring.reward_model.RewardModel", lambda path, **settings: loaded.update(settings))
    monkeypatch.setattr("lmm_r1.scoring.reward_service.serve", lambda load, **settings: load())
    serve_rm.main(["--model", "my-rm", *flags])
    assert loaded["dtype"] == dtype
