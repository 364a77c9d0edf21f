"""Engines in Ray actors, which share the rows of a batch."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import RayActorError

from lmm_r1 import cpu
from lmm_r1.cluster import nodes, worker_runtime
from lmm_r1.data.media_access import limits_environment
from lmm_r1.data.messages import Row
from lmm_r1.errors import UserError
from lmm_r1.generation.engine import (
    Backend,
    EngineSettings,
    EpisodeSettings,
    Outcome,
    SamplingSettings,
    make_engine,
    playing,
    prepare_process,
)

# Rows that an engine gets at a time; it has two such shares, so that it need not wait for the next.
SHARE_ROWS = 32
SHARES_PER_ENGINE = 2


class _EngineActor:
    def load(self, backend: Backend, path: str, settings: EngineSettings, episodes: EpisodeSettings | None) -> None:
        """Load the engine; not in the constructor, whose errors Ray hands on without their type."""
        prepare_process()
        self.engine = playing(make_engine(backend, path, settings), episodes)

    def respond(self, rows: list[tuple[int, Row]], sampling: SamplingSettings) -> list[Outcome]:
        return list(self.engine.respond(rows, sampling))


class RayEngines:
    """An engine that hands shares of its rows to several others."""

    def __init__(
        self,
        backend: Backend,
        path: str,
        settings: EngineSettings,
        *,
        count: int,
        episodes: EpisodeSettings | None = None,
    ) -> None:
        nodes.follow_cluster()
        _start_ray(count=count)
        actor = ray.remote(_EngineActor)
        gpus = settings.tensor_parallel_size if cpu.has_cuda() else 0
        self._actors = [actor.options(num_gpus=gpus, num_cpus=1).remote() for _ in range(count)]
        # Engines that sample must not all draw the same numbers.
        ray.get(
            [
                actor.load.remote(backend, path, replace(settings, seed=seed), episodes)
                for actor, seed in zip(self._actors, (settings.seed + number for number in range(count)), strict=True)
            ]
        )

    def respond(self, rows: Iterable[tuple[int, Row]], sampling: SamplingSettings) -> Iterator[Outcome]:
        """Yield how each (index, row) went, share by share."""
        source = iter(rows)
        running: dict[Any, Any] = {}

        def give(actor: Any) -> None:
            if share := list(itertools.islice(source, SHARE_ROWS)):
                running[actor.respond.remote(share, sampling)] = actor

        for actor in self._actors * SHARES_PER_ENGINE:
            give(actor)
        while running:
            [done], _ = ray.wait(list(running), num_returns=1)
            actor = running.pop(done)
            give(actor)
            try:
                yield from ray.get(done)
            except RayActorError as error:
                raise UserError(
                    "an engine's process died, perhaps for lack of memory; what was finished before is written: run the "
                    f"same command again, with fewer --engines if need be ({str(error).splitlines()[0]})"
                ) from error

    def close(self) -> None:
        """End the engines' processes."""
        for actor in self._actors:
            ray.kill(actor)
        ray.shutdown()


def _start_ray(*, count: int) -> None:
    cores = os.cpu_count() or 1
    environment = {
        "VLLM_LOGGING_LEVEL": "WARNING",
        **cpu.worker_environment(),
        **limits_environment(),
        **({} if nodes.joins() else nodes.LOOPBACK_ENVIRONMENT),
        # Engines that run at the same time share the cores: each taking all of them is several times slower.
        **({} if cpu.has_cuda() else {"OMP_NUM_THREADS": str(max(1, cores // count))}),
    }
    arguments: dict[str, object] = {"runtime_env": worker_runtime(environment), "log_to_driver": False}
    if not nodes.joins():
        arguments["include_dashboard"] = False
        if not cpu.has_cuda():
            arguments["num_cpus"] = max(cores, count)
    nodes.connect(**arguments)
