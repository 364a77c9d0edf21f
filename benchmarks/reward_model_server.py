"""Rewards per second of `lmm-r1 serve_rm`: samples of many requests in batches, and one by one; JSON on the last line.

python benchmarks/reward_model_server.py [--samples 64] [--repeats 3] [--output benchmarks/results/reward_model_server.json]

Three ways take turns: one request at a time, many at a time with every sample in a batch of its own
(`--max_batch_tokens 1`), and many at a time as the server does it. The model is small and random, and the same in all.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from machine import machine_name
from PIL import Image

from lmm_r1.data.messages import ImagePart, Message, Part, TextPart, to_json
from remote_rm.client import RewardClient

ROOT = Path(__file__).resolve().parents[1]
ARCHITECTURE = "qwen2_5_vl"
CLIENTS = 64
QUESTION = "A train leaves at 12:34 and arrives at 15:10 on the same day. How many minutes does it take? Think first."
GROUP = 8
"""Responses to each prompt, as in a rollout."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """How rewards are asked for: at which server, and how many requests are under way."""

    server: str
    clients: int


class Asked(TypedDict):
    """A sample as `RewardClient.reward` takes it."""

    query: str
    prompt: str
    label: str
    response: str


WAYS = {
    "one_request_at_a_time": Way(server="batched", clients=1),
    "one_sample_per_batch": Way(server="single", clients=CLIENTS),
    "batched": Way(server="batched", clients=CLIENTS),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=64, help="samples of each kind and round")
    parser.add_argument("--repeats", type=int, default=3, help="rounds, of which the median counts")
    parser.add_argument("--hidden-size", type=int, default=128, help="width of the model")
    parser.add_argument("--layers", type=int, default=4, help="layers of the model")
    parser.add_argument("--threads", type=int, default=1, help="threads that PyTorch computes with in each server")
    parser.add_argument("--output", type=Path, help="also write the JSON to this file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = measure(arguments, folder=Path(folder))
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))


def measure(arguments: argparse.Namespace, *, folder: Path) -> dict:
    """Return what each way takes for text and for image samples."""
    model = make_model(folder, hidden_size=arguments.hidden_size, layers=arguments.layers)
    asked = {kind: requests(kind, count=arguments.samples, folder=folder) for kind in ("text", "image")}
    result = {
        "benchmark": "reward_model_server",
        "machine": machine_name(),
        "load_before": round(os.getloadavg()[0], 2),
        "threads": arguments.threads,
        "model": {"architecture": ARCHITECTURE, "hidden_size": arguments.hidden_size, "layers": arguments.layers},
        "clients": CLIENTS,
        "samples": arguments.samples,
        "repeats": arguments.repeats,
    }
    with ExitStack() as stack:
        servers = {
            name: stack.enter_context(running(model, folder, name=name, threads=arguments.threads, flags=flags))
            for name, flags in (("batched", ()), ("single", ("--max_batch_tokens", "1")))
        }
        for kind, some in asked.items():
            rounds = [
                {name: asyncio.run(rewards(servers[way.server], some, way.clients)) for name, way in WAYS.items()}
                # The first round warms up.
                for _ in range(arguments.repeats + 1)
            ][1:]
            result[kind] = summary(rounds, samples=arguments.samples)
    return result


def summary(rounds: Sequence[dict[str, tuple[float, list[float]]]], *, samples: int) -> dict:
    """Return samples per second of each way, how much faster batches are in the same round, and how rewards differ."""
    seconds = {name: [one[name][0] for one in rounds] for name in WAYS}
    values = [one[name][1] for one in rounds for name in WAYS]
    return {
        "samples_per_second": {name: round(samples / statistics.median(some), 1) for name, some in seconds.items()},
        "speedup_of_batched": {
            name: round(
                statistics.median(other / ours for other, ours in zip(some, seconds["batched"], strict=True)), 2
            )
            for name, some in seconds.items()
            if name != "batched"
        },
        "spread_of_rewards": round(statistics.pstdev(values[0]), 4),
        "max_difference": max(abs(one - other) for some in values for one, other in zip(some, values[0], strict=True)),
    }


def requests(kind: str, *, count: int, folder: Path) -> list[Asked]:
    """Return samples in groups with a prompt in common, with responses of different lengths."""
    made: list[Asked] = []
    for index in range(count):
        parts: list[Part] = [TextPart(f"{index // GROUP + 1}. {QUESTION}")]
        if kind == "image":
            file = folder / f"{index // GROUP}.png"
            if not file.exists():
                Image.linear_gradient("L").rotate(17 * (index // GROUP)).convert("RGB").save(file)
            parts.insert(0, ImagePart(str(file)))
        response = (
            f"<think>{'From 12:34 to 15:10 it is 156 minutes. ' * (index % GROUP + 1)}</think><answer>156</answer>"
        )
        prompt = to_json([Message(role="user", parts=tuple(parts))])
        made.append({"query": "", "prompt": prompt, "label": "", "response": response})
    return made


async def rewards(endpoint: str, asked: Sequence[Asked], clients: int) -> tuple[float, list[float]]:
    """Return the seconds that all samples took, and their rewards."""
    async with RewardClient([endpoint], connections=clients) as client:
        started = time.perf_counter()
        replies = await asyncio.gather(*(client.reward(**one) for one in asked))
        return time.perf_counter() - started, [reply.reward for reply in replies]


def make_model(folder: Path, *, hidden_size: int, layers: int) -> Path:
    """Write a random reward model with `lmm-r1 make_tiny_model`, and give it a value head."""
    size = ("--hidden_size", str(hidden_size), "--layers", str(layers))
    base, model = folder / "base", folder / "model"
    command = [
        sys.executable,
        "-m",
        "lmm_r1.cli",
        "make_tiny_model",
        "--arch",
        ARCHITECTURE,
        "--output",
        str(base),
        *size,
    ]
    subprocess.run(command, cwd=ROOT, check=True, stdout=sys.stderr)
    # In a process of its own, so that this one has no threads of PyTorch's.
    code = (
        "import sys; from lmm_r1 import cpu; cpu.prepare_process()\n"
        "from lmm_r1.models.value_model import KitValueModel\n"
        "base, model = sys.argv[1:]\n"
        "made = KitValueModel(base, 'critic', attn_implementation='sdpa', param_dtype='fp32', value_head_prefix='score')\n"
        "import torch; torch.nn.init.normal_(made.head.weight, std=0.2)\n"
        "processor = made.kit.load_processor(base, trust_remote_code=False)\n"
        "made.save(model, processor=processor, weights=made.state_dict())\n"
    )
    subprocess.run([sys.executable, "-c", code, str(base), str(model)], cwd=ROOT, check=True, stdout=sys.stderr)
    return model


@contextmanager
def running(model: Path, folder: Path, *, name: str, threads: int, flags: Sequence[str]) -> Iterator[str]:
    """The endpoint of a server, which is ended afterwards."""
    command = [sys.executable, "-m", "lmm_r1.cli", "serve_rm", "--model", str(model), "--dtype", "fp32", "--port", "0"]
    log = folder / f"{name}.log"
    with (
        log.open("w") as stream,
        subprocess.Popen(
            [*command, "--image_root", str(folder), *flags],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": str(threads)},
            stdout=subprocess.PIPE,
            stderr=stream,
            text=True,
        ) as process,
    ):
        try:
            assert process.stdout is not None, "it is a pipe"
            line = process.stdout.readline()
            if not line.startswith("reward server: "):
                raise SystemExit(f"the server did not start:\n{log.read_text()}")
            yield line.removeprefix("reward server: ").strip()
        finally:
            process.terminate()


if __name__ == "__main__":
    main()
