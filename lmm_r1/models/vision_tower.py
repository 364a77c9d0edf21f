"""How vision towers compute: convolutions over patches as products, windows of attention through one kernel."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
from torch.nn.functional import linear
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from lmm_r1.lmm_kits import LmmKit
from lmm_r1.models.packed.varlen_kernel import Stretches, kernel_for


class _PatchProduct(torch.nn.Conv3d):
    """A convolution that takes its kernel's size as a whole; five times as fast on a CPU as PyTorch's own."""

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        if tuple(patches.shape[2:]) != self.kernel_size:
            return super().forward(patches)
        products = linear(patches.flatten(1), self.weight.flatten(1), self.bias)
        return products[:, :, None, None, None]


def multiply_patches(model: torch.nn.Module) -> None:
    """Let a model's three-dimensional convolutions multiply patches of their kernel's size; weights keep their names."""
    for module in model.modules():
        plain = type(module) is torch.nn.Conv3d and module.groups == 1
        if plain and module.padding == (0, 0, 0) and module.dilation == (1, 1, 1):
            module.__class__ = _PatchProduct


# An attention with "flash" in its name gets all windows of a layer at once, with their borders; one without gets them
# one by one.
WINDOW_ATTENTION = "lmm_flash_windows"


def join_windows(model: PreTrainedModel, kit: LmmKit) -> None:
    """Let the vision tower of a loaded model attend within all of a layer's windows in as few calls as there can be.

    Only in the place of SDPA, which would be called for each window; an implementation that the user chose stays.
    """
    tower: Any = model.get_submodule(kit.windowed_tower) if kit.windowed_tower else None
    if tower is None or tower.config._attn_implementation != "sdpa":
        return
    parts = {key: config for key in model.config.sub_configs if (config := getattr(model.config, key)) is not None}
    model.set_attn_implementation(
        {
            key: WINDOW_ATTENTION if config is tower.config else config._attn_implementation
            for key, config in parts.items()
        }
    )
    assert tower.config._attn_implementation == WINDOW_ATTENTION, "a part of the model's config"


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    cu_seq_lens_k: torch.Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Return the outputs (1, P, H, D) of queries (1, H, P, D) over keys and values of P patches, as transformers asks.

    Args:
        cu_seq_lens_q, cu_seq_lens_k: where the windows end, from 0 on, (W + 1,); queries and keys have the same.
    """
    settings = {"dropout": dropout, "scaling": scaling, **kwargs}
    if cu_seq_lens_q is None or cu_seq_lens_k is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **settings)
    assert attention_mask is None, "windows are all that keeps patches apart"
    kernel = kernel_for(query, value, dropout=dropout)
    if kernel is not None and max_length_q is not None and max_length_k is not None:
        stretches = Stretches(
            query_ends=cu_seq_lens_q.to(query.device, torch.int32),
            key_ends=cu_seq_lens_k.to(query.device, torch.int32),
            longest_query=max_length_q,
            longest_key=max_length_k,
        )
        queries, keys, values = (tensor[0].transpose(0, 1) for tensor in (query, key, value))  # (P, H, D)
        output = kernel.attend(queries, keys, values, stretches, causal=False, window=None, scaling=scaling)
        return output[None], None
    runs = [(length, len(list(alike))) for length, alike in groupby(cu_seq_lens_q.diff().tolist())]
    parts = zip(*(_batches(tensor, runs) for tensor in (query, key, value)), strict=True)
    outputs = [sdpa_attention_forward(module, *part, None, **settings)[0].flatten(0, 1) for part in parts]
    return torch.cat(outputs)[None], None


def _batches(tensor: torch.Tensor, runs: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
    """Return a tensor (1, H, P, D) as a batch (W, H, L, D) for each run of W consecutive windows of L patches."""
    parts = tensor[0].split([length * count for length, count in runs], dim=1)
    return [
        part.unflatten(1, (count, length)).transpose(0, 1) for part, (length, count) in zip(parts, runs, strict=True)
    ]


AttentionInterface.register(WINDOW_ATTENTION, _attention)
