"""Engines in Ray actors: those of a training run and those of batch inference."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import RayActorError

from lmm_r1 import cpu, dotted
from lmm_r1.cluster import nodes
from lmm_r1.cluster.worker_processes import worker_runtime
from lmm_r1.config import PPOConfig
from lmm_r1.config.export import UNPLANNED
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
from lmm_r1.generation.engine_actor import AgentSpec, RolloutActor
from lmm_r1.generation.engine_arguments import engine_arguments
from lmm_r1.generation.worker_extension import BucketWeights, FileWeights
from lmm_r1.host.openrlhf_engines import batch_vllm_engine_call
from lmm_r1.host.placement import Reservation, reserve
from lmm_r1.lmm_kits import Checkpoint

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
        seeds = (settings.seed + number for number in range(count))
        ray.get(
            [
                actor.load.remote(backend, path, replace(settings, seed=seed), episodes)
                for actor, seed in zip(self._actors, seeds, strict=True)
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
        # Engines that run at the same time share the cores: each taking all of them is several times slower.
        **({} if cpu.has_cuda() else {"OMP_NUM_THREADS": str(max(1, cores // count))}),
    }
    arguments: dict[str, Any] = {"runtime_env": worker_runtime(environment), "log_to_driver": False}
    if not nodes.joins():
        arguments["include_dashboard"] = False
        if not cpu.has_cuda():
            arguments["num_cpus"] = max(cores, count)
    nodes.connect(**arguments)


logger = logging.getLogger(__name__)

ENGINE_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
# GPU share of an engine, and of a model's worker, where they live on one GPU.
COLOCATED_SHARE = 0.2


def create_engines(
    config: PPOConfig,
    *,
    shared: Reservation | None,
    max_images: int,
    max_videos: int,
    reward: Callable[..., Any] | None = None,
) -> list[Any]:
    """Start `--vllm.num_engines` engine actors, in `shared` or on GPUs of their own, and return their handles.

    Args:
        reward: the function that gives the rewards, where it is in no file; Ray sends it.
    """
    tensor_parallel = config.vllm.tensor_parallel_size
    gpus = shared or reserve(config.vllm.gpus, together=engine_groups(config))
    share = COLOCATED_SHARE if shared is not None else 1
    # With tensor parallelism the actor itself holds no GPU: vLLM's own Ray workers do.
    actor_share = share if tensor_parallel == 1 else 0
    arguments = _engine_arguments(config, share=share, max_images=max_images, max_videos=max_videos)
    arguments["reward_function"] = reward
    engines = []
    for index in range(config.vllm.engines):
        first = index * tensor_parallel
        bundles = list(gpus.bundles[first : first + tensor_parallel]) if tensor_parallel > 1 else None
        placement = gpus.place(first, placement_group_capture_child_tasks=True)
        options = {"num_cpus": actor_share, "num_gpus": actor_share, "scheduling_strategy": placement}
        engines.append(
            RolloutActor.options(**options).remote(**arguments, bundle_indices=bundles, seed=config.train.seed + index)
        )
    return engines


def engine_groups(config: PPOConfig) -> dict[str, int]:
    """Return by flag how many consecutive GPUs of the engines should be on one node."""
    return {"--vllm.tensor_parallel_size": config.vllm.tensor_parallel_size}


def without_sleep(config: PPOConfig) -> PPOConfig:
    """Return the configuration without `--vllm.enable_sleep` where there is no CUDA; vLLM refuses to start with it.

    There the engines' share of memory is not chosen either: it bounds the machine's own, of which they take little.
    """
    if cpu.has_cuda():
        return config
    if config.vllm.enable_sleep:
        logger.warning("--vllm.enable_sleep is off: without CUDA there is no GPU's memory to free")
    settings: dict[str, object] = {"vllm.enable_sleep": False}
    if config.vllm.gpu_memory_utilization is None:
        settings["vllm.gpu_memory_utilization"] = UNPLANNED["vllm.gpu_memory_utilization"]
    return dotted.replace(config, settings)


def settle_engines(config: PPOConfig, engines: Sequence[Any]) -> None:
    """Wait until all engines are ready, and put them to sleep if they sleep at all: before models are loaded on their GPUs.

    A starting engine measures the free memory, and vLLM asserts that no other process frees any in the meantime.
    """
    # A call is answered when the constructor, which loads the model and sets the cache up, is through.
    ray.get([engine.__ray_ready__.remote() for engine in engines])
    if config.vllm.enable_sleep:
        batch_vllm_engine_call(engines, "sleep")


def _share_of_memory(config: PPOConfig) -> float:
    assert config.vllm.gpu_memory_utilization is not None, "chosen by the plan"
    return config.vllm.gpu_memory_utilization


def _engine_arguments(config: PPOConfig, *, share: float, max_images: int, max_videos: int) -> dict[str, Any]:
    path, trust_remote_code = config.actor.model_name_or_path, config.train.trust_remote_code
    assert path is not None, "resolve_ppo requires it"
    assert config.ds.param_dtype is not None, "resolve_ppo fills it in"
    checkpoint = Checkpoint(path, trust_remote_code=trust_remote_code)
    extension = BucketWeights if cpu.has_cuda() else FileWeights
    train = config.train
    return {
        **engine_arguments(
            path,
            kit=checkpoint.kit,
            config=checkpoint.config,
            trust_remote_code=trust_remote_code,
            dtype=ENGINE_DTYPES[config.ds.param_dtype],
            max_model_len=config.data.max_len,
            max_images=max_images,
            max_videos=max_videos,
            tensor_parallel_size=config.vllm.tensor_parallel_size,
            gpu_memory_utilization=_share_of_memory(config),
            enforce_eager=config.vllm.enforce_eager,
            speculation=config.vllm.speculation,
        ),
        "enable_prefix_caching": config.vllm.enable_prefix_caching,
        "enable_sleep_mode": bool(config.vllm.enable_sleep),
        "distributed_executor_backend": "uni" if config.vllm.tensor_parallel_size == 1 else "ray",
        "worker_extension_cls": f"{extension.__module__}.{extension.__qualname__}",
        # Log-probs of the distribution that was sampled from: after temperature, nucleus and bans.
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": 1,
        "num_gpus": share,
        "full_determinism": config.train.full_determinism_enable,
        "beside_models": config.train.async_enable,
        "reward": config.reward if config.reward.remote_url else None,
        "agent": (
            AgentSpec(name=train.agent, func_path=train.agent_func_path, settings=config.agent)
            if train.plays
            else None
        ),
    }
