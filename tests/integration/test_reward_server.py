"""The reward service with real processes: the command, its workers, and the client against it."""

import asyncio
import contextlib
import http.server
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.reward_servers import everything, import_unruly, unruly_command

from remote_rm.client import RewardClient, RewardUnavailable
from remote_rm.math_verifier import MathVerifier
from remote_rm.service.pool import VerifierPool
from remote_rm.verifier import Item, Verifier

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-m", "remote_rm.math_verifier"]
ENDLESS = "<think>t</think><answer>$9^{9^{9^{9}}}$</answer>"


@pytest.fixture
def unruly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Verifier:
    return import_unruly(tmp_path, monkeypatch)


def items(*responses: str, label: str = "42") -> list[Item]:
    return [Item(prompt="p", response=response, label=label) for response in responses]


async def judged_by(pool: VerifierPool, *batches: list[Item]) -> list[list[float]]:
    await pool.start()
    try:
        return [[score.reward for score in await pool.judge(batch)] for batch in batches]
    finally:
        await pool.stop()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The command on a free port; yields the endpoint that it printed."""
    port_file = tmp_path_factory.mktemp("server") / "port"
    flags = ["--port", "0", "--port-file", str(port_file), "--workers", "2", "--item-timeout-seconds", "1.5"]
    with subprocess.Popen([*COMMAND, *flags], cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            line = process.stdout.readline()
            port = port_file.read_text().strip()
            assert line == f"reward server: http://127.0.0.1:{port}/get_reward\n"
            yield line.removeprefix("reward server: ").strip()
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(timeout=15)


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
    samples = [
        ("<think>t</think><answer>42</answer>", "42", 1.5),
        ("<think>t</think><answer>41</answer>", "42", 0.5),
        (r"<answer>|-16\sqrt{2}|</answer>", r"16\sqrt{2}", 1.0),
        (r"<answer>|-15\sqrt{2}|</answer>", r"16\sqrt{2}", 0.0),
    ] * 50

    async def scenario() -> list[float]:
        async with RewardClient([server]) as client:
            await client.check_health()
            requests = [
                client.reward(query="q", prompt="p", label=label, response=response) for response, label, _ in samples
            ]
            return [item.reward for item in await asyncio.gather(*requests)]

    assert asyncio.run(scenario()) == [reward for _, _, reward in samples]


def test_a_hanging_answer_costs_its_own_accuracy_and_nothing_else(server):
    async def scenario() -> tuple[float, dict[str, float], float]:
        async with RewardClient([server]) as client:
            hanging = client.reward(query="q", prompt="p", label="5", response=ENDLESS)
            beside = client.reward(
                query="q", prompt="p", label=r"16\sqrt{2}", response=r"<answer>|-16\sqrt{2}|</answer>"
            )
            first, second = await asyncio.gather(hanging, beside)
            return first.reward, first.parts, second.reward

    parts = {"accuracy": 0.0, "format": 1.0, "ungradable": 0.0, "timed_out": 1.0}
    assert asyncio.run(scenario()) == (0.5, parts, 1.0)


def test_a_port_in_use_is_one_sentence_and_exit_code_1():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ended = subprocess.run([*COMMAND, "--port", str(port)], cwd=ROOT, capture_output=True, text=True, timeout=30)
    assert ended.returncode == 1
    assert ended.stdout == ""
    assert f"cannot listen on 127.0.0.1:{port}" in ended.stderr
    assert ended.stderr.count("\n") == 1


def test_a_server_whose_workers_do_not_start_stops_with_one_sentence_and_code_1(tmp_path):
    command = unruly_command(tmp_path, "--workers", "1")
    module = tmp_path / "unruly_verifier.py"
    module.write_text(
        module.read_text() + "\n    def __setstate__(self, state):\n        raise RuntimeError('not here')\n"
    )
    ended = subprocess.run(command, cwd=ROOT, env=everything(), capture_output=True, text=True, timeout=120)
    assert ended.returncode == 1
    assert "reward server: error: the worker processes did not come up" in ended.stderr


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


def test_a_server_that_is_down_at_start_is_told_within_seconds():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{probe.getsockname()[1]}/get_reward"

    async def scenario() -> None:
        async with RewardClient([endpoint]) as client:
            await client.check_health()

    started = time.monotonic()
    with pytest.raises(RewardUnavailable, match=f"no reward server listens at {endpoint}.*remote_rm.math_verifier"):
        asyncio.run(scenario())
    assert time.monotonic() - started < 5


def test_one_bad_item_never_fails_its_batch_and_the_order_is_kept(unruly):
    pool = VerifierPool(unruly, workers=2, item_timeout_seconds=1.0)
    batch = items("1", "sleep 60", "2", "raise", "3", "die", "4", "allocate 65536", "not a number", "5")
    started = time.monotonic()
    rewards = asyncio.run(judged_by(pool, batch, items("6", "7", "8")))
    assert rewards == [[1.0, 0.0, 2.0, 0.0, 3.0, 0.0, 4.0, 0.0, 0.0, 5.0], [6.0, 7.0, 8.0]]
    assert (pool.counts.items, pool.counts.timed_out, pool.counts.failed) == (13, 1, 4)
    assert time.monotonic() - started < 20


def test_an_endless_expression_is_cut_off_though_it_never_lets_go_of_the_interpreter():
    pool = VerifierPool(MathVerifier(), workers=1, item_timeout_seconds=1.0)
    endless = r"<think>t</think><answer>99999999!</answer>"
    rewards = asyncio.run(judged_by(pool, items(endless, r"<answer>|-5|</answer>", label="5")))
    assert rewards == [[0.5, 1.0]]
    assert pool.counts.timed_out == 1
