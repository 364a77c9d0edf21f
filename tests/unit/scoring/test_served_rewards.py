"""A reward model behind HTTP, as `batch_inference` asks it."""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from helpers.conversations import message, picture, row
from helpers.value_models import save_reward_model

from lmm_r1.config.generation import BatchConfig
from lmm_r1.data.messages import ImagePart, Row
from lmm_r1.data.sent_prompt import MediaAccess
from lmm_r1.errors import UserError
from lmm_r1.scoring.reward_judge import create_app
from lmm_r1.scoring.reward_model import RewardModel
from lmm_r1.tools.batch.run import BatchReport, run_batch
from remote_rm.verifier import ServiceLimits

RESPONSES = ["First, 12.\n\nSo 46.", " \n", "46"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    picture(84, 56).save(folder / "picture.png")
    return folder


@pytest.fixture(scope="module")
def model(tiny_checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> RewardModel:
    return RewardModel(
        str(save_reward_model(tiny_checkpoint("qwen2_5_vl"), tmp_path_factory.mktemp("models") / "reward_model")),
        dtype="fp32",
        max_len=200,
        max_batch_tokens=400,
        value_head_prefix="score",
        normalize=False,
        trust_remote_code=False,
    )


@pytest.fixture(scope="module")
def app(model: RewardModel, folder: Path) -> Any:
    return create_app(
        lambda: model,
        media=MediaAccess(roots=(folder,), allow_urls=False),
        limits=ServiceLimits(),
        token=None,
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
    rewards = [one["reward"] for one in line["responses"]]
    wanted = model.score([model.encode(image_row(folder), response) for response in RESPONSES])
    assert rewards == pytest.approx(wanted, abs=1e-5)
    assert len(set(rewards)) == 3
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
