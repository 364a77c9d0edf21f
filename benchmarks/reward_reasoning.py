"""Responses judged per second and per CPU second on realistic chains of thought: math-verify alone, the verifier `math`
in process, and the reward server; JSON on the last line.

python benchmarks/reward_reasoning.py [--quick] [--output benchmarks/results/reward_reasoning.json]

`table_of` makes the table of remote_rm/README.md from the result.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import resource
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from multiprocessing import get_context
from multiprocessing.pool import Pool
from pathlib import Path
from tempfile import TemporaryDirectory

import aiohttp
import psutil
from machine import machine_name
from measuring import median_ratio, medians, parser_of, publish, reward_server
from reasoning_samples import Sample, description_of, is_whole_number, make_samples

DEADLINE_SECONDS = 600.0
# Requests in flight, by the size of a batch.
CLIENTS = {1: 64, 64: 4, 1024: 1}
WARM_UP = 512
# Address space of a judging process, as in the reward server: a power tower must not take the machine down.
MEMORY_BYTES = 4 * 2**30
ITEM_SECONDS = 5
"""math-verify's own limit for one comparison."""


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--quick", action="store_true", help="one run of fewer responses")
    parser.add_argument("--workers", type=int, default=2, help="judging processes of the server")
    parser.add_argument("--cores", type=int, default=2, help="cores that everything shares, the client included")
    parser.add_argument("--item-timeout-seconds", type=float, default=1.0, help="the reward server's limit per item")
    parser.add_argument("--seed", type=int, default=0, help="of the responses")
    arguments = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments.cores])
    result = measure(arguments, repeats=1 if arguments.quick else 3, items=1024 if arguments.quick else 2048)
    publish(result, arguments.output)


def table_of(result: dict) -> str:
    """Return the figures for readers, in Markdown."""
    rows = {"math-verify alone, one process": "math_verify", "the verifier `math`, one process": "verifier"} | {
        f"this server, batches of {batch:,}, {clients} in flight": f"server/{batch}"
        for batch, clients in CLIENTS.items()
    }
    lines = ["| | responses/s | per CPU second | CPU, against math-verify |", "|---|---|---|---|"]
    for label, name in rows.items():
        row, ratio = result["rows"][name], result["ratios_to_math_verify"][name]["responses_per_cpu_s"]
        lines.append(
            f"| {label} | {row['responses_per_s']:,.0f} | {row['responses_per_cpu_s']:,.0f} | {ratio:.2f} x |"
        )
    responses, alone, verifier = result["responses"], result["rows"]["math_verify"], result["rows"]["verifier"]
    lines += [
        "",
        f"The responses have {responses['median_characters']:,} characters (median of {responses['characters']['least']:,} to "
        f"{responses['characters']['most']:,}), {responses['whole_numbers_among_golds']:.0%} of their gold answers are whole "
        f"numbers, and {responses['right']:.0%} are right.",
        f"The server decided {result['quick_share']:.0%} without sympy. Where the gold answer is a whole number, a CPU second is "
        f"enough for {alone['whole_numbers_per_cpu_s']:,.0f} responses by math-verify alone and "
        f"{verifier['whole_numbers_per_cpu_s']:,.0f} by the verifier; elsewhere for {alone['others_per_cpu_s']:,.0f} and "
        f"{verifier['others_per_cpu_s']:,.0f}.",
    ]
    return "\n".join(lines) + "\n"


def measure(arguments: argparse.Namespace, *, repeats: int, items: int) -> dict:
    """Run all ways in turns, each turn on new responses, and return the medians."""
    began, load = time.perf_counter(), round(os.getloadavg()[0], 2)
    rows: dict[str, list[dict]] = {}
    flags = ("--workers", str(arguments.workers), "--item-timeout-seconds", str(arguments.item_timeout_seconds))
    with ExitStack() as stack:
        url, pid = stack.enter_context(reward_server(Path(stack.enter_context(TemporaryDirectory())), *flags))
        pools = {name: stack.enter_context(get_context("spawn").Pool(1)) for name in JUDGES}
        warm_up = make_samples(WARM_UP, seed=arguments.seed)
        for name, pool in pools.items():
            judged(pool, JUDGES[name], warm_up)
        asyncio.run(request_all(url, warm_up, batch=64, clients=2))
        before = asyncio.run(health(url))
        for repeat in range(1, repeats + 1):
            samples = make_samples(items, seed=arguments.seed + 1000 * repeat)
            for name, pool in pools.items():
                rows.setdefault(name, []).append(judged(pool, JUDGES[name], samples))
            for batch, clients in CLIENTS.items():
                others = make_samples(items, seed=arguments.seed + 1000 * repeat + batch)
                rows.setdefault(f"server/{batch}", []).append(served(pid, url, others, batch=batch, clients=clients))
        after = asyncio.run(health(url))
    counted = {name: after[name] - before[name] for name in ("items", "quick", "timed_out", "failed")}
    return {
        "benchmark": "reward_reasoning",
        "machine": machine_name(),
        "cores": len(os.sched_getaffinity(0)),
        "load_before": load,
        "workers": arguments.workers,
        "item_timeout_seconds": arguments.item_timeout_seconds,
        "repeats": repeats,
        "seconds": round(time.perf_counter() - began, 1),
        "responses": description_of(make_samples(1024, seed=arguments.seed + 1000)),
        "rows": {name: medians(entries) for name, entries in rows.items()},
        "ratios_to_math_verify": {name: ratios(entries, rows["math_verify"]) for name, entries in rows.items()},
        "quick_share": round(counted["quick"] / counted["items"], 3),
        "counters": counted,
    }


def ratios(above: Sequence[dict], below: Sequence[dict]) -> dict[str, float]:
    """Return the medians of the ratios within each repeat."""
    names = ("responses_per_s", "responses_per_cpu_s")
    return {name: median_ratio([one[name] for one in above], [one[name] for one in below]) for name in names}


def judge_by_math_verify() -> Callable[[Sample], float]:
    """Return math-verify as its README shows it: parse the gold answer, parse the response, verify."""
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return lambda sample: float(verify(parse(f"${sample.label}$"), parse(sample.response)))


def judge_by_verifier() -> Callable[[Sample], float]:
    """Return this project's verifier `math` without the service."""
    from remote_rm.registry import get_verifier
    from remote_rm.verifier import Item

    verifier = get_verifier("math")

    def stop(*_: object) -> None:
        raise TimeoutError

    def judge(sample: Sample) -> float:
        signal.alarm(ITEM_SECONDS)
        try:
            return verifier.score(Item(prompt=sample.prompt, response=sample.response, label=sample.label)).score
        except TimeoutError:
            return 0.0
        finally:
            signal.alarm(0)

    signal.signal(signal.SIGALRM, stop)
    return judge


JUDGES = {"math_verify": judge_by_math_verify, "verifier": judge_by_verifier}


def judged(
    pool: Pool, make_judge: Callable[[], Callable[[Sample], float]], samples: Sequence[Sample]
) -> dict[str, float]:
    """Return the figures of one run in a process of its own; raises multiprocessing.TimeoutError if it does not end."""
    found = pool.apply_async(judge_all, (make_judge, list(samples))).get(DEADLINE_SECONDS)
    verdicts, seconds, cpu_seconds = found
    pairs = list(zip(samples, cpu_seconds, strict=True))
    plain = [used for sample, used in pairs if is_whole_number(sample.label)]
    other = [used for sample, used in pairs if not is_whole_number(sample.label)]
    return {
        "responses_per_s": round(len(samples) / seconds, 1),
        "responses_per_cpu_s": round(len(samples) / sum(cpu_seconds), 1),
        "whole_numbers_per_cpu_s": round(len(plain) / sum(plain), 1),
        "others_per_cpu_s": round(len(other) / sum(other), 1),
        "judged_as_made": agreement(verdicts, samples),
    }


def judge_all(
    make_judge: Callable[[], Callable[[Sample], float]], samples: Sequence[Sample]
) -> tuple[list[float], float, list[float]]:
    """Return the verdicts, the seconds of all and the CPU seconds of each."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    judge = make_judge()
    began = time.perf_counter()
    verdicts, cpu_seconds = [], []
    for sample in samples:
        used = time.process_time()
        verdicts.append(judge(sample))
        cpu_seconds.append(time.process_time() - used)
    return verdicts, time.perf_counter() - began, cpu_seconds


def agreement(verdicts: Sequence[float], samples: Sequence[Sample]) -> float:
    """Return the share of verdicts that agree with how the responses were made."""
    agreed = sum(verdict == float(sample.is_right) for verdict, sample in zip(verdicts, samples, strict=True))
    return round(agreed / len(samples), 4)


def served(pid: int, url: str, samples: Sequence[Sample], *, batch: int, clients: int) -> dict[str, float]:
    """Return the figures of one run against the server; CPU seconds are the server's, its workers' and the client's."""
    before = _cpu_seconds(pid) + time.process_time()
    seconds, verdicts = asyncio.run(request_all(url, samples, batch=batch, clients=clients))
    used = _cpu_seconds(pid) + time.process_time() - before
    return {
        "responses_per_s": round(len(samples) / seconds, 1),
        "responses_per_cpu_s": round(len(samples) / used, 1),
        "judged_as_made": agreement(verdicts, samples),
    }


async def request_all(
    url: str, samples: Sequence[Sample], *, batch: int, clients: int
) -> tuple[float, Sequence[float]]:
    """Send the samples in batches, `clients` requests in flight; return the seconds and the verdicts in order.

    Requests are written before and replies are read after the clock runs: on two cores, a busy client slows the server.
    """
    chunks = [samples[start : start + batch] for start in range(0, len(samples), batch)]
    waiting = iter(enumerate([body_of(chunk) for chunk in chunks]))
    replies: dict[int, bytes] = {}
    connector, timeout = aiohttp.TCPConnector(limit=clients), aiohttp.ClientTimeout(DEADLINE_SECONDS)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:

        async def client() -> None:
            for number, body in waiting:
                replies[number] = await post(session, f"{url}/get_reward", body)

        began = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(clients)))
        seconds = time.perf_counter() - began
    return seconds, [verdict for number in sorted(replies) for verdict in json.loads(replies[number])["scores"]]


def body_of(chunk: Sequence[Sample]) -> bytes:
    """Return the request for some samples."""
    body = {
        "query": [sample.prompt + sample.response for sample in chunk],
        "prompts": [sample.prompt for sample in chunk],
        "labels": [sample.label for sample in chunk],
        "responses": [sample.response for sample in chunk],
    }
    return json.dumps(body).encode()


async def post(session: aiohttp.ClientSession, url: str, body: bytes) -> bytes:
    """Return the reply; a full server (503) is asked again when it says so."""
    while True:
        async with session.post(url, data=body, headers={"Content-Type": "application/json"}) as reply:
            if reply.status != 503:
                reply.raise_for_status()
                return await reply.read()
            await asyncio.sleep(float(reply.headers.get("Retry-After", 1)))


async def health(url: str) -> dict:
    """Return the reward server's counters."""
    async with aiohttp.ClientSession() as session, session.get(f"{url}/health") as reply:
        return await reply.json()


def _cpu_seconds(pid: int) -> float:
    """Return what the server and its workers have used so far, those that have ended included."""
    server = psutil.Process(pid)
    times = [process.cpu_times() for process in (server, *server.children(recursive=True))]
    # A worker that was ended counts among the children of whoever forked it.
    return sum(one.user + one.system + one.children_user + one.children_system for one in times)


if __name__ == "__main__":
    main()
