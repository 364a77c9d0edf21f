"""Load of a reward server or a chat server by many clients of which some are hostile; prints latencies and memory as JSON.

python tests/helpers/server_load.py verifier --seconds 300 --clients 64 --hostile_share 0.25
python tests/helpers/server_load.py chat --clients 16 --model NAME --serve --model FOLDER
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import psutil

PAUSE_S = 0.5
"""Between two requests of one client."""
LAST_SHARE = 0.6
"""Over this share of the time, at its end, memory must stay the same."""
STREAM = "text/event-stream"
STREAMS = 0.8
"""Share of the chat requests whose reply is streamed."""


@dataclass
class Load:
    address: str
    body: Callable[[], dict[str, Any]]
    until: float
    seconds: list[float] = field(default_factory=list)
    lost: Counter[str] = field(default_factory=Counter)
    attacks: Counter[str] = field(default_factory=Counter)

    @property
    def place(self) -> tuple[str, int]:
        parts = urlsplit(self.address)
        return str(parts.hostname), int(parts.port or 80)

    @property
    def path(self) -> str:
        return urlsplit(self.address).path

    async def ask(self, session: aiohttp.ClientSession) -> None:
        began = time.perf_counter()
        try:
            async with session.post(self.address, json=self.body()) as reply:
                content = await reply.read()
                if reply.status != 200:
                    self.lost[f"status {reply.status}"] += 1
                    return
                if reply.content_type == STREAM and not content.endswith(b"data: [DONE]\n\n"):
                    self.lost["cut stream"] += 1
                    return
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
            self.lost[type(error).__name__] += 1
            return
        self.seconds.append(time.perf_counter() - began)

    async def normal(self) -> None:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:
            while time.monotonic() < self.until:
                await self.ask(session)
                await asyncio.sleep(PAUSE_S * random.uniform(0.5, 1.5))

    async def hostile(self, draw: random.Random) -> None:
        attacks = [
            self.abandon,
            self.drip_head,
            self.drip_body,
            self.garbage,
            self.deep,
            self.digits,
            self.large,
            self.host,
        ]
        while time.monotonic() < self.until:
            attack = draw.choice(attacks)
            self.attacks[attack.__name__] += 1
            with contextlib.suppress(OSError, asyncio.TimeoutError, asyncio.IncompleteReadError):
                await asyncio.wait_for(attack(), timeout=10)
            await asyncio.sleep(PAUSE_S * draw.random())

    async def _raw(
        self, sending: Callable[[asyncio.StreamWriter], Awaitable[None]], *, read: bool = True, limit: int = 65536
    ) -> None:
        reader, writer = await asyncio.open_connection(*self.place)
        try:
            await sending(writer)
            if read:
                await reader.read(limit)
        finally:
            writer.close()

    def _request(self, body: bytes, *, host: str = "127.0.0.1", length: int | None = None) -> bytes:
        head = f"POST {self.path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        return f"{head}Content-Length: {len(body) if length is None else length}\r\n\r\n".encode() + body

    async def _send(self, data: bytes, *, read: bool = True, limit: int = 65536) -> None:
        async def sending(writer: asyncio.StreamWriter) -> None:
            writer.write(data)
            await writer.drain()

        await self._raw(sending, read=read, limit=limit)

    async def abandon(self) -> None:
        """Ask, and go away before the reply, or in the middle of it."""
        await self._send(self._request(json.dumps(self.body()).encode()), read=random.random() < 0.5, limit=300)

    async def drip_head(self) -> None:
        async def sending(writer: asyncio.StreamWriter) -> None:
            for character in f"POST {self.path} HTTP/1.1\r\nHost: 127.0.0.1\r\nX: " + "a" * 10:
                writer.write(character.encode())
                await asyncio.sleep(0.1)

        await self._raw(sending, read=False)

    async def drip_body(self) -> None:
        async def sending(writer: asyncio.StreamWriter) -> None:
            writer.write(self._request(b"{", length=10_000))
            for _ in range(50):
                writer.write(b" ")
                await asyncio.sleep(0.1)

        await self._raw(sending, read=False)

    async def garbage(self) -> None:
        await self._send(random.randbytes(2000))

    async def deep(self) -> None:
        await self._send(self._request(b'{"query":' + b"[" * 100_000))

    async def digits(self) -> None:
        await self._send(self._request(b'{"query":[' + b"9" * 100_000 + b"]}"))

    async def large(self) -> None:
        await self._send(self._request(b"{", length=2**40))

    async def host(self) -> None:
        await self._send(self._request(json.dumps(self.body()).encode(), host="evil.example"))


def rewards() -> dict[str, Any]:
    """Four samples, of which one needs a worker."""
    numbers = [random.randrange(1000) for _ in range(4)]
    said = [f"<think>t</think><answer>{number}</answer>" for number in numbers]
    said[0] = f"<think>t</think><answer>\\frac{{{numbers[0]}x+{numbers[0]}}}{{x+1}}</answer>"
    return {"query": ["q"] * 4, "prompts": ["p"] * 4, "labels": [str(number) for number in numbers], "responses": said}


def chat(model: str) -> dict[str, Any]:
    text = f"Say {random.randrange(1000)}."
    asked = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 32}
    return {**asked, "stream": random.random() < STREAMS}


def memory(pid: int) -> float:
    """Return the memory of a process and its children in MiB."""
    total = 0
    with contextlib.suppress(psutil.NoSuchProcess):
        one = psutil.Process(pid)
        for process in (one, *one.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                total += process.memory_info().rss
    return total / 2**20


async def run(load: Load, *, clients: int, hostile: int, pid: int) -> list[tuple[float, float]]:
    began = time.monotonic()
    tasks = [asyncio.create_task(load.normal()) for _ in range(clients - hostile)]
    tasks += [asyncio.create_task(load.hostile(random.Random(number))) for number in range(hostile)]
    sizes = []
    while time.monotonic() < load.until:
        sizes.append((time.monotonic() - began, memory(pid)))
        await asyncio.sleep(5)
    await asyncio.gather(*tasks)
    return sizes


def report(load: Load, sizes: list[tuple[float, float]]) -> dict[str, Any]:
    ordered = sorted(load.seconds)
    if not ordered:
        raise SystemExit(f"no request was answered: {dict(load.lost)}")
    last = [size for at, size in sizes if at >= sizes[-1][0] * (1 - LAST_SHARE)]
    middle = sum(last) / len(last)
    return {
        "answered": len(ordered),
        "lost": dict(load.lost),
        "attacks": dict(load.attacks),
        "seconds": {f"p{share}": round(ordered[len(ordered) * share // 100], 4) for share in (50, 90, 99)} | {"max": round(ordered[-1], 4)},
        "memory_mib": {"first": round(sizes[0][1], 1), "last": round(sizes[-1][1], 1), "low": round(min(last), 1), "high": round(max(last), 1)},
        "spread_of_last_minutes": round(max(max(last) - middle, middle - min(last)) / middle, 4),
        "load_average": os.getloadavg(),
        "cores": os.cpu_count(),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=("verifier", "chat"))
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--hostile_share", type=float, default=0.25)
    parser.add_argument("--model", default="m", help="name of the chat server's model")
    parser.add_argument("--serve", nargs=argparse.REMAINDER, default=[], help="flags of the server that is started")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        port_file = Path(folder) / "port"
        command = ["serve_verifier", "math"] if args.kind == "verifier" else ["serve_chat"]
        log = (Path(folder) / "log").open("w")
        server = subprocess.Popen(
            [sys.executable, "-m", "lmm_r1.cli", *command, "--port", "0", "--port-file", str(port_file), *args.serve],
            stdout=log,
            stderr=log,
        )
        try:
            while not port_file.exists():
                if server.poll() is not None:
                    raise SystemExit((Path(folder) / "log").read_text()[-2000:])
                time.sleep(0.2)
            path = "/get_reward" if args.kind == "verifier" else "/v1/chat/completions"
            load = Load(
                address=f"http://127.0.0.1:{port_file.read_text().strip()}{path}",
                body=rewards if args.kind == "verifier" else lambda: chat(args.model),
                until=time.monotonic() + args.seconds,
            )
            hostile = round(args.clients * args.hostile_share)
            sizes = asyncio.run(run(load, clients=args.clients, hostile=hostile, pid=server.pid))
            sys.stdout.write(json.dumps(report(load, sizes), indent=1) + "\n")
        finally:
            server.terminate()
            server.wait(60)


if __name__ == "__main__":
    main()
