"""The value head of a critic or reward model: one linear layer on hidden states, and where a checkpoint keeps it."""

from __future__ import annotations

import deepspeed
import torch
import torch.distributed as dist
from torch.nn.functional import linear
from transformers import PretrainedConfig

from lmm_r1.errors import UserError
from lmm_r1.models.loading import is_sharded
from lmm_r1.models.stored_tensors import read_tensors


class ValueHead(torch.nn.Linear):
    """Gives one number per hidden state, in single precision or better."""

    def __init__(self, hidden_size: int, *, dtype: torch.dtype) -> None:
        super().__init__(hidden_size, 1, bias=False, dtype=dtype)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return values (...) of hidden states (..., H)."""
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        return linear(hidden.to(dtype), self.weight.to(dtype)).squeeze(-1)


def head_name(config: PretrainedConfig, *, default: str) -> str:
    """Return the name of a checkpoint's value head: what its config says, as OpenRLHF's has it, or the default."""
    return getattr(config, "value_head_prefix", default)


def make_head(
    config: PretrainedConfig, *, weight: torch.Tensor | None, dtype: torch.dtype, ds_config: dict | None
) -> ValueHead:
    """Return the head with the stored weight (1, H), or with a random one of OpenRLHF's size; sharded under ZeRO-3."""
    size = config.get_text_config().hidden_size
    if weight is None:
        weight = torch.empty(1, size).normal_(mean=0.0, std=1 / (size + 1))
    if not is_sharded(ds_config):
        head = ValueHead(size, dtype=dtype)
        head.weight.data.copy_(weight)
        return head
    with deepspeed.zero.Init(config_dict_or_path=ds_config):
        head = ValueHead(size, dtype=dtype)
    # Every rank has drawn a weight of its own: that of rank 0 counts.
    with deepspeed.zero.GatheredParameters([head.weight], modifier_rank=0):
        if dist.get_rank() == 0:
            head.weight.data.copy_(weight)
    return head


def stored_weight(path: str, *, name: str, config: PretrainedConfig, required: bool) -> torch.Tensor | None:
    """Return the weight (1, H) of a checkpoint's value head, None where it has none; `path` is a folder or a hub name.

    Raises UserError for a head that gives something else than one value per token, and where a required one is missing.
    """
    key = f"{name}.weight"
    weight = read_tensors(path, lambda stored: stored == key).get(key)
    if weight is None and required:
        raise UserError(
            f"{path}: this checkpoint has no value head (no weight {name}.weight); give a trained reward model, or the "
            "name of its head with --ds.value_head_prefix"
        )
    expected = (1, config.get_text_config().hidden_size)
    if weight is not None and tuple(weight.shape) != expected:
        raise UserError(
            f"{path}: {name}.weight has the shape {tuple(weight.shape)}, and a value head has {expected}; "
            "name another layer with --ds.value_head_prefix or take another checkpoint"
        )
    return weight
