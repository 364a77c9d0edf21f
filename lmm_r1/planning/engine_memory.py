"""What vLLM takes: a fixed share of a GPU, which must hold its weights and the cache of at least one sample."""

from __future__ import annotations

import os
from dataclasses import replace

from lmm_r1.config import KDConfig, PPOConfig
from lmm_r1.lmm_kits import Checkpoint
from lmm_r1.lmm_kits.kit import Config
from lmm_r1.planning.estimates import WIDTHS, ModelSettings, size_of
from lmm_r1.planning.machine import GIB, PROCESS, SLEEPING_ENGINE, Machine
from lmm_r1.planning.placement import PlannedEngine

# Of an engine that runs: CUDA's context and graphs, and the largest batch of a prefill.
WORKSPACE = 3 * GIB
# On CPUs vLLM keeps its linear layers' weights once more, packed for its kernels.
CPU_COPIES = 2


def planned_engine(config: PPOConfig, machine: Machine) -> PlannedEngine:
    """Return an engine of an RL run, on each of its GPUs."""
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
    return _engine_on_gpu(
        settings,
        machine.gpu_bytes,
        utilization=vllm.gpu_memory_utilization,
        gpus=vllm.tensor_parallel_size,
        sleeps=vllm.enable_sleep,
        ranks=ranks,
    )


def student_engine(config: KDConfig, machine: Machine, *, settings: ModelSettings, ranks: int) -> PlannedEngine:
    """Return the engine that each rank of a distillation has in its own process; it never sleeps.

    Args:
        settings: of the student, as a model that is not trained.
        ranks: on one machine.
    """
    if machine.gpu_bytes is None:
        engine = _engine_on_cpus(settings, ranks=ranks)
        return replace(engine, share=ranks * engine.share, asleep=ranks * engine.share)
    return _engine_on_gpu(
        settings,
        machine.gpu_bytes,
        utilization=config.vllm.gpu_memory_utilization,
        gpus=1,
        sleeps=False,
        ranks=ranks,
    )


def _engine_on_gpu(
    settings: ModelSettings, gpu_bytes: int, *, utilization: float, gpus: int, sleeps: bool, ranks: int
) -> PlannedEngine:
    """Return an engine on one of the `gpus` that it is split over."""
    weights, cached = size_of(settings).weight_bytes // gpus, _kv_bytes(settings) // gpus
    share = int(gpu_bytes * utilization)
    return PlannedEngine(
        weights=weights,
        share=share,
        asleep=SLEEPING_ENGINE if sleeps else share,
        kv_bytes_per_token=cached,
        least=weights + WORKSPACE + cached * settings.max_len,
        host=weights if sleeps else 0,
        ranks=ranks,
    )


def _engine_on_cpus(settings: ModelSettings, *, ranks: int) -> PlannedEngine:
    """Return one engine, without what its process takes by itself."""
    weights = size_of(settings).weight_bytes
    share = CPU_COPIES * weights + int(float(os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1")) * GIB)
    return PlannedEngine(
        weights=weights,
        share=share,
        asleep=share,
        kv_bytes_per_token=_kv_bytes(settings),
        least=0,
        host=0,
        ranks=ranks,
    )


def _kv_bytes(settings: ModelSettings) -> int:
    config = Checkpoint(settings.path, trust_remote_code=settings.trust_remote_code).config
    return kv_bytes_per_token(config, width=WIDTHS[settings.param_dtype])


def kv_bytes_per_token(config: Config, *, width: int) -> int:
    """Return the bytes of a token's keys and values in all layers."""
    text = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return 2 * text.num_hidden_layers * heads * head_dim * width
