"""Seconds and driver bytes of a step's media, in band and by reference; JSON on the last line.

python benchmarks/media_transfer.py [--groups 32] [--samples 8] [--image-tokens 1024] [--repeats 3] [--output FILE]

A step without models: groups come from an engine, reference and critic make their passes, policy and critic get and make
those of an update. In band, pixel values are pickled wherever samples go; by reference, the engine puts them in
Ray's object store. Both ways take turns; every pass makes a checksum of its images, which both ways
pay for.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from machine import machine_name

# The step without models is the tests'.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

if TYPE_CHECKING:
    from helpers.media_steps import Step

WAYS = ("in_band", "by_reference")
PATCHES_PER_TOKEN = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=32, help="prompts of a step, each with an image of its own")
    parser.add_argument("--samples", type=int, default=8, help="responses per prompt")
    parser.add_argument(
        "--image-tokens", type=int, default=1024, help="placeholder tokens of an image, of 4 patches each"
    )
    parser.add_argument("--repeats", type=int, default=3, help="rounds, of which the median counts")
    parser.add_argument("--output", type=Path, help="also write the JSON to this file")
    arguments = parser.parse_args()

    import ray
    from helpers.media_steps import start_cluster

    start_cluster()
    try:
        result = measure(arguments)
    finally:
        ray.shutdown()
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))


def measure(arguments: argparse.Namespace) -> dict:
    """Make the steps of both ways in turns and return the medians."""
    import ray
    from helpers.media_steps import PATCH, Engine, Step, Worker
    from openrlhf.trainer.ray.launcher import RayActorGroup

    patches = arguments.image_tokens * PATCHES_PER_TOKEN
    workers = [RayActorGroup(1, 1, Worker, num_gpus_per_actor=0.5) for _ in range(3)]
    steps = {}
    for way in WAYS:
        engine = Engine.remote(in_band=way == "in_band")
        ray.get(engine.prepare.remote(patches=patches, images=arguments.groups))
        steps[way] = Step(engine, patches=patches, groups=arguments.groups, samples=arguments.samples, workers=workers)
    rounds: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    seen: dict[str, list] = {}
    for _ in range(arguments.repeats):
        for way, step in steps.items():
            rounds[way].append(timed(step))
            seen[way] = [ray.get(group.async_run_method(method_name="take_seen")) for group in workers]
    assert seen["in_band"] == seen["by_reference"], "both ways show the models the same pixels"
    ways = {
        way: {name: round(statistics.median(one[name] for one in found), 3) for name in found[0]}
        for way, found in rounds.items()
    }
    return {
        "benchmark": "media_transfer",
        "machine": machine_name(),
        "groups": arguments.groups,
        "samples": arguments.samples,
        "image_tokens": arguments.image_tokens,
        "bytes_per_image": patches * PATCH * 4,
        "repeats": arguments.repeats,
        "ways": ways,
    }


def timed(step: Step) -> dict[str, float]:
    """Make a step and return its seconds, part by part, and what passed through this process."""
    from helpers.media_steps import counted_bytes

    with counted_bytes() as count:
        began = time.perf_counter()
        parts = step.run()
        seconds = time.perf_counter() - began
    return {"seconds": seconds, **parts, "driver_bytes_sent": count.sent, "driver_bytes_received": count.received}


if __name__ == "__main__":
    main()
