"""What the scripts share: flags, results as JSON, quiet commands, pictures, a reward server, and times taken in turns."""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from machine import ROOT
from PIL import Image

START_SECONDS = 60


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """Return a parser that shows a script's docstring, with the flag that all scripts have."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="also write the JSON to this file")
    return parser


def publish(result: Mapping[str, Any], file: Path | None) -> None:
    """Write a result to the file of `--output`, and print it as the last line."""
    if file:
        file.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))


def command(name: str, *arguments: object) -> list[str]:
    """Return the command line of `lmm-r1 NAME` in this Python."""
    return [sys.executable, "-m", f"lmm_r1.cli.{name}", *map(str, arguments)]


def run_quietly(name: str, *arguments: object) -> None:
    """Run `lmm-r1 NAME` and discard what it prints."""
    subprocess.run(command(name, *arguments), check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def noise_picture(side: int, *, noise: random.Random) -> Image.Image:
    """Return coloured noise in large squares."""
    return Image.frombytes("RGB", (8, 8), noise.randbytes(8 * 8 * 3)).resize((side, side), Image.Resampling.NEAREST)


@contextmanager
def reward_server(folder: Path, *flags: str) -> Iterator[tuple[str, int]]:
    """Yield address and process id of a server of the verifier `math`, and end it with all of its processes."""
    port_file, log = folder / "port", folder / "server.log"
    server = [sys.executable, "-m", "remote_rm.math_verifier", "--port", "0", "--port-file", str(port_file), *flags]
    with log.open("w") as stream:
        process = subprocess.Popen(server, cwd=ROOT, stdout=stream, stderr=stream, start_new_session=True)
    try:
        deadline = time.monotonic() + START_SECONDS
        while not port_file.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the reward server did not start:\n{log.read_text()}")
            time.sleep(0.02)
        yield f"http://127.0.0.1:{port_file.read_text().strip()}", process.pid
    finally:
        # Its session holds the server and its workers, and nothing else.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def times_in_turns(calls: Mapping[str, Callable[[], object]], *, repeats: int) -> list[dict[str, float]]:
    """Return the seconds of all calls by name, once per repeat; each repeat begins with another call."""
    names, times = list(calls), []
    for repeat in range(repeats):
        first = repeat % len(names)
        row = {}
        for name in [*names[first:], *names[:first]]:
            began = time.perf_counter()
            calls[name]()
            row[name] = time.perf_counter() - began
        times.append(row)
    return times


def medians(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the median of each figure over the repeats."""
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


def median_ratio(above: Sequence[float], below: Sequence[float]) -> float:
    """Return the median of the ratios within each repeat, in which what slows the machine down affects both."""
    return round(statistics.median(one / other for one, other in zip(above, below, strict=True)), 2)
