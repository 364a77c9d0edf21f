"""Where in a forward the features of images are computed; corrected patch positions; the fused rotary kernel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from transformers.modeling_outputs import BaseModelOutputWithPooling

Item: TypeAlias = dict[str, torch.Tensor]
"""A call's arguments for one image, one crop of it, or one video, by their names."""
Parts: TypeAlias = tuple[torch.Tensor, ...]
"""The parts of a call's output that the model reads, each with the items joined along its first dimension."""


@dataclass(frozen=True, kw_only=True)
class FeaturePoint:
    """A call that computes features of pixels, for each item by itself: from one row of its arguments, one row of its output."""

    owner: str
    """The name, in the causal model, of the module whose method is called."""
    method: str = "forward"
    projects: bool = False
    """Whether the call includes the projector; otherwise it is the tower only, and the projector may be trained."""
    pixels: str = "pixel_values"
    """The argument that holds the pixels."""
    beside: tuple[str, ...] = ()
    """Other arguments with a part for each item."""
    unread: tuple[str, ...] = ()
    """Tensor arguments that do not affect the output."""
    items_in: int = 0
    """The dimension of the arguments along which the items are joined."""
    reads: Literal["", "pooler_output", "last_hidden_state", "hidden_states"] = ""
    """The part of the output that the model reads (of hidden states, the last layer's); by default the output itself."""

    def take(self, output: Any) -> Parts:
        """Return the parts that the model reads of a call's output."""
        part = getattr(output, self.reads) if self.reads else output
        return (part[-1] if self.reads == "hidden_states" else part,)

    def give(self, parts: Parts) -> Any:
        """Return an output made of its parts."""
        if not self.reads:
            return parts[0]
        return BaseModelOutputWithPooling(**{self.reads: parts if self.reads == "hidden_states" else parts[0]})

    def items(self, arguments: Mapping[str, Any]) -> list[Item]:
        """Return the call's arguments item by item, as views."""
        names = [name for name in (self.pixels, *self.beside) if arguments.get(name) is not None]
        lengths = self._lengths(arguments)
        parts = [arguments[name].split(lengths.get(name, 1), dim=self.items_in) for name in names]
        return [dict(zip(names, item, strict=True)) for item in zip(*parts, strict=True)]

    def joined(self, items: Sequence[Item]) -> Item:
        """Return the arguments of a call with these items."""
        return {name: torch.cat([item[name] for item in items], dim=self.items_in) for name in items[0]}

    def rows(self, owner: torch.nn.Module, item: Item) -> int:
        """Return the item's number of rows in the output."""
        return 1

    def smallest(self, owner: torch.nn.Module, items: Sequence[Item]) -> Item:
        """Return an item that costs least, for a call whose output is not used."""
        return items[0]

    def _lengths(self, arguments: Mapping[str, Any]) -> dict[str, list[int]]:
        """Return each item's number of rows in those arguments in which it can differ from one."""
        return {}


@dataclass(frozen=True, kw_only=True)
class GridPoint(FeaturePoint):
    """A call that gets the joined patches (P, C) of all images and videos, and their grids (N, 3)."""

    pixels: str = "hidden_states"
    beside: tuple[str, ...] = ("grid_thw",)

    def rows(self, owner: torch.nn.Module, item: Item) -> int:
        return len(item[self.pixels]) // _merged(owner) ** 2

    def smallest(self, owner: torch.nn.Module, items: Sequence[Item]) -> Item:
        """Return one merged patch of zeros."""
        side = _merged(owner)
        pixels, grids = (items[0][name] for name in (self.pixels, *self.beside))
        return {
            self.pixels: pixels.new_zeros(side**2, pixels.shape[1]),
            self.beside[0]: grids.new_tensor([[1, side, side]]),
        }

    def _lengths(self, arguments: Mapping[str, Any]) -> dict[str, list[int]]:
        return {self.pixels: arguments[self.beside[0]].prod(dim=1).tolist()}


def _merged(owner: torch.nn.Module) -> int:
    """Return the number of patches per side that the tower joins into one token."""
    side = owner.spatial_merge_size
    assert isinstance(side, int), "every tower that takes grids has a plain number"
    return side


def exact_patch_positions(embeddings: torch.nn.Module) -> None:
    """Let a tower's embeddings compute the positions of patches in fp32.

    Transformers rounds the places of patches (0 to 1) to the pixels' dtype before it looks positions up. In bf16, 34 of 70
    rows or columns get their neighbour's position, and 6 of 27.
    """
    embeddings.register_forward_pre_hook(_pixels_in_fp32, with_kwargs=True)
    embeddings.get_submodule("patch_embedding").register_forward_pre_hook(_pixels_in_the_weights_dtype)


def _pixels_in_fp32(
    module: torch.nn.Module, args: tuple, kwargs: dict[str, torch.Tensor]
) -> tuple[tuple, dict[str, torch.Tensor]]:
    return args, kwargs | {"pixel_values": kwargs["pixel_values"].float()}


def _pixels_in_the_weights_dtype(module: torch.nn.Conv2d, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    return (args[0].to(module.weight.dtype),)


def rotate_by_sections(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, sections: list[int]
) -> Any:
    """Return queries and keys (B, H, T, D), rotated by angles (3, B, T, D), of which each axis has a section."""
    from liger_kernel.ops.qwen2vl_mrope import LigerQwen2VLMRopeFunction

    return LigerQwen2VLMRopeFunction.apply(q, k, cos, sin, sections)
