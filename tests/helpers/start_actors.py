"""Actors of a run that write down in which order they start and work; light, as Ray imports this file for each of them."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING

import ray

from lmm_r1.data.sample import Sample, Segment

if TYPE_CHECKING:
    from lmm_r1.data.messages import Row

# What an engine that waits for a model gives up after.
PATIENCE = 20


@ray.remote(num_cpus=0)
class Events:
    def __init__(self) -> None:
        self.names: list[str] = []

    def note(self, name: str) -> None:
        self.names.append(name)

    def all(self) -> list[str]:
        return self.names


@ray.remote
class Engine:
    """Takes a while to start, or stands only when a model has started; without upstream's class, which imports vLLM."""

    async def __init__(self, *, model: str, awaits_model: bool = False, **arguments: object) -> None:
        self.events = ray.get_actor("events")
        await self.events.note.remote("engine starts")
        began = time.monotonic()
        while awaits_model and "model" not in await self.events.all.remote():
            assert time.monotonic() - began < PATIENCE, "no model started beside the engine"
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.5)
        await self.events.note.remote("engine stands")

    async def sleep(self) -> None:
        await self.events.note.remote("engine sleeps")

    async def wake_up(self, tags: list[str] | None = None) -> None:
        await self.events.note.remote(f"engine wakes {'all' if tags is None else tags}")

    def get_num_unfinished_requests(self) -> int:
        return 0

    async def generate_group(self, row: Row, settings: object) -> SimpleNamespace:
        await self.events.note.remote("engine generates")
        segments = (Segment(kind="prompt", token_ids=(1,)), Segment(kind="generated", token_ids=(2,)))
        return SimpleNamespace(
            samples=[Sample(row=row, segments=segments, response="", finish_reason="stop", weight_version=0)] * 2,
            refused=None,
        )


@ray.remote(num_gpus=1)
class Model:
    def __init__(self, world_size: int, rank: int, address: str | None, port: int | None) -> None:
        ray.get(ray.get_actor("events").note.remote("model"))

    def init_model_from_pretrained(self, *given: object) -> None:
        ray.get(ray.get_actor("events").note.remote("model loads"))

    def broadcast_to_vllm(self) -> None:
        ray.get(ray.get_actor("events").note.remote("weights are sent"))

    def get_master_addr_port(self) -> tuple[str, int]:
        return "127.0.0.1", 1
