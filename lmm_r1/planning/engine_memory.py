"""What vLLM takes: a fixed share of a GPU, which must hold its weights and the cache of at least one sample."""

from __future__ import annotations

import os

from lmm_r1.config import PPOConfig
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
    """Return an engine of the run, on each of its GPUs."""
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
    weights = size_of(settings).weight_bytes // vllm.tensor_parallel_size
    checkpoint = Checkpoint(path, trust_remote_code=config.train.trust_remote_code)
    cached = kv_bytes_per_token(checkpoint.config, width=WIDTHS[dtype]) // vllm.tensor_parallel_size
    engines_per_machine = max(1, vllm.gpus // config.actor.nodes)
    if machine.gpu_bytes is None:
        share = CPU_COPIES * weights + PROCESS + int(float(os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1")) * GIB)
        share *= vllm.engines
        return PlannedEngine(
            weights=weights,
            share=share,
            asleep=share,
            kv_bytes_per_token=cached,
            least=0,
            host=0,
            ranks=engines_per_machine,
        )
    share = int(machine.gpu_bytes * vllm.gpu_memory_utilization)
    return PlannedEngine(
        weights=weights,
        share=share,
        asleep=SLEEPING_ENGINE if vllm.enable_sleep else share,
        kv_bytes_per_token=cached,
        least=weights + WORKSPACE + cached * config.data.max_len,
        host=weights if vllm.enable_sleep else 0,
        ranks=engines_per_machine,
    )


def kv_bytes_per_token(config: Config, *, width: int) -> int:
    """Return the bytes of a token's keys and values in all layers."""
    text = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return 2 * text.num_hidden_layers * heads * head_dim * width
