"""A process reward model behind HTTP: named scores of steps for rollouts, OpenRLHF's requests, and `batch_inference`."""

import contextlib
import json
import math
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from helpers.conversations import message, picture, row
from helpers.value_models import sent_by_openrlhf, sent_by_rollouts

from lmm_r1.batch.run import BatchReport, run_batch
from lmm_r1.config.generation import BatchConfig
from lmm_r1.data.messages import ImagePart, Row
from lmm_r1.data.sample import Completion
from lmm_r1.data.sent_prompt import MediaAccess, ending_of
from lmm_r1.errors import UserError
from lmm_r1.scoring import StepJudging, not_finite
from lmm_r1.scoring.response_scores import query_of
from lmm_r1.scoring.reward_judge import StepRewards, create_app
from lmm_r1.scoring.reward_model import ProcessRewardModel
from remote_rm.verifier import ServiceLimits

RESPONSES = ["First, 12.\n\nSo 46.", " \n", "46"]
NAMES = ["steps", "steps_min", "steps_product", "steps_last", "steps_mean"]
TEXT = row(message("user", "What is 12 + 34?"), answer="46")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    picture(84, 56).save(folder / "picture.png")
    return folder


@pytest.fixture(scope="module")
def model(tiny_checkpoint: Callable[[str], Path]) -> ProcessRewardModel:
    return ProcessRewardModel(
        str(tiny_checkpoint("qwen2_5_vl")),
        judging=StepJudging(step_scores="min", placeholder_token="*", reward_tokens=("+", "-")),
        dtype="fp32",
        max_len=200,
        max_batch_tokens=400,
        trust_remote_code=False,
    )


@pytest.fixture(scope="module")
def app(model: ProcessRewardModel, folder: Path) -> Any:
    return create_app(
        lambda: StepRewards(model, step_scores="product"),
        media=MediaAccess(roots=(folder,), allow_urls=False),
        limits=ServiceLimits(),
        token=None,
        log_sample_share=0.0,
    )


@pytest.fixture(scope="module")
def server(app: Any) -> Iterator[str]:
    """The address of a server of this process."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        running = uvicorn.Server(uvicorn.Config(app, log_level="error"))
        thread = threading.Thread(target=running.run, kwargs={"sockets": [listener]})
        thread.start()
        while not running.started:
            time.sleep(0.01)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/get_reward"
        running.should_exit = True
        thread.join()


def image_row(folder: Path) -> Row:
    return row(message("user", ImagePart(str(folder / "picture.png")), "Which digit is this?"), answer="4")


def expected(model: ProcessRewardModel, asked: Row) -> dict[str, list[float]]:
    """Of two steps, no step, and one step."""
    (first, second), none, (only,) = model.score([model.encode_steps(asked, response) for response in RESPONSES])
    assert none == []
    columns = [
        (2.0, min(first, second), first * second, second, (first + second) / 2),
        (0.0, 0.0, 0.0, 0.0, 0.0),
        (1.0, only, only, only, only),
    ]
    return {
        name: pytest.approx(list(values), abs=1e-5)
        for name, values in zip(NAMES, zip(*columns, strict=True), strict=True)
    }


def post(server: str, request: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    asked = urllib.request.Request(
        server, data=json.dumps(request).encode(), headers={"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(asked, timeout=30) as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_rollouts_get_the_named_scores_of_steps(server, model, folder):
    for asked in (TEXT, image_row(folder)):
        status, reply = post(server, sent_by_rollouts(model, asked, RESPONSES))
        wanted = expected(model, asked)
        assert status == 200
        assert reply["rewards"] == reply["scores"] == wanted["steps_product"]
        assert {name: reply["extra_logs"][name] for name in NAMES} == wanted
        assert len(set(reply["rewards"])) == 3


def test_openrlhfs_requests_have_the_steps_behind_the_prompt(server, model, folder):
    _, reply = post(server, sent_by_openrlhf(model, TEXT, RESPONSES))
    assert reply["rewards"] == expected(model, TEXT)["steps_product"]
    status, reply = post(server, sent_by_openrlhf(model, image_row(folder), RESPONSES))
    assert status == 422
    assert reply["detail"].startswith("query[0]: the text holds the media token <|vision_start|>, but has no image")
    status, reply = post(server, sent_by_rollouts(model, TEXT, ["4", "word " * 300]))
    assert status == 422
    assert reply["detail"].startswith("prompts[1]: the prompt and the response take ")


@pytest.mark.parametrize("step_scores", ["min", "last"])
def test_a_step_without_a_finite_score_makes_no_reward(model, monkeypatch, step_scores):
    # By the least and by the last of them alone it would go unnoticed.
    monkeypatch.setattr(model, "score", lambda samples: [[0.5, float("nan"), 0.5]])
    (score,) = StepRewards(model, step_scores=step_scores).score([])
    assert score.reward == 0.5
    assert math.isnan(not_finite(score))


def given(folder: Path, *responses: str) -> str:
    """A row with its responses, as one line."""
    question = {"type": "text", "text": "Which digit is this?"}
    content = [{"type": "image", "image": str(folder / "picture.png")}, question]
    listed = [{"text": text, "finish_reason": "stop"} for text in responses]
    return json.dumps({"prompt": [{"role": "user", "content": content}], "responses": listed}) + "\n"


def scored(tmp_path: Path, lines: str, **flags: Any) -> tuple[BatchReport, list[dict[str, Any]]]:
    """Return the report of `batch_inference --eval_task rm` on these rows, and the lines that it wrote."""
    (tmp_path / "given.jsonl").write_text(lines)
    config = BatchConfig(eval_task="rm", data=str(tmp_path / "given.jsonl"), output=tmp_path / "out.jsonl", **flags)
    report = run_batch(config, progress=lambda *told, **numbers: contextlib.nullcontext(lambda totals: None))
    return report, list(map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines()))


def test_batch_inference_scores_by_a_server_as_by_the_model_itself(server, model, folder, tmp_path):
    flags = {"model": server, "select": "best_of_n", "selected": tmp_path / "best.jsonl"}
    report, (line,) = scored(tmp_path, given(folder, *RESPONSES), **flags)
    wanted = expected(model, image_row(folder))
    assert {name: [one["scores"][name] for one in line["responses"]] for name in NAMES} == wanted
    rewards = [one["reward"] for one in line["responses"]]
    assert rewards == wanted["steps_product"]
    (best,) = map(json.loads, (tmp_path / "best.jsonl").read_text().splitlines())
    assert (report.selected, best["messages"][-1]["content"]) == (1, RESPONSES[rewards.index(max(rewards))])


def test_a_row_that_a_server_refuses_is_left_out_and_a_server_that_gives_no_rewards_ends_the_job(
    server, folder, tmp_path
):
    lines = given(folder, "word " * 300) + given(folder, "46")
    report, (line,) = scored(tmp_path, lines, model=server)
    assert line["index"] == 1
    assert "the prompt and the response take " in report.skipped[0].reason
    for address, told in (
        (server.replace("get_reward", "get_rewards"), "refused the request with 404"),
        ("http://127.0.0.1:9/get_reward", "no reward server listens at http://127.0.0.1:9"),
        ("http://", "'http://' is no address of a reward server"),
    ):
        with pytest.raises(UserError, match=f"^--model.*{told}"):
            scored(tmp_path, lines, model=address, overwrite=True)


def test_a_response_that_was_cut_off_stands_at_the_querys_end():
    whole, cut = (Completion(text="46", num_tokens=None, finish_reason=reason) for reason in ("stop", "length"))
    assert ending_of(query_of("2 + 2", cut), response="46") == ""
    assert ending_of(query_of("2 + 2", whole), response="46") not in ("", None)
