"""OpenRLHF's DeepSpeed strategy, which also runs on CPUs, and the settings that OpenRLHF's workers read."""

from __future__ import annotations

import atexit
import dataclasses
import functools
import importlib
import logging
import math
import os
import sys
from collections.abc import Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed
import deepspeed.comm.comm as deepspeed_comm
import deepspeed.utils.groups as deepspeed_groups
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.op_builder import CPUAdamBuilder
from deepspeed.runtime.engine import DeepSpeedEngine
from openrlhf.models.ring_attn_utils import set_ring_attn_group
from torch.distributed.device_mesh import init_device_mesh
from transformers import enable_full_determinism, modeling_flash_attention_utils, set_seed

from lmm_r1 import cpu, dotted, quiet
from lmm_r1.config import PPOConfig, SupervisedConfig, checkpoint_folder, unplanned
from lmm_r1.config.differences import only_defaults
from lmm_r1.config.ppo import CLIP_RANGES
from lmm_r1.errors import UserError
from lmm_r1.files.atomic import written_into
from lmm_r1.host.checkpoints import CheckpointStrategy
from lmm_r1.host.models import Actor, HostedModel, whole_state_dict
from lmm_r1.host.optimizer import (
    add_up_in_accumulation_dtype,
    add_up_on_one_rank,
    check_finite,
    eight_bit_adam,
    passes_added_up,
    sleep_with_any_optimizer,
    warm_from_first_update,
)

logger = logging.getLogger(__name__)

_NORMS = (torch.nn.LayerNorm, torch.nn.GroupNorm, torch.nn.RMSNorm, torch.nn.modules.batchnorm._BatchNorm)
_TRACKERS = ("logger.wandb.key", "logger.tensorboard_dir")


class KitStrategy(CheckpointStrategy):
    """DeepSpeed set-up for one training process; on a machine without CUDA with gloo and PyTorch's own AdamW."""

    config: Any
    """The run's PPOConfig or SupervisedConfig, from which the namespace of OpenRLHF's workers is made."""
    _vision_lr: float | None = None
    _losses: tuple[torch.Tensor, ...] = ()
    """Of this rank's passes since the last optimizer step."""

    def setup_distributed(self, timeout: timedelta = timedelta(minutes=60)) -> None:
        """Join the process group, and set the group of ranks that share rows.

        OpenRLHF's own names `cuda` as the device; the models share rows, not a kernel of ring attention.
        """
        quiet.done_loading()
        prepare_training()
        check_fp16(self.args.ds.param_dtype)
        if self.full_determinism:
            enable_full_determinism(self.seed)
            modeling_flash_attention_utils.deterministic_g = True
        else:
            set_seed(self.seed)
        if self.args.local_rank != -1:
            os.environ["LOCAL_RANK"] = str(self.args.local_rank)
        if cpu.own_cuda() and (rank := int(os.environ.get("LOCAL_RANK", "-1"))) != -1:
            torch.cuda.set_device(rank)
        deepspeed.init_distributed(timeout=timeout)
        self.world_size = dist.get_world_size()
        data_parallel = self.world_size // self.ring_attn_size // self.ds_tensor_parallel_size
        sizes = (data_parallel, self.ring_attn_size, self.ds_tensor_parallel_size)
        self.ds_device_mesh = init_device_mesh(cpu.device().type, sizes, mesh_dim_names=("dp", "sp", "tp"))
        group = self.ds_device_mesh["sp"].get_group() if self.ring_attn_size > 1 else None
        self.ring_attn_rank = 0 if group is None else dist.get_rank(group)
        set_ring_attn_group(group)

    def get_ds_train_config(self, optim_dict: dict | None = None, *, max_norm: float | None = None) -> dict[str, Any]:
        if optim_dict is not None:
            # Muon updates some weights by AdamW, whose settings DeepSpeed does not pass on.
            own = torch_adam(offload=self.args.ds.adam_offload)
            optim_dict = {**optim_dict, "params": {**optim_dict["params"], **own}}
        config = super().get_ds_train_config(optim_dict, max_norm=max_norm)
        return {**config, "zero_optimization": {**config["zero_optimization"], **cpu.zero_settings()}}

    def get_ds_eval_config(self, offload: bool = False) -> dict[str, Any]:
        config = super().get_ds_eval_config(offload=offload)
        return {**config, "zero_optimization": {**config["zero_optimization"], **cpu.zero_settings()}}

    def _ds_init_train_model(self, model: Any, cfg: dict[str, Any]) -> Any:
        self._vision_lr = cfg["adam"].get("vision_lr")
        with _keeping_buffers(model), passes_added_up(), eight_bit_adam(cfg["optim"]):
            engine, optimizer, scheduler = super()._ds_init_train_model(model, cfg)
        name, steps = cfg["lr_scheduler"], cfg["scheduler_steps"]
        warm_from_first_update(scheduler, name=name, warmup=math.ceil(steps * cfg["lr_warmup_ratio"]), steps=steps)
        optimizer_of_zero = (engine if isinstance(engine, DeepSpeedEngine) else engine.model).optimizer
        add_up_in_accumulation_dtype(optimizer_of_zero)
        sleep_with_any_optimizer(optimizer_of_zero)
        if not self.deepcompile:
            # A compiled model hands its gradients over by itself.
            add_up_on_one_rank(optimizer_of_zero)
        return engine, optimizer, scheduler

    def _ds_init_eval_model(self, model: Any) -> Any:
        with _keeping_buffers(model):
            return super()._ds_init_eval_model(model)

    def _get_model_parameters(self, model: Any, *, optim: str | None = None, weight_decay: float = 0.0) -> Any:
        raw_model, groups = super()._get_model_parameters(model, optim=optim, weight_decay=weight_decay)
        if optim != "muon":
            groups = decay_groups(raw_model, weight_decay=weight_decay)
        if self._vision_lr is None:
            return raw_model, groups
        assert optim == "adam", "refused by config.resolve"
        vision = model.vision_weights()
        if not vision:
            raise UserError(f"--adam.vision_lr {self._vision_lr}: this model has no vision tower; leave it out")
        trained = {id(value) for value in vision if value.requires_grad}
        if not trained:
            raise UserError(
                f"--adam.vision_lr {self._vision_lr}: --ds.lora.rank or freeze_visual_encoder freezes the vision tower; "
                "leave one out"
            )
        return raw_model, split_groups(groups, members=trained, lr=self._vision_lr)

    def backward(self, loss: torch.Tensor, model: Any, _optimizer: Any, **kwargs: Any) -> None:
        self._losses = (*self._losses, loss.detach())
        super().backward(loss, model, _optimizer, **kwargs)

    def optimizer_step(self, _optimizer: Any, model: Any, _scheduler: Any, name: str = "model", **kwargs: Any) -> None:
        """Make an optimizer step if one is due; raises UserError on all ranks, before the step, if it is not finite."""
        engine = model.model if isinstance(model, Actor) else model
        if engine.is_gradient_accumulation_boundary():
            losses, self._losses = self._losses, ()
            check_finite(engine, losses, name=name)
        super().optimizer_step(_optimizer, model, _scheduler, name=name, **kwargs)

    def save_model(self, model: Any, tokenizer: Any, output_dir: str, **kwargs: Any) -> None:
        """Write a checkpoint that transformers and vLLM load; adapters are merged in, and also saved next to it.

        A critic is written with its value head and without an output layer. If not all can be written, the folder stays
        unchanged. Raises UserError if the disk is full.
        """
        with written_into(Path(output_dir), moves=self.is_rank_0()) as folder:
            self._write_model(model, tokenizer, str(folder), **kwargs)
        dist.barrier()

    def _write_model(self, model: Any, tokenizer: Any, output_dir: str, **kwargs: Any) -> None:
        saved = model if isinstance(model, Actor) else self._unwrap_model(model)
        if isinstance(saved, HostedModel):
            saved.settle_ends(tokenizer)
        if not (isinstance(saved, HostedModel) and saved.saves_itself):
            super().save_model(model, tokenizer, output_dir, **kwargs)
            return
        weights = whole_state_dict(model.model if isinstance(model, Actor) else model)
        if self.is_rank_0():
            assert weights is not None, "rank 0 has them whole"
            saved.save(output_dir, processor=tokenizer, weights=weights)


def check_fp16(param_dtype: str | None) -> None:
    """Raise UserError if this machine cannot train weights in fp16."""
    if param_dtype == "fp16" and not cpu.has_cuda() and not get_accelerator().is_fp16_supported():
        raise UserError(
            "--ds.param_dtype fp16: this machine has no GPU, and its processor no fp16 instructions, without which DeepSpeed "
            "does not train in fp16; leave it out"
        )


def _keeping_buffers(model: Any) -> AbstractContextManager[None]:
    return model.keeping_buffers() if isinstance(model, HostedModel) else nullcontext()


def decay_groups(model: torch.nn.Module, *, weight_decay: float) -> list[dict[str, Any]]:
    """Return the optimizer's two groups: matrices, kernels and embeddings decay; norms, biases and vectors do not.

    OpenRLHF decides by names, which vision towers do not share: their norms would decay.
    """
    decaying: list[torch.nn.Parameter] = []
    others: list[torch.nn.Parameter] = []
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            owner, _, own = name.rpartition(".")
            # ZeRO-3 keeps a flat part of each weight here.
            dimensions = len(weight.ds_shape if hasattr(weight, "ds_shape") else weight.shape)
            is_norm = isinstance(model.get_submodule(owner), _NORMS)
            (others if dimensions < 2 or is_norm or own.endswith("bias") else decaying).append(weight)
    return [{"params": decaying, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]


def split_groups(groups: Sequence[dict[str, Any]], *, members: Set[int], lr: float) -> list[dict[str, Any]]:
    """Return the optimizer's groups with the parameters whose ids are `members` in groups of their own at `lr`."""
    split = []
    for group in groups:
        inside = [value for value in group["params"] if id(value) in members]
        outside = [value for value in group["params"] if id(value) not in members]
        split += [{**group, "params": outside}] if outside else []
        split += [{**group, "params": inside, "lr": lr}] if inside else []
    return split


def make_strategy(config: PPOConfig | SupervisedConfig) -> KitStrategy:
    """Return the strategy that OpenRLHF's `get_strategy` would build from the same settings."""
    config = unplanned(config)
    is_rl = isinstance(config, PPOConfig)
    if is_rl:
        # Only the driver talks to the trackers; workers need no key.
        config = dotted.replace(config, dict.fromkeys(_TRACKERS))
    args = to_openrlhf_args(config)
    # Upstream's name for optimizer steps of any number of passes, which ours always are: DeepSpeed divides by none. Whether
    # passes are cut by tokens is asked of the config.
    args.train.dynamic_batch_enable = True
    # Upstream's average is a second model in the precision of the passes, and replaces the policy in every save.
    args.train.enable_ema = False
    strategy = KitStrategy(
        seed=args.train.seed,
        full_determinism=args.train.full_determinism_enable,
        max_norm=args.actor.max_norm if is_rl else args.max_norm,
        micro_train_batch_size=1,
        train_batch_size=args.train.batch_size,
        zero_stage=args.ds.zero_stage,
        args=args,
    )
    strategy.config = config
    return strategy


def default_to_one_process() -> None:
    """Fill in what a launcher such as torchrun would set, for a program started plainly."""
    defaults = {
        "MASTER_ADDR": "127.0.0.1",
        # The store takes any free port; one that was chosen here could be in use by then.
        "MASTER_PORT": "0",
        "WORLD_SIZE": "1",
        "RANK": "0",
        "LOCAL_RANK": "0",
    }
    if "RANK" not in os.environ:
        os.environ.update(defaults)


def leave_group(*, failed: bool = False) -> None:
    """Leave the process group, if there is one, so that another training can begin in this process.

    DeepSpeed would keep using the first group.

    Args:
        failed: whether other processes may not leave it; NCCL would wait for them.
    """
    if dist.is_initialized():
        if failed and dist.get_backend() == "nccl" and dist.get_world_size() > 1:
            dist.distributed_c10d._abort_process_group()
        else:
            dist.destroy_process_group()
    deepspeed_comm.cdb = None
    deepspeed_groups._WORLD_GROUP = None
    deepspeed_groups.mesh_device = None


def torch_adam(*, offload: bool) -> dict[str, bool]:
    """Return the settings that make DeepSpeed use PyTorch's AdamW; empty if DeepSpeed's Adam for CPUs is built.

    On GPUs it is PyTorch's fused AdamW: DeepSpeed compiles its own at the first step, and a failing build ends the run.

    Args:
        offload: whether the optimizer is on the CPU.
    """
    if not cpu.has_cuda():
        return {"torch_adam": True}
    if not offload:
        return {"torch_adam": True, "fused": True}
    try:
        CPUAdamBuilder().load(verbose=False)
    except Exception as error:  # a compiler, a toolkit or a known architecture may be missing
        if dist.get_rank() == 0:
            logger.warning(
                "--ds.adam_offload: DeepSpeed's Adam for CPUs cannot be built here (%s: %s); PyTorch's AdamW is used, which "
                "is slower",
                type(error).__name__,
                str(error).partition("\n")[0],
            )
        return {"torch_adam": True}
    return {}


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
