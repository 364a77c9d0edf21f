"""Responses judged per second and per CPU second on realistic chains of thought: math-verify alone, the verifier `math`
in process, and the reward server; JSON on the last line.

python benchmarks/reward_reasoning.py [--quick] [--output benchmarks/results/reward_reasoning.json --readme remote_rm/README.md]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
from machine import machine_name
from reasoning_samples import description_of, is_whole_number, make_samples
from reward_samples import Sample
from reward_server import CLIENTS, Command, commands_of, cpu_seconds_of_others, health, request_all

DEADLINE_SECONDS = 600.0
BATCHES = (1, 64, 1024)
WARM_UP = 512
BEGIN, END = "<!-- rates -->\n", "<!-- /rates -->\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one run of fewer responses")
    parser.add_argument("--workers", type=int, default=2, help="judging processes of the server")
    parser.add_argument("--cores", type=int, default=2, help="cores that everything shares, the client included")
    parser.add_argument("--item-timeout-seconds", type=float, default=1.0, help="the reward server's limit per item")
    parser.add_argument("--seed", type=int, default=0, help="of the responses")
    parser.add_argument("--output", type=Path, help="also write the JSON to this file")
    parser.add_argument(
        "--readme", type=Path, help="also write the table of figures into this page, between its marks"
    )
    arguments = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments.cores])
    result = measure(arguments, repeats=1 if arguments.quick else 3, items=1024 if arguments.quick else 2048)
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=2) + "\n")
    if arguments.readme:
        page = arguments.readme.read_text()
        before, _, rest = page.partition(BEGIN)
        _, mark, after = rest.partition(END)
        assert mark, f"{arguments.readme} has no {BEGIN.strip()} and {END.strip()}"
        arguments.readme.write_text(before + BEGIN + table_of(result) + END + after)
    print(json.dumps(result))


def table_of(result: dict) -> str:
    """Return the figures as a reader wants them, in Markdown."""
    rows = {
        "math-verify alone, one process": "math_verify",
        "the verifier `math`, one process": "verifier",
        **{
            f"this server, batches of {batch:,}, {CLIENTS.get(batch, 1)} in flight": f"server/{batch}"
            for batch in BATCHES
        },
    }
    lines = ["| | responses/s | per CPU second | CPU, against math-verify |", "|---|---|---|---|"]
    for said, name in rows.items():
        row, ratio = result["rows"][name], result["ratios_to_math_verify"][name]["responses_per_cpu_s"]
        lines.append(f"| {said} | {row['responses_per_s']:,.0f} | {row['responses_per_cpu_s']:,.0f} | {ratio:.2f} x |")
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
    """Run everything by turns, each turn on responses that nobody has seen, and return the medians."""
    began, theirs = time.perf_counter(), cpu_seconds_of_others()
    load = round(os.getloadavg()[0], 2)
    rows: dict[str, list[dict]] = {}
    with tempfile.TemporaryDirectory() as folder:
        command = commands_of(arguments, folder=Path(folder))["ours"]
        alone = {"math_verify": InProcess(judge_by_math_verify), "verifier": InProcess(judge_by_verifier)}
        warm_up = make_samples(WARM_UP, seed=arguments.seed)
        with command.running() as url:
            for process in alone.values():
                process.judge(warm_up)
            asyncio.run(request_all(url, warm_up, batch=64, clients=2))
            before = asyncio.run(health(url))
            for repeat in range(1, repeats + 1):
                samples = make_samples(items, seed=arguments.seed + 1000 * repeat)
                for name, process in alone.items():
                    rows.setdefault(name, []).append(process.judge(samples))
                for batch in BATCHES:
                    others = make_samples(items, seed=arguments.seed + 1000 * repeat + batch)
                    rows.setdefault(f"server/{batch}", []).append(served(command, url, others, batch=batch))
            after = asyncio.run(health(url))
        for process in alone.values():
            process.close()
    counted = {name: after[name] - before[name] for name in ("items", "quick", "timed_out", "failed")}
    seconds = time.perf_counter() - began
    used = sum(value - theirs.get(pid, 0.0) for pid, value in cpu_seconds_of_others().items())
    return {
        "benchmark": "reward_reasoning",
        "machine": machine_name(),
        "cores": len(os.sched_getaffinity(0)),
        "load_before": load,
        "cores_used_by_others": round(used / seconds, 2),
        "workers": arguments.workers,
        "item_timeout_seconds": arguments.item_timeout_seconds,
        "repeats": repeats,
        "seconds": round(seconds, 1),
        "responses": description_of(make_samples(1024, seed=arguments.seed + 1000)),
        "rows": {name: median_of(entries) for name, entries in rows.items()},
        "ratios_to_math_verify": {name: ratios(entries, rows["math_verify"]) for name, entries in rows.items()},
        "quick_share": round(counted["quick"] / counted["items"], 3),
        "counters": counted,
    }


def median_of(entries: Sequence[dict]) -> dict:
    """Return the median of each figure over the repeats."""
    return {name: statistics.median(entry[name] for entry in entries) for name in entries[0]}


def ratios(above: Sequence[dict], below: Sequence[dict]) -> dict:
    """Return the medians of the ratios within each repeat."""
    names = ("responses_per_s", "responses_per_cpu_s")
    return {
        name: round(statistics.median(a[name] / b[name] for a, b in zip(above, below, strict=True)), 2)
        for name in names
    }


# In one process


def judge_by_math_verify() -> Callable[[Sample], float]:
    """Return math-verify as its README shows it: parse the gold answer, parse the response, verify."""
    from reward_baselines import judge

    return lambda sample: judge(sample.response, sample.label)


def judge_by_verifier() -> Callable[[Sample], float]:
    """Return this project's verifier `math` without the service."""
    from remote_rm.registry import get_verifier
    from remote_rm.verifier import Item

    verifier = get_verifier("math")
    return lambda sample: verifier.score(
        Item(prompt=sample.prompt, response=sample.response, label=sample.label)
    ).score


class InProcess:
    """A judge in one process of its own, from the object's making to `close`."""

    def __init__(self, make_judge: Callable[[], Callable[[Sample], float]]) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_judge_lists, args=(theirs, make_judge), daemon=True)
        self._process.start()

    def judge(self, samples: Sequence[Sample]) -> dict:
        """Return the figures of one run; raises TimeoutError where it does not end."""
        self._connection.send(list(samples))
        if not self._connection.poll(DEADLINE_SECONDS):
            raise TimeoutError(f"{self._process.name} was not done after {DEADLINE_SECONDS:g} s")
        verdicts, seconds, cpu_seconds = self._connection.recv()
        agreed = sum(verdict == float(sample.is_right) for verdict, sample in zip(verdicts, samples, strict=True))
        pairs = list(zip(samples, cpu_seconds, strict=True))
        plain = [used for sample, used in pairs if is_whole_number(sample.label)]
        other = [used for sample, used in pairs if not is_whole_number(sample.label)]
        return {
            "responses_per_s": round(len(samples) / seconds, 1),
            "responses_per_cpu_s": round(len(samples) / sum(cpu_seconds), 1),
            "whole_numbers_per_cpu_s": round(len(plain) / sum(plain), 1),
            "others_per_cpu_s": round(len(other) / sum(other), 1),
            "judged_as_made": round(agreed / len(samples), 4),
        }

    def close(self) -> None:
        """Kill the process."""
        self._process.kill()
        self._process.join()


def _judge_lists(connection: Connection, make_judge: Callable[[], Callable[[Sample], float]]) -> None:
    from reward_baselines import prepare_worker

    prepare_worker()
    judge = make_judge()
    while True:
        samples = connection.recv()
        began = time.perf_counter()
        verdicts, cpu_seconds = [], []
        for sample in samples:
            used = time.process_time()
            verdicts.append(judge(sample))
            cpu_seconds.append(time.process_time() - used)
        connection.send((verdicts, time.perf_counter() - began, cpu_seconds))


# Over HTTP


def served(command: Command, url: str, samples: Sequence[Sample], *, batch: int) -> dict:
    """Return the figures of one run against the server; CPU seconds are the server's, its workers' and the client's."""
    before = _cpu_seconds(command) + time.process_time()
    cell = asyncio.run(request_all(url, samples, batch=batch, clients=CLIENTS.get(batch, 1)))
    used = _cpu_seconds(command) + time.process_time() - before
    assert cell.items == len(samples)
    return {
        "responses_per_s": round(cell.items / cell.seconds, 1),
        "responses_per_cpu_s": round(cell.items / used, 1),
        "judged_as_made": round(cell.correct / cell.items, 4),
    }


def _cpu_seconds(command: Command) -> float:
    """Return what the server and its workers have used so far, those that have ended included."""
    (server,) = (child for child in psutil.Process().children() if str(command.port_file) in child.cmdline())
    times = [process.cpu_times() for process in (server, *server.children(recursive=True))]
    # A worker that was ended counts among the children of whoever forked it.
    return sum(one.user + one.system + one.children_user + one.children_system for one in times)


if __name__ == "__main__":
    main()
