"""Responses per second and latency of the reward server beside plain math-verify and a plain Flask server; JSON on the last line.

python benchmarks/reward_server.py [--quick] [--output benchmarks/results/reward_server.json]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import aiohttp
import numpy as np
import psutil
from machine import machine_name
from reward_baselines import SingleProcess
from reward_samples import SYMPY_KINDS, Sample, description_of, make_samples, pathological, spoiled_batches

ROOT = Path(__file__).resolve().parents[1]
START_SECONDS = 60
CLIENTS = {1: 64, 64: 4}
"""How many requests of a batch size are in flight where throughput is measured; latency is measured with one."""
ASKED = {"ours_to_math_verify": 1.6, "ours_to_flask_at_batch_1": 5.0, "p99_over_limit_s": 0.5}


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How much is measured."""

    repeats: int
    items: dict[int, int]
    """Responses per contender and repeat by batch size, where nothing is pathological."""
    single_latencies: int
    """Requests of one response each, one after the other."""
    bounded_batches: dict[tuple[int, float], int]
    """Requests to the reward server by (batch size, pathological share)."""
    baseline_batches: dict[tuple[int, float], int]
    drawn_batches: int
    """Batches of 64 in which each item is pathological with a chance of 1 %."""
    baseline_deadline_s: float


FULL = Scale(
    repeats=3,
    items={1: 2048, 64: 2048, 1024: 2048},
    single_latencies=200,
    bounded_batches={(1, 0.01): 200, (1, 0.1): 60, (64, 0.01): 30, (64, 0.1): 4, (1024, 0.01): 1, (1024, 0.1): 1},
    baseline_batches={(1, 0.01): 100, (1, 0.1): 10, (64, 0.01): 1, (64, 0.1): 1, (1024, 0.01): 1, (1024, 0.1): 1},
    drawn_batches=20,
    baseline_deadline_s=7.0,
)
QUICK = replace(
    FULL,
    repeats=1,
    items={1: 1024, 64: 512, 256: 256},
    single_latencies=50,
    bounded_batches={(1, 0.01): 100, (64, 0.01): 5},
    baseline_batches={},
    drawn_batches=0,
)


@dataclass(kw_only=True)
class Cell:
    """What one run of requests took."""

    batch: int
    clients: int
    seconds: float = 0.0
    latencies: list[float] = field(default_factory=list)
    items: int = 0
    """Responses that were judged; the last request may hold fewer than a batch."""
    refused: int = 0
    """Replies 503, each followed by another attempt."""
    timed_out: int = 0
    correct: int = 0
    """Rewards that agree with how the response was made."""

    def summary(self) -> dict:
        """Return the figures as plain values; those of an unfinished run are about what was finished."""
        items = self.items
        return {
            "batch": self.batch,
            "clients": self.clients,
            "requests": len(self.latencies),
            "responses_per_s": round(items / self.seconds, 1) if self.seconds else None,
            "p50_ms": (
                round(1e3 * np.quantile(self.latencies, 0.5, method="inverted_cdf"), 2) if self.latencies else None
            ),
            "p99_ms": (
                round(1e3 * np.quantile(self.latencies, 0.99, method="inverted_cdf"), 2) if self.latencies else None
            ),
            "judged_as_made": round(self.correct / items, 4) if items else None,
            "timed_out": self.timed_out,
            **({"refused": self.refused} if self.refused else {}),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="fewer repeats and no pathological items for the baselines"
    )
    parser.add_argument("--workers", type=int, default=2, help="judging processes of both servers")
    parser.add_argument("--cores", type=int, default=2, help="cores that everything shares, the client included")
    parser.add_argument("--item-timeout-seconds", type=float, default=1.0, help="the reward server's limit per item")
    parser.add_argument("--seed", type=int, default=0, help="of the responses")
    parser.add_argument("--output", type=Path, help="also write the JSON to this file")
    arguments = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments.cores])
    result = asyncio.run(measure(arguments, scale=QUICK if arguments.quick else FULL))
    line = json.dumps(result)
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=2) + "\n")
    print(line)


async def measure(arguments: argparse.Namespace, *, scale: Scale) -> dict:
    """Run everything and return the result."""
    began, theirs = time.perf_counter(), cpu_seconds_of_others()
    result = {
        "benchmark": "reward_server",
        "machine": machine_name(),
        "cores": len(os.sched_getaffinity(0)),
        "load_before": round(os.getloadavg()[0], 2),
        "quick": arguments.quick,
        "workers": arguments.workers,
        "item_timeout_seconds": arguments.item_timeout_seconds,
        "repeats": scale.repeats,
        "responses": description_of(make_samples(1024, seed=64_001 + arguments.seed)),
    }
    with tempfile.TemporaryDirectory() as folder:
        commands = commands_of(arguments, folder=Path(folder))
        result |= await measure_ordinary(commands, scale=scale, seed=arguments.seed)
        result |= await measure_pathological(
            commands, scale=scale, seed=arguments.seed, limit_s=arguments.item_timeout_seconds
        )
    result["asked"] = ASKED
    result["seconds"] = round(time.perf_counter() - began, 1)
    used = sum(seconds - theirs.get(pid, 0.0) for pid, seconds in cpu_seconds_of_others().items())
    result["cores_used_by_others"] = round(used / result["seconds"], 2)
    return result


def cpu_seconds_of_others() -> dict[int, float]:
    """Return what each process outside the benchmark has used; one that ends in between is not counted."""
    own = {os.getpid(), *(process.pid for process in psutil.Process().children(recursive=True))}
    running = ((entry.pid, entry.info["cpu_times"]) for entry in psutil.process_iter(["cpu_times"]))
    return {pid: times.user + times.system for pid, times in running if times and pid not in own}


# Servers


@dataclass(frozen=True, kw_only=True)
class Command:
    """How a server is started."""

    arguments: tuple[str, ...]
    port_file: Path

    @contextmanager
    def running(self) -> Iterator[str]:
        """The address of a fresh server, which is ended afterwards with all of its processes."""
        self.port_file.unlink(missing_ok=True)
        log = self.port_file.with_suffix(".log")
        with log.open("w") as stream:
            process = subprocess.Popen(
                [sys.executable, *self.arguments], cwd=ROOT, stdout=stream, stderr=stream, start_new_session=True
            )
        try:
            deadline = time.monotonic() + START_SECONDS
            while not self.port_file.exists():
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"{' '.join(self.arguments)} did not start:\n{log.read_text()}")
                time.sleep(0.02)
            yield f"http://127.0.0.1:{self.port_file.read_text().strip()}"
        finally:
            # Its session holds the server, its workers and nothing else; a stuck worker hears SIGKILL only.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def commands_of(arguments: argparse.Namespace, *, folder: Path) -> dict[str, Command]:
    """Return the servers by name."""
    ours, flask = folder / "ours.port", folder / "flask.port"
    workers = ("--workers", str(arguments.workers))
    limit = ("--item-timeout-seconds", str(arguments.item_timeout_seconds))
    module = ("-m", "remote_rm.math_verifier", "--port", "0")
    baseline = str(ROOT / "benchmarks" / "reward_baselines.py")
    return {
        "ours": Command(arguments=(*module, "--port-file", str(ours), *workers, *limit), port_file=ours),
        "flask": Command(arguments=(baseline, "--port-file", str(flask), *workers), port_file=flask),
    }


# Requests


async def request_all(
    url: str, samples: Sequence[Sample], *, batch: int, clients: int, deadline_s: float = 600.0
) -> Cell:
    """Send the samples in batches, `clients` requests in flight; ends at the deadline with what is finished.

    Requests are written before and replies are read after the clock runs: on two cores, a busy client slows the server.
    """
    cell = Cell(batch=batch, clients=clients)
    chunks = [samples[start : start + batch] for start in range(0, len(samples), batch)]
    waiting = iter([(chunk, body_of(chunk)) for chunk in chunks])
    replies: list[tuple[Sequence[Sample], bytes]] = []
    connector = aiohttp.TCPConnector(limit=clients)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as session:

        async def client() -> None:
            for chunk, body in waiting:
                started = time.perf_counter()
                replies.append((chunk, await post(session, f"{url}/get_reward", body, cell)))
                cell.latencies.append(time.perf_counter() - started)

        began = time.perf_counter()
        tasks = [asyncio.create_task(client()) for _ in range(clients)]
        done, unfinished = await asyncio.wait(tasks, timeout=deadline_s)
        cell.seconds = time.perf_counter() - began
        for task in unfinished:
            task.cancel()
        for task in done:
            task.result()
    for chunk, reply in replies:
        note(json.loads(reply), chunk, cell)
    return cell


def body_of(chunk: Sequence[Sample]) -> bytes:
    """Return the request for some samples."""
    body = {
        "query": [sample.prompt + sample.response for sample in chunk],
        "prompts": [sample.prompt for sample in chunk],
        "labels": [sample.label for sample in chunk],
        "responses": [sample.response for sample in chunk],
    }
    return json.dumps(body).encode()


async def post(session: aiohttp.ClientSession, url: str, body: bytes, cell: Cell) -> bytes:
    """Return the reply; a full server (503) is asked again when it says so."""
    while True:
        async with session.post(url, data=body, headers={"Content-Type": "application/json"}) as reply:
            if reply.status != 503:
                reply.raise_for_status()
                return await reply.read()
            cell.refused += 1
            await asyncio.sleep(float(reply.headers.get("Retry-After", 1)))


def note(reply: dict, chunk: Sequence[Sample], cell: Cell) -> None:
    """Compare the reply with how the responses were made."""
    verdicts = reply.get("scores", reply["rewards"])
    assert len(verdicts) == len(chunk)
    cell.items += len(chunk)
    cell.correct += sum(verdict == float(sample.is_right) for verdict, sample in zip(verdicts, chunk, strict=True))
    cell.timed_out += int(sum(reply.get("extra_logs", {}).get("timed_out", [])))


async def health(url: str) -> dict:
    """Return the reward server's counters."""
    async with aiohttp.ClientSession() as session, session.get(f"{url}/health") as reply:
        return await reply.json()


def judge_alone(single: SingleProcess, samples: Sequence[Sample], *, batch: int, deadline_s: float = 600.0) -> dict:
    """Return the summary of plain math-verify; the latency of a batch is that of its items together."""
    judged = single.judge_all([(sample.response, sample.label) for sample in samples], deadline_s=deadline_s)
    if isinstance(judged, int):
        return {"batch": batch, "requests": 0, "judged": judged, "unfinished_after_s": deadline_s}
    seconds, verdicts = judged
    latencies = [sum(seconds[start : start + batch]) for start in range(0, len(seconds), batch)]
    correct = sum(verdict == float(sample.is_right) for verdict, sample in zip(verdicts, samples, strict=True))
    cell = Cell(batch=batch, clients=1, seconds=sum(seconds), latencies=latencies, items=len(seconds), correct=correct)
    return cell.summary()


# Measuring


async def measure_ordinary(commands: dict[str, Command], *, scale: Scale, seed: int) -> dict:
    """Without pathological items: all contenders by turns, each repeat on responses that none has seen."""
    rows: dict[str, list[dict]] = {}
    single = SingleProcess()
    with commands["ours"].running() as ours, commands["flask"].running() as flask:
        warm_up = make_samples(512, seed=seed)
        judge_alone(single, warm_up, batch=64)
        for url in (ours, flask):
            await request_all(url, warm_up, batch=64, clients=2)
        before = await health(ours)
        for repeat in range(1, scale.repeats + 1):
            for batch, items in scale.items.items():
                # New responses at each batch size, and others for latency: no server's caches meet an item twice.
                samples = make_samples(items, seed=1000 * batch + seed + repeat)
                others = make_samples(items, seed=1000 * batch + seed + repeat + 500)
                others = others[: scale.single_latencies if batch == 1 else None]
                rows.setdefault(f"math_verify/{batch}", []).append(judge_alone(single, samples, batch=batch))
                for name, url in (("ours", ours), ("flask", flask)):
                    loaded = await request_all(url, samples, batch=batch, clients=CLIENTS.get(batch, 1))
                    rows.setdefault(f"{name}/{batch}/loaded", []).append(loaded.summary())
                    if batch in CLIENTS:
                        alone = await request_all(url, others, batch=batch, clients=1)
                        rows.setdefault(f"{name}/{batch}", []).append(alone.summary())
        after = await health(ours)
        sympy_ratios = [await sympy_ratio(single, ours, seed=seed + repeat) for repeat in range(scale.repeats)]
    single.close()
    counted = {name: after[name] - before[name] for name in ("items", "quick", "timed_out", "failed")}
    return {
        "quick_share": round(counted["quick"] / counted["items"], 3),
        "counters": counted,
        "ordinary": {name: median_of(entries) for name, entries in rows.items()},
        "ratios": ratios_of(rows),
        "ours_to_math_verify_where_all_is_left_to_sympy": round(statistics.median(sympy_ratios), 2),
    }


async def sympy_ratio(single: SingleProcess, url: str, *, seed: int) -> float:
    """Return how many times as many responses per second the server judges where no rule of its own decides."""
    samples = make_samples(512, seed=seed + 700_000, kinds=SYMPY_KINDS)
    alone = judge_alone(single, samples, batch=64)
    served = await request_all(url, samples, batch=64, clients=CLIENTS[64])
    return served.summary()["responses_per_s"] / alone["responses_per_s"]


def ratios_of(rows: dict[str, list[dict]]) -> dict:
    """Return the medians over the repeats of the ratios within each repeat."""

    def ratio(above: str, below: str) -> float:
        pairs = zip(rows[above], rows[below], strict=True)
        return round(statistics.median(a["responses_per_s"] / b["responses_per_s"] for a, b in pairs), 2)

    batches = sorted({int(name.split("/")[1]) for name in rows})
    return {
        "ours_to_math_verify": {
            f"batch {batch}, {CLIENTS.get(batch, 1)} in flight": ratio(f"ours/{batch}/loaded", f"math_verify/{batch}")
            for batch in batches
        },
        "ours_to_flask": {
            f"batch {batch}, {CLIENTS.get(batch, 1)} in flight": ratio(f"ours/{batch}/loaded", f"flask/{batch}/loaded")
            for batch in batches
        },
    }


async def measure_pathological(commands: dict[str, Command], *, scale: Scale, seed: int, limit_s: float) -> dict:
    """With items that keep sympy busy: a fresh server per cell, so that none inherits a stuck worker."""
    rows: dict[str, dict] = {}
    for (batch, share), count in scale.bounded_batches.items():
        samples = spoiled_batches(batch, count, share=share, seed=seed)
        rows[f"ours/{batch}/{share:.0%}"] = await one_cell(commands["ours"], samples, batch=batch)
    over_limit = {"one in each batch": rows["ours/64/1%"]["p99_ms"] / 1e3 - limit_s}
    if scale.drawn_batches:
        rng = random.Random(seed)
        samples = make_samples(64 * scale.drawn_batches, seed=seed + 500)
        drawn = [pathological(rng) if rng.random() < 0.01 else sample for sample in samples]
        row = rows["ours/64/1% drawn"] = await one_cell(commands["ours"], drawn, batch=64)
        over_limit["each item with a chance of 1 %"] = row["p99_ms"] / 1e3 - limit_s
    deadline_s = scale.baseline_deadline_s
    warm_up = make_samples(64, seed=seed)
    for (batch, share), count in scale.baseline_batches.items():
        samples = spoiled_batches(batch, count, share=share, seed=seed)
        single = SingleProcess()
        judge_alone(single, warm_up, batch=64)
        rows[f"math_verify/{batch}/{share:.0%}"] = judge_alone(single, samples, batch=batch, deadline_s=deadline_s)
        single.close()
        flask = await one_cell(commands["flask"], samples, batch=batch, deadline_s=deadline_s)
        rows[f"flask/{batch}/{share:.0%}"] = flask
    return {"pathological": rows, "p99_over_limit_s": {name: round(over, 3) for name, over in over_limit.items()}}


async def one_cell(command: Command, samples: Sequence[Sample], *, batch: int, deadline_s: float = 600.0) -> dict:
    """Return the summary of one client's requests to a fresh, warmed-up server."""
    expected = len(samples) // batch
    with command.running() as url:
        await request_all(url, make_samples(128, seed=-1), batch=64, clients=1)
        cell = await request_all(url, samples, batch=batch, clients=1, deadline_s=deadline_s)
    summary = cell.summary()
    if len(cell.latencies) < expected:
        summary = {"batch": batch, "requests": len(cell.latencies), "unfinished_after_s": deadline_s}
    return summary | {"pathological": sum(sample.is_pathological for sample in samples)}


def median_of(entries: Sequence[dict]) -> dict:
    """Return the median of each figure over the repeats."""
    return {name: statistics.median(entry[name] for entry in entries) for name in entries[0]}


if __name__ == "__main__":
    main()
