"""The names of other libraries that are replaced, and why; and the settings that OpenRLHF's workers read."""

from __future__ import annotations

import atexit
import dataclasses
import functools
import importlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from lmm_r1 import cpu, dotted
from lmm_r1.config import PPOConfig, SupervisedConfig, checkpoint_folder, unplanned
from lmm_r1.config.differences import only_defaults
from lmm_r1.config.ppo import CLIP_RANGES


@dataclass(frozen=True, kw_only=True)
class Replacement:
    upstream: str
    """`module:name`, where upstream looks it up."""
    ours: str
    """`module:name` of what takes its place."""
    reason: str


_ONEDNN = {
    "ours": "lmm_r1.cpu:_pack_alike",
    "reason": "the layout of packed weights depends on the number of threads, and must be the same for all weights",
}

# Names of other libraries that are replaced. Those of one architecture are in `lmm_kits.delta_rule`, which names it.
# The contract test knows of no other module that replaces any.
PATCHES: tuple[Replacement, ...] = (
    Replacement(
        upstream="torch.cuda:synchronize",
        ours="lmm_r1.cpu:prepare_worker",
        reason="OpenRLHF calls it after each save, which fails on a CPU",
    ),
    Replacement(
        upstream="vllm.v1.worker.cpu_model_runner:CPUModelRunner._bookkeeping_sync",
        ours="lmm_r1.cpu:_take_seeds",
        reason="vLLM turns a request's generator back by an offset, which generators of a CPU do not have",
    ),
    Replacement(upstream="vllm._custom_ops:create_onednn_mm", **_ONEDNN),
    Replacement(upstream="vllm._custom_ops:create_onednn_scaled_mm", **_ONEDNN),
    Replacement(
        upstream="vllm.utils.cpu_triton_utils:expand_kernel",
        ours="lmm_r1.cpu:_mend_guesses",
        reason="vLLM 0.29 rounds the temperature of guessed tokens to a whole number on CPUs",
    ),
    Replacement(
        upstream="ray._private.ray_constants:ENABLE_RAY_CLUSTER",
        ours="lmm_r1.cluster.nodes:on_loopback",
        reason="Ray replaces 127.0.0.1 by an address that other machines reach",
    ),
    Replacement(
        upstream="deepspeed.runtime.zero:Init",
        ours="lmm_r1.host.models:weights_alone_cast",
        reason="DeepSpeed rounds the buffers of a model that is loaded into ZeRO-3 shards",
    ),
    Replacement(
        upstream="deepspeed.comm.torch:build_shm_op",
        ours="lmm_r1.host.seams:prepare_training",
        reason="DeepSpeed compiles a shared-memory collective on first use, for 40 s",
    ),
    Replacement(
        upstream="deepspeed.runtime.engine:DeepSpeedEngine._do_optimizer_sanity_check",
        ours="lmm_r1.host.optimizer:passes_added_up",
        reason="DeepSpeed honours grad_accum_dtype with ZeRO-3 only",
    ),
    Replacement(
        upstream="deepspeed.runtime.engine:DeepSpeedEngine._configure_basic_optimizer",
        ours="lmm_r1.host.optimizer:eight_bit_adam",
        reason="DeepSpeed does not know AdamW in 8 bits",
    ),
)


def prepare_training() -> None:
    """Let DeepSpeed's processes on CPUs talk over gloo: it would compile a collective of its own on first use (40 s).

    At the end of a process it writes timings of inference kernels, which nothing here uses; a full disk would fail it.
    """
    if tables := sys.modules.get("deepspeed.ops.transformer.inference.triton.matmul_ext"):
        atexit.unregister(tables.matmul_ext_update_autotune_table)
    if not cpu.own_cuda():
        # (`import deepspeed.comm.torch as ...` would give PyTorch itself, which that package holds under this name.)
        importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # type: ignore[attr-defined]


def to_openrlhf_args(config: PPOConfig | SupervisedConfig) -> SimpleNamespace:
    """Return the nested namespace that OpenRLHF's own parser and checks make of the same flags; it may be changed."""
    settings = dataclasses.asdict(unplanned(config))
    for flag, known in only_defaults(dotted.leaf_types(type(config))).items():
        *groups, name = flag.split(".")
        functools.reduce(lambda node, group: node.setdefault(group, {}), groups, settings).setdefault(
            name, known.value
        )
    args = _namespace(settings)
    # peft knows the one word as a shorthand; in a list it would be the name of a module.
    if args.ds.lora.target_modules == ("all-linear",):
        args.ds.lora.target_modules = "all-linear"
    # Upstream counts the ranks that get the same samples by this, in its meshes, batches and groups of workers.
    args.ds.ring_attn_size = config.ds.ulysses_size
    args.ckpt.path = str(checkpoint_folder(config))
    if isinstance(config, PPOConfig):
        # Our engines choose by the model's size; nobody reads this one.
        args.vllm.enforce_eager = bool(config.vllm.enforce_eager)
        # Nor this one: the range is in the flag for both sides.
        args.actor.eps_clip = min(CLIP_RANGES["ppo"]) if config.actor.eps_clip is None else config.actor.eps_clip
    if isinstance(config, PPOConfig) and config.reward.remote_url:
        args.reward.remote_url = config.reward.remote_url.split(",")
    return args


def _namespace(settings: Mapping[str, Any]) -> SimpleNamespace:
    return SimpleNamespace(
        **{name: _namespace(value) if isinstance(value, dict) else value for name, value in settings.items()}
    )
