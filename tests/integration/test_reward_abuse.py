"""A reward server that is abused goes on answering those who do not abuse it, and ends when it is told to."""

import asyncio
import json
import signal
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from helpers.reward_servers import RunningServer, health_of, running, unruly_command

from remote_rm.client import RewardClient


def post(server: RunningServer, body: bytes) -> tuple[int, dict]:
    request = urllib.request.Request(server.endpoint, data=body, headers={"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def body_of(*responses: str) -> bytes:
    count = len(responses)
    columns = {"query": ["q"] * count, "prompts": ["p"] * count, "labels": ["1"] * count, "responses": responses}
    return json.dumps(columns).encode()


def wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


def test_retries_of_a_client_that_times_out_are_not_judged_beside_the_first(tmp_path):
    async def scenario(server: RunningServer) -> float:
        async with RewardClient([server.endpoint], timeout_s=0.6) as client:
            return (await client.reward(query="q", prompt="p", label="1", response="sleep 1.5")).reward

    with running(unruly_command(tmp_path, "--workers", "1")) as server:
        assert server.workers()
        # The attempts may take 0.6, 1.2 and 2.4 s: the last leaves a worker that is started anew 0.9 s.
        assert asyncio.run(scenario(server)) == 1.5
        health = health_of(server)
    # Of the earlier ones nothing was left to be judged.
    assert health["items"] >= 3
    assert (health["worker"], health["busy"], health["waiting"], health["lost_workers"]) == (1, 0, 0, 0)


def test_a_huge_batch_is_refused_while_health_answers(tmp_path):
    slowest = 0.0
    huge = body_of(*["quick"] * 400_000)
    with running(unruly_command(tmp_path, "--workers", "1")) as server, ThreadPoolExecutor() as threads:
        asking = [threads.submit(post, server, body) for body in (huge, huge, body_of(*["quick"] * 10_000))]
        while not all(task.done() for task in asking):
            started = time.monotonic()
            most = health_of(server)["max_request_items"]
            slowest = max(slowest, time.monotonic() - started)
        assert most == 10_000
        for task in asking[:2]:
            assert task.result() == (
                413,
                {
                    "detail": "a request may hold 10000 samples; send the others in requests of their own",
                    "max_request_items": 10_000,
                },
            )
        assert asking[2].result()[1]["rewards"] == [7.0] * 10_000
    # It is 0.1 s where nothing else runs, and was 5 s.
    assert slowest < 2.0


def test_a_server_told_to_stop_refuses_at_the_end_of_its_grace_what_it_has_not_answered(tmp_path):
    flags = ("--workers", "1", "--item-timeout-seconds", "60", "--grace-seconds", "4")
    with running(unruly_command(tmp_path, *flags)) as server, ThreadPoolExecutor() as threads:
        workers = server.workers()
        endless = threads.submit(post, server, body_of("sleep 50", "sleep 50"))
        short = threads.submit(post, server, body_of("sleep 0.9"))
        with socket.create_connection(("127.0.0.1", int(server.address.rsplit(":", 1)[1]))) as slow:
            slow.sendall(b"POST /get_reward HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n")
            slow.sendall(b"Content-Length: 100\r\n\r\n{")
            wait_for(lambda: health_of(server)["busy"] == 2)
            server.process.send_signal(signal.SIGTERM)
            started = time.monotonic()
            assert short.result()[1]["rewards"] == [0.9]
            assert endless.result()[0] == 503
            slow.settimeout(10)
            assert slow.recv(100).startswith(b"HTTP/1.1 503 ")
            assert server.process.wait(timeout=30) == 128 + signal.SIGTERM
        assert time.monotonic() - started < 10
        assert not any(worker.is_running() for worker in workers)
