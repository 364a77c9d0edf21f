"""What vLLM takes: a fixed share of a GPU, which must hold its weights and the cache of at least one sample."""

from __future__ import annotations

import os
from dataclasses import replace

from lmm_r1.config import KDConfig, PPOConfig
from lmm_r1.config.sizes import MOST_PROMPTS
from lmm_r1.generation.engine_arguments import WORKSPACE, engine_bytes, kv_bytes_per_token, share_of
from lmm_r1.lmm_kits import Checkpoint
from lmm_r1.lmm_kits.kit import Config
from lmm_r1.planning.estimates import WIDTHS, ModelSettings, size_of
from lmm_r1.planning.machine import GIB, PROCESS, SLEEPING_ENGINE, Machine
from lmm_r1.planning.placement import PlannedEngine

# On CPUs vLLM keeps its linear layers' weights once more, packed for its kernels.
CPU_COPIES = 2


def planned_engine(config: PPOConfig, machine: Machine, *, room: int | None = None) -> PlannedEngine:
    """Return an engine of an RL run, on each of its GPUs.

    Args:
        room: bytes of a GPU that it may take, where no flag says its share.
    """
    path, dtype = config.actor.model_name_or_path, config.ds.param_dtype
    assert path is not None, "resolve_ppo requires it"
    assert dtype is not None, "resolve_ppo fills it in"
    vllm = config.vllm
    settings = ModelSettings(
        path=path,
        role="reference",
        param_dtype=dtype,
        packing_samples=config.ds.packing_samples,
        share_prefix=config.train.shared_prefix_enable and config.rollout.n_samples_per_prompt > 1,
        max_len=config.data.max_len,
        attn_implementation=config.ds.attn_implementation,
        experts_implementation=config.ds.experts_implementation,
        trust_remote_code=config.train.trust_remote_code,
    )
    ranks = max(1, vllm.gpus // config.actor.nodes)
    if machine.gpu_bytes is None:
        engine = _engine_on_cpus(settings, ranks=ranks)
        share = vllm.engines * (engine.share + PROCESS)
        return replace(engine, share=share, asleep=share)
    prompts = config.rollout.vllm_generate_batch_size or config.rollout.batch_size or MOST_PROMPTS
    return _engine_on_gpu(
        settings,
        machine.gpu_bytes,
        utilization=vllm.gpu_memory_utilization,
        room=machine.usable if room is None else room,
        responses=-(-prompts * config.rollout.n_samples_per_prompt // vllm.engines),
        gpus=vllm.tensor_parallel_size,
        sleeps=bool(vllm.enable_sleep),
        ranks=ranks,
    )


def student_engine(
    config: KDConfig, machine: Machine, *, settings: ModelSettings, ranks: int, room: int
) -> PlannedEngine:
    """Return the engine that each rank of a distillation has in its own process; it never sleeps.

    Args:
        settings: of the student, as a model that is not trained.
        ranks: on one machine.
        room: bytes of a GPU that it may take, where no flag says its share.
    """
    if machine.gpu_bytes is None:
        engine = _engine_on_cpus(settings, ranks=ranks)
        return replace(engine, share=ranks * engine.share, asleep=ranks * engine.share)
    return _engine_on_gpu(
        settings,
        machine.gpu_bytes,
        utilization=config.vllm.gpu_memory_utilization,
        room=room,
        responses=-(-config.train.batch_size // ranks),
        gpus=1,
        sleeps=False,
        ranks=ranks,
    )


def _engine_on_gpu(
    settings: ModelSettings,
    gpu_bytes: int,
    *,
    utilization: float | None,
    room: int,
    responses: int,
    gpus: int,
    sleeps: bool,
    ranks: int,
) -> PlannedEngine:
    """Return an engine on one of the `gpus` that it is split over; with no share given, it takes what it needs of its room.

    Args:
        responses: that it makes at a time, at most.
    """
    whole, width, config = size_of(settings).weight_bytes, WIDTHS[settings.param_dtype], _config(settings)
    weights, cached = whole // gpus, _kv_bytes(settings) // gpus
    least = weights + WORKSPACE + cached * settings.max_len
    if utilization is None:
        needed = engine_bytes(
            config,
            weights=whole,
            width=width,
            max_len=settings.max_len,
            responses=responses,
            gpu_bytes=gpu_bytes,
            gpus=gpus,
        )
        # With too little room it asks for the least, and the plan says what is missing.
        utilization = share_of(needed, room=max(room, least + gpu_bytes // 100), gpu_bytes=gpu_bytes)
    share = int(gpu_bytes * utilization)
    return PlannedEngine(
        weights=weights,
        utilization=utilization,
        share=share,
        asleep=SLEEPING_ENGINE if sleeps else share,
        kv_bytes_per_token=cached,
        least=least,
        host=weights if sleeps else 0,
        ranks=ranks,
    )


def _engine_on_cpus(settings: ModelSettings, *, ranks: int) -> PlannedEngine:
    """Return one engine, without what its process takes by itself."""
    weights = size_of(settings).weight_bytes
    share = CPU_COPIES * weights + int(float(os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1")) * GIB)
    return PlannedEngine(
        weights=weights,
        utilization=None,
        share=share,
        asleep=share,
        kv_bytes_per_token=_kv_bytes(settings),
        least=0,
        host=0,
        ranks=ranks,
    )


def _config(settings: ModelSettings) -> Config:
    return Checkpoint(settings.path, trust_remote_code=settings.trust_remote_code).config


def _kv_bytes(settings: ModelSettings) -> int:
    return kv_bytes_per_token(_config(settings), width=WIDTHS[settings.param_dtype])
