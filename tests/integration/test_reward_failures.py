"""Reward servers whose workers, or which themselves, are killed or stopped while they have work."""

import asyncio
import json
import random
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from helpers.reward_servers import ROOT, RunningServer, math_command, running, unruly_command

from remote_rm.client import RewardClient


def samples(count: int) -> list[tuple[str, str, float]]:
    """Responses that only a worker can judge, their labels and their rewards: every third is wrong."""
    made = []
    for number in range(2, count + 2):
        wrong = number % 3 == 0
        answer = rf"<answer>|-{number + wrong}\sqrt{{2}}|</answer>"
        made.append((answer, rf"{number}\sqrt{{2}}", 0.0 if wrong else 1.0))
    return made


async def rewarded(client: RewardClient, asked: list[tuple[str, str, float]]) -> list[float]:
    replies = [client.reward(query="q", prompt="p", label=label, response=answer) for answer, label, _ in asked]
    return [reply.reward for reply in await asyncio.gather(*replies)]


def get(address: str, headers: dict[str, str] | None = None) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(urllib.request.Request(address, headers=headers or {}), timeout=30) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_workers_killed_under_load_lose_no_reply_and_make_none_wrong():
    asked = samples(600)

    async def scenario(server: RunningServer) -> tuple[list[float], int]:
        async with RewardClient([server.endpoint], connections=32) as client:
            judging = asyncio.create_task(rewarded(client, asked))
            killed = 0
            while not judging.done():
                await asyncio.sleep(0.25)
                for worker in random.sample(workers := server.workers(), min(1, len(workers))):
                    worker.kill()
                    killed += 1
            return await judging, killed

    with running(math_command("--workers", "2")) as server:
        # A server of which a worker dies before all have come up stops.
        assert server.workers(at_least=2)
        rewards, killed = asyncio.run(scenario(server))
        health = json.loads(get(f"{server.address}/health")[1])
    assert killed >= 5
    assert rewards == [reward for *_, reward in asked]
    assert (health["failed"], health["timed_out"], health["items"]) == (0, 0, 600)


def test_one_of_two_servers_killed_under_load_costs_no_reward():
    asked = samples(600)

    async def scenario(first: RunningServer, second: RunningServer) -> list[float]:
        async with RewardClient([first.endpoint, second.endpoint], connections=32) as client:
            await client.check_health()
            judging = asyncio.create_task(rewarded(client, asked))
            await asyncio.sleep(0.5)
            assert not judging.done()
            first.kill()
            return await judging

    flags = ("--workers", "1")
    with running(math_command(*flags)) as first, running(math_command(*flags)) as second:
        rewards = asyncio.run(scenario(first, second))
        assert json.loads(get(f"{second.address}/health")[1])["items"] >= 300
    assert rewards == [reward for *_, reward in asked]


def test_a_server_that_hangs_is_left_for_the_other():
    asked = samples(40)

    async def scenario(first: RunningServer, second: RunningServer) -> tuple[list[float], float]:
        # The attempts under way time out once; the hung server is then looked at by one short request at a time.
        async with RewardClient([first.endpoint, second.endpoint], timeout_s=2.0, connections=4) as client:
            psutil.Process(first.process.pid).suspend()
            started = time.monotonic()
            try:
                return await rewarded(client, asked), time.monotonic() - started
            finally:
                psutil.Process(first.process.pid).resume()

    flags = ("--workers", "1")
    with running(math_command(*flags)) as first, running(math_command(*flags)) as second:
        rewards, seconds = asyncio.run(scenario(first, second))
    assert rewards == [reward for *_, reward in asked]
    assert seconds < 20


def test_a_server_told_to_stop_answers_what_it_has_and_takes_nothing_new(tmp_path):
    body = {"query": ["q"] * 8, "prompts": ["p"] * 8, "labels": ["1"] * 8, "responses": ["sleep 0.4"] * 8}
    with running(unruly_command(tmp_path, "--workers", "1", "--item-timeout-seconds", "1")) as server:
        workers = server.workers()
        request = urllib.request.Request(
            server.endpoint, data=json.dumps(body).encode(), headers={"Content-Type": "application/json"}
        )
        with ThreadPoolExecutor() as pool:
            asking = pool.submit(lambda: json.load(urllib.request.urlopen(request, timeout=60)))
            time.sleep(0.5)
            server.process.send_signal(signal.SIGTERM)
            time.sleep(0.5)
            with pytest.raises(urllib.error.URLError):
                urllib.request.urlopen(f"{server.address}/health", timeout=5)
            assert asking.result()["rewards"] == [0.4] * 8
        server.process.wait(timeout=10)
        assert not any(worker.is_running() for worker in workers)


def test_a_token_that_is_not_set_is_one_sentence_and_exit_code_1():
    ended = subprocess.run(math_command("--token-env", "NO_SUCH_TOKEN"), cwd=ROOT, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.startswith("reward server: error: --token-env NO_SUCH_TOKEN: the environment variable")
    assert ended.stderr.count("\n") == 1


def test_a_server_is_up_within_three_seconds():
    # The best of three: what else runs on the machine is not what is measured, nor is a machine on which the libraries
    # alone take more than a second.
    libraries = [sys.executable, "-c", "import fastapi, math_verify, uvicorn"]
    seconds, alone = [], []
    for _ in range(3):
        started = time.perf_counter()
        subprocess.run(libraries, check=True)
        alone.append(time.perf_counter() - started)
        started = time.perf_counter()
        with running(math_command("--workers", "2")) as server:
            assert get(f"{server.address}/health")[0] == 200
            seconds.append(time.perf_counter() - started)
    assert min(seconds) <= 3.0 * max(1.0, min(alone)), (seconds, alone)
