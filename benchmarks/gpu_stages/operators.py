"""Count the operators of a call and the bytes that they read and write, on tensors without memory."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from gpu_stages.policy import policy_loss
from gpu_stages.record import Result
from gpu_stages.subject import Subject
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from train_batches import GroupBatch
from transformers.vision_utils import get_vision_position_ids, get_vision_window_index

from lmm_r1.models import image_features
from lmm_r1.models.output_layer import TokenOutcomes, token_outcomes
from lmm_r1.models.packed import attention
from lmm_r1.models.packed.attention import packed_as
from lmm_r1.models.packed.layout import VarlenKernel
from lmm_r1.models.packed.packing import BatchInputs

TOP = 15
# The first whose part an operator's name begins with; all others are element-wise, or reduce.
GROUPS = {
    "attention": ("attention",),
    "fused": ("liger",),
    "matmul": ("mm", "addmm", "bmm", "baddbmm", "convolution"),
    "copy": (
        "copy",
        "_to_copy",
        "clone",
        "cat",
        "index",
        "gather",
        "scatter",
        "slice_backward",
        "embedding",
        "masked",
    ),
}
ELEMENTWISE = "norm/elementwise"
# They make or describe tensors and start nothing on a device.
_NOTHING = (
    "empty",
    "new_empty",
    "detach",
    "lift_fresh",
    "_local_scalar_dense",
    "is_same_size",
    "_reshape_alias",
    "_unsafe_view",
)


class OperatorCount(TorchDispatchMode):
    """Counts what runs while it is active, by operator."""

    def __init__(self) -> None:
        super().__init__()
        self.started: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        makes_view = any(part.alias_info and not part.alias_info.is_write for part in func._schema.returns)
        if not makes_view and not name.startswith(_NOTHING):
            self.note(name.rstrip("_"), args, kwargs, output)
        return output

    def note(self, name: str, *values: Any) -> None:
        """Count one operator on tensors of the device; those on a CPU are what a run prepares there."""
        tensors = [value for value in tree_leaves(values) if isinstance(value, torch.Tensor) and value.is_meta]
        if tensors:
            self.started[name] += 1
            self.bytes[name] += sum(map(_bytes, tensors))

    def result(self) -> Result:
        """Return counts and bytes by kind of work, and of the operators that move most."""
        groups: dict[str, dict[str, float]] = {}
        for name, started in self.started.items():
            of_group = groups.setdefault(group_of(name), {"started": 0, "gb": 0.0})
            of_group["started"] += started
            of_group["gb"] += self.bytes[name] / 1e9
        return {
            "started": self.started.total(),
            "gb": round(self.bytes.total() / 1e9, 1),
            "by_group": {name: {**found, "gb": round(found["gb"], 1)} for name, found in sorted(groups.items())},
            "top": [
                {"operator": name, "started": self.started[name], "gb": round(size / 1e9, 1)}
                for name, size in self.bytes.most_common(TOP)
            ],
        }


def group_of(operator: str) -> str:
    """Return what kind of work an operator does, by its name."""
    return next((group for group, parts in GROUPS.items() if operator.startswith(parts)), ELEMENTWISE)


def _bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor's own numbers; those that an expanded dimension repeats count once."""
    size = tensor.element_size()
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
        size *= length if stride else 1
    return size


def kernel(count: OperatorCount, name: str, *, outputs: int, gradients: int) -> type[torch.autograd.Function]:
    """Return a function that stands for a fused kernel: its first inputs' shapes come out, nothing is computed.

    Args:
        outputs: how many of its inputs have an output of their shape.
        gradients: how many have a gradient.
    """

    class Kernel(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            given = [value for value in inputs if isinstance(value, torch.Tensor)]
            ctx.save_for_backward(*given)
            ctx.inputs = len(inputs)
            made = [torch.empty_like(value) for value in given[:outputs]]
            count.note(f"{name} forward", given, made)
            return made[0] if outputs == 1 else tuple(made)

        @staticmethod
        def backward(ctx: Any, *of_outputs: torch.Tensor) -> Any:
            given = ctx.saved_tensors
            made = [torch.empty_like(value) for value in given[:gradients]]
            count.note(f"{name} backward", given, of_outputs, made)
            return (*made, *(None,) * (ctx.inputs - len(made)))

    return Kernel


def update_without_values(subject: Subject, batch: GroupBatch) -> None:
    """Make an update's pass over a packed batch with shared prefixes on a model whose tensors have no memory.

    Ids, grids and the layout have values, since sizes depend on them.
    """
    policy = subject.policy
    inner, layer = policy.model.model, policy.model.get_output_embeddings()
    dtype = next(policy.model.parameters()).dtype
    inputs = BatchInputs(kit=policy.kit, config=policy.model.config, dtype=dtype, device=torch.device("cpu"))
    packed, arguments = inputs.packed(batch.for_model, wanted=batch.action_mask, share_prefix=True)
    given = {name: value for name, value in arguments.items() if value is not None}
    place = layer.weight.device
    with packed_as(packed.layout):
        embeddings = inner.get_input_embeddings()(packed.token_ids.to(place))
        images = _images(inner.visual, given["pixel_values"].to(place), grid=given["image_grid_thw"])
        mask = torch.zeros_like(embeddings, dtype=torch.bool)
        hidden = inner.language_model(
            inputs_embeds=embeddings.masked_scatter(mask, images),
            position_ids=given["position_ids"].to(place),
            attention_mask=None,
            use_cache=False,
        ).last_hidden_state[:, packed.sources.to(place)]
        sampler = replace(policy.sampler, banned_token_ids=policy.sampler.banned_token_ids.to(place))
        outcomes = TokenOutcomes(targets=packed.target_ids[None].to(place), sampler=sampler, entropy=False)
        with token_outcomes(layer, outcomes):
            log_probs = layer(hidden)[..., 0]
        advantages = torch.ones_like(log_probs)
        policy_loss(log_probs, advantages, advantages).backward()
    policy.model.zero_grad(set_to_none=True)


def _images(tower: Any, pixels: torch.Tensor, *, grid: torch.Tensor) -> torch.Tensor:
    """Return the features (N, H) that a tower makes of patches, whose grid is on the CPU."""
    sizes = {name: getattr(tower, name) for name in ("spatial_merge_size", "window_size", "patch_size")}
    window_index, ends = get_vision_window_index(grid, **sizes)
    positions = get_vision_position_ids(grid, tower.spatial_merge_size).to(pixels.device)
    windows = {"window_index": window_index.to(pixels.device), "cu_window_seqlens": ends}
    return tower(pixels, grid_thw=grid, position_ids=positions, **windows).pooler_output


@contextmanager
def stand_in_attention(count: OperatorCount) -> Iterator[None]:
    """Let attention over packed sequences and windows be one call of a GPU's kernel, which computes nothing."""
    attend = kernel(count, "attention", outputs=1, gradients=3)

    def function(
        queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *given: Any, **settings: Any
    ) -> torch.Tensor:
        return attend.apply(queries, keys, values)

    found = VarlenKernel(name="none", function=function)
    taken: Callable[..., VarlenKernel] = lambda *args, **settings: found  # noqa: E731
    with patch.object(attention, "kernel_for", taken), patch.object(image_features, "kernel_for", taken):
        yield


@contextmanager
def stand_in_liger(count: OperatorCount) -> Iterator[None]:
    """Let what is imported of Liger within be kernels that compute nothing."""
    kernels = {
        "rms_norm": {"LigerRMSNormFunction": kernel(count, "liger norm", outputs=1, gradients=2)},
        "geglu": {"LigerGELUMulFunction": kernel(count, "liger geglu", outputs=1, gradients=2)},
        "swiglu": {"LigerSiLUMulFunction": kernel(count, "liger swiglu", outputs=1, gradients=2)},
        "qwen2vl_mrope": {"LigerQwen2VLMRopeFunction": kernel(count, "liger rope", outputs=2, gradients=2)},
        "rope": {"LigerRopeFunction": kernel(count, "liger rope", outputs=2, gradients=2)},
    }
    kernels["swiglu"]["LigerFusedGateUpSiLUMulFunction"] = kernel(count, "liger swiglu", outputs=1, gradients=1)
    modules = {"liger_kernel": ModuleType("liger_kernel"), "liger_kernel.ops": ModuleType("liger_kernel.ops")}
    for name, functions in kernels.items():
        module = ModuleType(f"liger_kernel.ops.{name}")
        vars(module).update(functions)
        modules[module.__name__] = module
    with patch.dict(sys.modules, modules):
        yield
