"""Latency, memory and lost rewards of the reward server while it is abused, beside the same traffic alone; JSON on the last line.

python benchmarks/reward_abuse.py [--quick] [--output benchmarks/results/reward_abuse.json]

A second process abandons batches of endless items and asks again, waits for others, dribbles heads and bodies, sends huge
batches, and keeps connections open for nothing. Everything is on the loopback and shares the cores.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from math import ceil
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import numpy as np
import psutil
from machine import machine_name
from reward_samples import Sample, make_samples, pathological
from reward_server import ROOT, Command, cpu_seconds_of_others

from remote_rm.client import RewardClient, RewardUnavailable

ASKED = {"p99_s": 1.0, "health_s": 0.5, "lost": 0, "wrong": 0, "timed_out": 0, "memory_growth_mib": 48}
UPLOAD_SECONDS = 2.0
SETTLING_SECONDS = 15.0
HUGE_ITEMS = 400_000
LARGE_ITEMS = 30_000


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How long and how hard."""

    alone_s: float
    abused_s: float
    clients: int
    """Normal requests of one response under way, each followed by a pause."""
    pause_s: float
    abandoned: int
    """Clients that give up a batch of endless items and ask again."""
    endless: int
    """Clients that wait for theirs."""
    slow: int
    """Connections that dribble a body, and half as many that dribble a head."""
    huge: int
    idle: int
    """Connections that are opened for nothing."""


FULL = Scale(alone_s=15, abused_s=45, clients=16, pause_s=0.1, abandoned=4, endless=4, slow=32, huge=2, idle=100)
QUICK = replace(FULL, alone_s=2, abused_s=8, clients=8, abandoned=2, endless=2, slow=16, huge=1)


@dataclass(kw_only=True)
class Traffic:
    """What normal requests met."""

    latencies: list[float] = field(default_factory=list)
    health: list[float] = field(default_factory=list)
    lost: int = 0
    wrong: int = 0
    timed_out: int = 0

    def summary(self) -> dict:
        """Return the figures as plain values, in seconds."""
        return {
            "rewards": len(self.latencies),
            "p50_s": round(float(np.quantile(self.latencies, 0.5)), 4),
            "p99_s": round(float(np.quantile(self.latencies, 0.99)), 4),
            "max_s": round(max(self.latencies), 4),
            "health_p50_s": round(float(np.quantile(self.health, 0.5)), 4),
            "health_max_s": round(max(self.health), 4),
            "lost": self.lost,
            "wrong": self.wrong,
            "timed_out": self.timed_out,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="seconds instead of a minute")
    parser.add_argument("--workers", type=int, default=2, help="judging processes")
    parser.add_argument("--cores", type=int, default=2, help="cores that everything shares")
    parser.add_argument("--item-timeout-seconds", type=float, default=1.0, help="the server's limit per item")
    parser.add_argument("--output", type=Path, help="also write the JSON to this file")
    parser.add_argument("--abuse", metavar="URL", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    scale = QUICK if arguments.quick else FULL
    if arguments.abuse:
        print(json.dumps(asyncio.run(abuse(arguments.abuse, scale=scale))))
        return
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments.cores])
    result = measure(arguments, scale=scale)
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))


def measure(arguments: argparse.Namespace, *, scale: Scale) -> dict:
    """Run the traffic alone and beside the abuse, and return the result."""
    began, theirs = time.perf_counter(), cpu_seconds_of_others()
    result = {
        "benchmark": "reward_abuse",
        "machine": machine_name(),
        "cores": len(os.sched_getaffinity(0)),
        "load_before": round(os.getloadavg()[0], 2),
        "quick": arguments.quick,
        "workers": arguments.workers,
        "item_timeout_seconds": arguments.item_timeout_seconds,
    }
    with tempfile.TemporaryDirectory() as folder:
        port_file = Path(folder) / "port"
        flags = ("--workers", str(arguments.workers), "--item-timeout-seconds", str(arguments.item_timeout_seconds))
        limits = ("--head-timeout-seconds", str(UPLOAD_SECONDS), "--body-timeout-seconds", str(UPLOAD_SECONDS))
        module = ("-m", "remote_rm.math_verifier", "--port", "0", "--port-file", str(port_file))
        with Command(arguments=(*module, *flags, *limits), port_file=port_file).running() as url:
            server = server_process(port_file)
            # A first time, so that what stays is told from what grows.
            asyncio.run(traffic(url, scale=scale, seconds=2.0, seed=1))
            with abused(url, quick=arguments.quick) as _:
                asyncio.run(traffic(url, scale=scale, seconds=2.0, seed=2))
            settle(url)
            before = holdings(server)
            result["alone"] = asyncio.run(traffic(url, scale=scale, seconds=scale.alone_s, seed=3)).summary()
            with abused(url, quick=arguments.quick) as met:
                result["abused"] = asyncio.run(traffic(url, scale=scale, seconds=scale.abused_s, seed=4)).summary()
            result["abuse"] = met
            result["seconds_to_settle"] = settle(url)
            after = holdings(server)
            result["before"], result["after"] = before, after
            result["counts"] = asyncio.run(health_of(url))
    result["memory_growth_mib"] = round(after["memory_mib"] - before["memory_mib"], 1)
    result["asked"] = ASKED
    result["seconds"] = round(time.perf_counter() - began, 1)
    used = sum(seconds - theirs.get(pid, 0.0) for pid, seconds in cpu_seconds_of_others().items())
    result["cores_used_by_others"] = round(used / result["seconds"], 2)
    return result


# The server


def server_process(port_file: Path) -> psutil.Process:
    """Return the process that was told to write this file."""
    children = psutil.Process().children()
    return next(child for child in children if str(port_file) in child.cmdline())


def holdings(server: psutil.Process) -> dict:
    """Return what the server's process has, and how many worker processes there are."""
    workers = [worker for child in server.children() for worker in child.children()]
    return {
        "memory_mib": round(server.memory_info().rss / 2**20, 1),
        "worker_memory_mib": round(sum(worker.memory_info().rss for worker in workers) / 2**20, 1),
        "workers": len(workers),
        "open_files": server.num_fds(),
        "threads": server.num_threads(),
    }


def settle(url: str) -> float:
    """Wait until nothing waits or is judged; return the seconds."""
    began = time.monotonic()
    while time.monotonic() - began < SETTLING_SECONDS:
        state = asyncio.run(health_of(url))
        if state["waiting"] == state["busy"] == 0:
            break
        time.sleep(0.1)
    seconds = round(time.monotonic() - began, 2)
    # What belongs to connections is freed when they have been closed.
    time.sleep(1.5)
    return seconds


async def health_of(url: str) -> dict:
    """Return the server's counters."""
    async with aiohttp.ClientSession() as session, session.get(f"{url}/health") as reply:
        return await reply.json()


# Normal traffic


async def traffic(url: str, *, scale: Scale, seconds: float, seed: int) -> Traffic:
    """Ask for single rewards, each client one after the other, and for /health ten times a second."""
    met = Traffic()
    samples = iter(make_samples(ceil(seconds * scale.clients / scale.pause_s), seed=seed))
    until = time.perf_counter() + seconds

    async def client(requests: RewardClient) -> None:
        while time.perf_counter() < until:
            await ask(requests, next(samples), met)
            await asyncio.sleep(scale.pause_s)

    async def watcher(session: aiohttp.ClientSession) -> None:
        while time.perf_counter() < until:
            started = time.perf_counter()
            async with session.get(f"{url}/health") as reply:
                await reply.read()
            met.health.append(time.perf_counter() - started)
            await asyncio.sleep(0.1)

    async with RewardClient([f"{url}/get_reward"]) as requests, aiohttp.ClientSession() as session:
        await asyncio.gather(watcher(session), *(client(requests) for _ in range(scale.clients)))
    return met


async def ask(requests: RewardClient, sample: Sample, met: Traffic) -> None:
    """Ask for one reward and note how it went."""
    started = time.perf_counter()
    try:
        score = await requests.reward(
            query=sample.prompt + sample.response, prompt=sample.prompt, label=sample.label, response=sample.response
        )
    except RewardUnavailable:
        met.lost += 1
        return
    met.latencies.append(time.perf_counter() - started)
    met.timed_out += score.timed_out
    met.wrong += not score.timed_out and score.score != float(sample.is_right)


# Abuse


@contextmanager
def abused(url: str, *, quick: bool) -> Iterator[dict]:
    """Abuse the server from another process meanwhile; afterwards the dict holds what the abuser met."""
    met: dict = {}
    command = [sys.executable, __file__, "--abuse", url, *(["--quick"] if quick else [])]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield met
        told, _ = process.communicate("stop\n", timeout=30)
        met.update(json.loads(told.splitlines()[-1]))


async def abuse(url: str, *, scale: Scale) -> dict:
    """Do all of it until a line comes in on stdin; return how often what happened."""
    met: Counter[str] = Counter()
    rng = random.Random(0)
    endless = [body_of([pathological(rng) for _ in range(count)]) for count in (1, 8, 64)]
    texts = {"query": "q", "prompts": "p", "labels": "1", "responses": "<answer>1</answer>"}
    huge = [
        json.dumps({key: [text] * count for key, text in texts.items()}).encode()
        for count in (HUGE_ITEMS, LARGE_ITEMS)
    ]
    large = body_of(make_samples(1024, seed=5))
    print("ready", flush=True)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
        await_of = [
            *([lambda: abandon(session, url, rng.choice(endless), met)] * scale.abandoned),
            *([lambda: post(session, url, rng.choice(endless), met, name="endless")] * scale.endless),
            *([lambda: dribble(url, met, is_head=False)] * scale.slow),
            *([lambda: dribble(url, met, is_head=True)] * (scale.slow // 2)),
            *([lambda: post(session, url, rng.choice(huge), met, name="huge")] * scale.huge),
            *([lambda: post(session, url, large, met, name="large")] * scale.huge),
            *([lambda: stay_idle(url, met)] * scale.idle),
        ]
        tasks = [asyncio.create_task(for_ever(again)) for again in await_of]
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
    for error in ended:
        if not isinstance(error, asyncio.CancelledError):
            met[f"ended by {type(error).__name__}"] += 1
    return dict(sorted(met.items()))


async def for_ever(again: Callable[[], Awaitable[None]]) -> None:
    """Do something over and over, whatever the server does about it."""
    while True:
        with suppress(OSError, aiohttp.ClientError, asyncio.IncompleteReadError):
            await again()
        await asyncio.sleep(0.05)


def body_of(samples: Sequence[Sample]) -> bytes:
    """Return the request for some samples."""
    return json.dumps(
        {
            "query": [sample.prompt + sample.response for sample in samples],
            "prompts": [sample.prompt for sample in samples],
            "labels": [sample.label for sample in samples],
            "responses": [sample.response for sample in samples],
        }
    ).encode()


async def post(session: aiohttp.ClientSession, url: str, body: bytes, met: Counter[str], *, name: str) -> None:
    """Send a request and wait for its reply."""
    async with session.post(f"{url}/get_reward", data=body, headers={"Content-Type": "application/json"}) as reply:
        await reply.read()
        met[f"{name}: {reply.status}"] += 1


async def abandon(session: aiohttp.ClientSession, url: str, body: bytes, met: Counter[str]) -> None:
    """Send a request and go away before it can be answered."""
    met["abandoned"] += 1
    with suppress(asyncio.TimeoutError):
        await asyncio.wait_for(post(session, url, body, met, name="not abandoned"), timeout=0.4)


async def dribble(url: str, met: Counter[str], *, is_head: bool) -> None:
    """Send a byte now and then, until the server has had enough."""
    name = "slow head" if is_head else "slow body"
    reader, writer = await connected(url)
    try:
        writer.write(
            b"POST /get_reward HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: 100000\r\nHost: h\r\n"
        )
        if not is_head:
            writer.write(b"\r\n")
        reading = asyncio.ensure_future(reader.readline())
        while not reading.done():
            writer.write(b"x" if is_head else b" ")
            await asyncio.wait([reading], timeout=0.5)
        line = (await reading).decode()
        met[f"{name}: {line.split()[1] if line else 'closed'}"] += 1
    finally:
        writer.close()


async def stay_idle(url: str, met: Counter[str]) -> None:
    """Open a connection and say nothing."""
    reader, writer = await connected(url)
    try:
        await reader.read()
        met["idle: closed"] += 1
    finally:
        writer.close()


async def connected(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Return a connection to the server."""
    parts = urlsplit(url)
    return await asyncio.open_connection(parts.hostname, parts.port)


if __name__ == "__main__":
    main()
