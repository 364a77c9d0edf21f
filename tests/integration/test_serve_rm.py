"""`lmm-r1 serve_rm` as a process of its own, on a small multimodal reward model."""

import asyncio
import json
import signal
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
from helpers.commands import error_of
from helpers.conversations import message, picture, row
from helpers.reward_servers import RunningServer, health_of, running
from helpers.value_models import save_reward_model, sent_by_openrlhf, sent_by_rollouts

from lmm_r1.data.messages import ImagePart, Row, to_json
from lmm_r1.scoring.reward_model import RewardModel
from remote_rm.client import RewardClient, RewardUnavailable
from remote_rm.verifier import Score

pytestmark = pytest.mark.slow

TOKEN = "a secret of the test"
RESPONSES = ["<answer>46</answer>", "What?", "<think>12 + 34 = 46</think><answer>46</answer>"]
MODULE = "lmm_r1.cli.serve_rm"
# Threads of PyTorch's that wait for one another share the cores badly with what else runs here.
ENVIRONMENT = {"RM_TOKEN": TOKEN, "OMP_NUM_THREADS": "1"}
ENOUGH = 500
"""Samples that take the model long enough to look at it meanwhile."""


@dataclass(frozen=True, kw_only=True)
class Served:
    server: RunningServer
    model: RewardModel
    """The same checkpoint in this process."""
    rows: tuple[Row, ...]

    def post(self, request: dict[str, Any], *, token: str = TOKEN) -> tuple[int, dict[str, Any], dict[str, str]]:
        return post(self.server.endpoint, request, token=token)


def post(endpoint: str, request: dict[str, Any], *, token: str) -> tuple[int, dict[str, Any], dict[str, str]]:
    """Return status, body and headers."""
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {token}"}
    asked = urllib.request.Request(endpoint, data=json.dumps(request).encode(), headers=headers)
    try:
        with urllib.request.urlopen(asked, timeout=120) as reply:
            return reply.status, json.load(reply), dict(reply.headers)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error), dict(error.headers)


def wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


def serve_command(checkpoint: Path, *flags: str) -> list[str]:
    return [sys.executable, "-m", MODULE, "--model", str(checkpoint), "--port", "0", "--dtype", "fp32", *flags]


@pytest.fixture(scope="module")
def checkpoint(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_reward_model(demo / "model", tmp_path_factory.mktemp("reward") / "model")


@pytest.fixture(scope="module")
def served(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("images")
    picture(84, 56).save(folder / "picture.png")
    rows = (
        row(message("user", "What is 12 + 34?"), answer=""),
        row(message("user", ImagePart(str(folder / "picture.png")), "Which digit is this?"), answer="4"),
    )
    model = RewardModel(
        str(checkpoint),
        dtype="fp32",
        max_len=300,
        max_batch_tokens=2048,
        value_head_prefix="score",
        normalize=False,
        trust_remote_code=False,
    )
    command = serve_command(
        checkpoint,
        *("--max_len", "300", "--max-batch-tokens", "2048", "--image_root", str(folder)),
        *("--max_request_mib", "4", "--token-env", "RM_TOKEN"),
    )
    with running(command, env=ENVIRONMENT) as server:
        yield Served(server=server, model=model, rows=rows)


def test_text_and_image_samples_get_the_rewards_of_the_model(served):
    for asked in served.rows:
        status, reply, _ = served.post(sent_by_rollouts(served.model, asked, RESPONSES))
        expected = served.model.score([served.model.encode(asked, response) for response in RESPONSES])
        assert status == 200
        assert reply["rewards"] == pytest.approx(expected, abs=1e-5)
        assert len({round(reward, 4) for reward in reply["rewards"]}) == 3


def test_openrlhfs_requests_get_the_rewards_of_the_model(served):
    text, image = served.rows
    status, reply, _ = served.post(sent_by_openrlhf(served.model, text, RESPONSES))
    expected = served.model.score([served.model.encode(text, response) for response in RESPONSES])
    assert (status, reply["rewards"]) == (200, pytest.approx(expected, abs=1e-5))
    status, reply, _ = served.post(sent_by_openrlhf(served.model, image, RESPONSES))
    assert status == 422
    assert reply["detail"].startswith(
        "query[0]: the text holds the media token <|vision_start|>, but has no image for it"
    )


def test_our_client_gets_many_rewards_at_a_time(served):
    requests = [
        {"query": request["query"][0], "prompt": request["prompts"][0], "label": "", "response": response}
        for asked in served.rows
        for response in RESPONSES * 5
        for request in [sent_by_rollouts(served.model, asked, [response])]
    ]

    async def scenario() -> list[Score]:
        async with RewardClient([served.server.endpoint], token=TOKEN) as client:
            await client.check_health()
            return await asyncio.gather(*(client.reward(**request) for request in requests))

    rewards = [item.reward for item in asyncio.run(scenario())]
    expected = [
        reward
        for asked in served.rows
        for reward in served.model.score([served.model.encode(asked, response) for response in RESPONSES]) * 5
    ]
    assert rewards == pytest.approx(expected, abs=1e-5)


def test_what_cannot_be_scored_is_refused_by_its_place(served):
    request = sent_by_rollouts(served.model, served.rows[0], ["What?", "What? " * 300])
    status, reply, _ = served.post(request)
    assert status == 422
    assert reply["detail"].startswith("prompts[1]: the prompt and the response take ")
    for image, told in (
        (ImagePart("/etc/hostname"), "is not below a folder given with --image_root"),
        (picture(84, 56), "names its image only as <image 84x56>"),
    ):
        prompt = to_json([message("user", image, "?")])
        status, reply, _ = served.post({"query": ["?"], "prompts": [prompt], "labels": [""], "responses": ["4"]})
        assert status == 422
        assert told in reply["detail"]

    async def scenario() -> None:
        async with RewardClient([served.server.endpoint], token=TOKEN) as client:
            await client.reward(query="", prompt=request["prompts"][1], label="", response="What? " * 300)

    with pytest.raises(RewardUnavailable, match="more than --max_len 300"):
        asyncio.run(scenario())


def test_a_server_refuses_strangers_and_large_requests(served):
    request = sent_by_rollouts(served.model, served.rows[0], RESPONSES)
    assert served.post(request, token="another")[0] == 401
    connection = HTTPConnection(served.server.address.removeprefix("http://"), timeout=30)
    connection.request(
        "POST", "/get_reward", headers={"Authorization": f"Bearer {TOKEN}", "Content-Length": "5000000"}
    )
    assert connection.getresponse().status == 413
    connection.close()
    assert served.post(request | {"labels": []})[0] == 422
    assert served.post(request)[0] == 200


def test_a_client_that_goes_away_frees_its_samples(served):
    large = sent_by_rollouts(served.model, served.rows[0], [f"{number} {RESPONSES[2]}" for number in range(ENOUGH)])
    scored = health_of(served.server)["worker"]

    async def scenario() -> None:
        async with RewardClient([served.server.endpoint], token=TOKEN) as client:
            session = client._session_here()
            posting = asyncio.create_task(session.post(served.server.endpoint, json=large))
            while (await asyncio.to_thread(health_of, served.server))["waiting"] == 0:
                assert not posting.done()
            posting.cancel()

    asyncio.run(scenario())
    wait_for(lambda: health_of(served.server)["waiting"] == 0)
    assert health_of(served.server)["worker"] - scored < ENOUGH / 2


@pytest.mark.usefixtures("own_environment")
def test_a_checkpoint_that_cannot_be_served_is_told_in_one_sentence(tiny_checkpoint, tmp_path, capfd):
    bare = tiny_checkpoint("qwen2_5_vl")
    for checkpoint, told in (
        (tmp_path / "nothing", f"{tmp_path}/nothing: no such folder; check the path"),
        (
            bare,
            f"{bare}: this checkpoint has no value head (no weight score.weight); give a trained reward model, or ",
        ),
    ):
        assert error_of("serve_rm", serve_command(checkpoint)[3:], capfd=capfd).startswith(told)


def test_at_last_a_stopped_server_answers_what_is_open(served):
    large = sent_by_rollouts(served.model, served.rows[0], [f"{number} {RESPONSES[2]}" for number in range(ENOUGH)])
    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(served.post, large)
        wait_for(lambda: health_of(served.server)["waiting"] > 0)
        served.server.process.send_signal(signal.SIGTERM)
        status, reply, _ = asked.result()
    assert status == 200
    assert len(reply["rewards"]) == ENOUGH
    assert served.server.process.wait(timeout=30) == 128 + signal.SIGTERM
