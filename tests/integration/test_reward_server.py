"""Reward servers as real processes: the command, its workers, and what becomes of rewards when they are killed or stopped."""

import asyncio
import contextlib
import http.server
import json
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from helpers.reward_servers import ROOT, RunningServer, health_of, math_command, running, unruly_command

from remote_rm.client import RewardClient, RewardUnavailable


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


def post(server: RunningServer, *responses: str) -> tuple[int, str]:
    count = len(responses)
    columns = {"query": ["q"] * count, "prompts": ["p"] * count, "labels": ["1"] * count, "responses": responses}
    body, headers = json.dumps(columns).encode(), {"Content-Type": "application/json"}
    try:
        with urllib.request.urlopen(urllib.request.Request(server.endpoint, body, headers), timeout=60) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("server")
    flags = ("--port-file", str(folder / "port"), "--workers", "2")
    with running(math_command(*flags, "--item-timeout-seconds", "1.5")) as started:
        assert started.address.endswith(":" + (folder / "port").read_text().strip())
        yield started


@contextlib.contextmanager
def plain_http_server() -> Iterator[int]:
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Quiet) as other:
        threading.Thread(target=other.serve_forever, args=(0.02,), daemon=True).start()
        try:
            yield other.server_port
        finally:
            other.shutdown()


def test_a_real_server_judges_what_a_client_sends(server):
    asked = [
        ("<think>t</think><answer>42</answer>", "42", 1.5),
        ("<think>t</think><answer>41</answer>", "42", 0.5),
        *samples(2),
    ] * 50

    async def scenario() -> list[float]:
        async with RewardClient([server.endpoint]) as client:
            await client.check_health()
            return await rewarded(client, asked)

    assert asyncio.run(scenario()) == [reward for *_, reward in asked]


def test_a_huge_batch_is_refused_while_health_answers(server):
    slowest = 0.0
    with ThreadPoolExecutor() as threads:
        asking = [threads.submit(post, server, *["1"] * count) for count in (200_000, 10_000)]
        while not all(task.done() for task in asking):
            started = time.monotonic()
            health_of(server)
            slowest = max(slowest, time.monotonic() - started)
    assert asking[0].result() == (
        413,
        '{"detail":"a request may hold 10000 samples; send the others in requests of their own"}',
    )
    assert json.loads(asking[1].result()[1])["scores"] == [1.0] * 10_000
    assert slowest < 3.0


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--port", "{port}"), "cannot listen on 127.0.0.1:"),
        (("--token-env", "NO_SUCH_TOKEN"), "--token-env NO_SUCH_TOKEN: the environment variable"),
        (("--port-file", "/dev/null/port"), "--port-file /dev/null/port cannot be written"),
    ],
)
def test_what_cannot_be_served_is_one_sentence_and_exit_code_1(flags, told):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        given = [flag.format(port=taken.getsockname()[1]) for flag in flags]
        ended = subprocess.run(math_command(*given), cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.startswith(f"reward server: error: {told}")
    assert ended.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("ask", "told"),
    [
        (RewardClient.check_health, "is no reward server: something else"),
        (
            lambda client: client.reward(query="q", prompt="p", label="1", response="1"),
            "501.*check the port and the path",
        ),
    ],
)
def test_a_wrong_port_is_told_at_start_and_is_final_for_a_request(ask, told):
    async def scenario(port: int) -> None:
        async with RewardClient([f"http://127.0.0.1:{port}/get_reward"]) as client:
            await ask(client)

    with plain_http_server() as port, pytest.raises(RewardUnavailable, match=told):
        asyncio.run(scenario(port))


def test_rewards_survive_a_server_that_hangs_and_one_that_is_killed():
    asked = samples(80)

    async def scenario(first: RunningServer, second: RunningServer) -> tuple[list[float], float]:
        endpoints = [first.endpoint, second.endpoint]
        async with RewardClient(endpoints, timeout_s=2.0, connections=4) as client:
            psutil.Process(first.process.pid).suspend()
            started = time.monotonic()
            judging = asyncio.create_task(rewarded(client, asked))
            await asyncio.sleep(3)
            first.kill()
            return await judging, time.monotonic() - started

    with running(math_command("--workers", "1")) as first, running(math_command("--workers", "1")) as second:
        rewards, seconds = asyncio.run(scenario(first, second))
    assert rewards == [reward for *_, reward in asked]
    assert seconds < 30


def test_retries_of_a_client_that_times_out_are_not_judged_beside_the_first(tmp_path):
    async def scenario(server: RunningServer) -> float:
        async with RewardClient([server.endpoint], timeout_s=0.6) as client:
            return (await client.reward(query="q", prompt="p", label="1", response="sleep 1.5")).reward

    with running(unruly_command(tmp_path, "--workers", "1")) as server:
        # The attempts may take 0.6, 1.2 and 2.4 s.
        assert asyncio.run(scenario(server)) == 1.5
        health = health_of(server)
    assert health["items"] >= 3
    assert (health["worker"], health["waiting"], health["lost_workers"]) == (1, 0, 0)


def test_a_server_told_to_stop_answers_what_it_can_takes_nothing_new_and_leaves_no_process(tmp_path):
    flags = ("--workers", "2", "--item-timeout-seconds", "60", "--grace-seconds", "3")
    with running(unruly_command(tmp_path, *flags)) as server, ThreadPoolExecutor() as threads:
        endless = threads.submit(post, server, "sleep 50")
        short = threads.submit(post, server, "sleep 1.5")
        wait_for(lambda: health_of(server)["waiting"] == 2)
        workers = server.workers()
        with socket.create_connection(("127.0.0.1", int(server.address.rsplit(":", 1)[1]))) as slow:
            slow.sendall(b"POST /get_reward HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
            server.process.send_signal(signal.SIGTERM)
            time.sleep(0.5)
            with pytest.raises(urllib.error.URLError):
                health_of(server)
            assert json.loads(short.result()[1])["rewards"] == [1.5]
            assert endless.result()[0] == 500
            slow.settimeout(10)
            assert slow.recv(100).startswith(b"HTTP/1.1 500 ")
        assert server.process.wait(timeout=30) == 128 + signal.SIGTERM
        assert not any(worker.is_running() for worker in workers)


def test_a_worker_that_computes_on_ends_soon_after_its_server_was_killed(tmp_path: Path):
    flags = ("--workers", "1", "--item-timeout-seconds", "1")
    with running(unruly_command(tmp_path, *flags)) as server, ThreadPoolExecutor() as threads:
        asking = threads.submit(post, server, "burn")
        wait_for(lambda: health_of(server)["waiting"] == 1)
        (worker,) = server.workers()
        server.kill()
        assert asking.exception() is not None
        worker.wait(timeout=60)
