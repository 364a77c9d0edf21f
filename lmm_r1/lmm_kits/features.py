"""Where in a forward the features of images are computed; corrected patch positions; the fused rotary kernel."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from transformers.modeling_outputs import BaseModelOutputWithPooling

Item: TypeAlias = dict[str, torch.Tensor]
"""What a call gets of one image, of one crop of it, or of one video, by the names of the arguments."""
Parts: TypeAlias = tuple[torch.Tensor, ...]
"""All that is read of a call's output, each with the items one behind another in its first dimension."""


def plain(output: torch.Tensor) -> Parts:
    return (output,)


def of_plain(parts: Parts) -> torch.Tensor:
    return parts[0]


def pooled(output: Any) -> Parts:
    return (output.pooler_output,)


def of_pooled(parts: Parts) -> BaseModelOutputWithPooling:
    return BaseModelOutputWithPooling(pooler_output=parts[0])


def last_hidden(output: Any) -> Parts:
    return (output.last_hidden_state,)


def of_last_hidden(parts: Parts) -> BaseModelOutputWithPooling:
    return BaseModelOutputWithPooling(last_hidden_state=parts[0])


def last_layer(output: Any) -> Parts:
    return (output.hidden_states[-1],)


def of_last_layer(parts: Parts) -> BaseModelOutputWithPooling:
    return BaseModelOutputWithPooling(hidden_states=parts)


@dataclass(frozen=True, kw_only=True)
class FeaturePoint:
    """A call that makes features of pixels, of each item by itself: of a row of its arguments, a row of its output."""

    owner: str
    """The module whose method is called, by its name in the causal model."""
    method: str = "forward"
    projects: bool = False
    """Whether the projector is a part of it; else the tower alone, and the projector may be trained."""
    pixels: str = "pixel_values"
    """The argument that holds the pixels."""
    beside: tuple[str, ...] = ()
    """Other arguments that hold something of each item."""
    unread: tuple[str, ...] = ()
    """Tensors that the call is given and that its output does not depend on."""
    items_in: int = 0
    """The dimension of these arguments along which the items are."""
    take: Callable[[Any], Parts] = plain
    """Gives what is read of the output."""
    give: Callable[[Parts], Any] = of_plain
    """Gives an output again of what is read of it."""

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
        """Return how many rows of the output are the item's."""
        return 1

    def smallest(self, owner: torch.nn.Module, items: Sequence[Item]) -> Item:
        """Return an item of the least work, for a call whose output nobody reads."""
        return items[0]

    def _lengths(self, arguments: Mapping[str, Any]) -> dict[str, list[int]]:
        """Return how many rows of an argument each item has, of those where it is not one."""
        return {}


@dataclass(frozen=True, kw_only=True)
class GridPoint(FeaturePoint):
    """One that gets the patches (P, C) of all images and videos behind one another, and their grids (N, 3)."""

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
    """Return along how many patches of a side the tower joins them into one token."""
    side = owner.spatial_merge_size
    assert isinstance(side, int), "a plain number of every tower that takes grids"
    return side


def exact_patch_positions(embeddings: torch.nn.Module) -> None:
    """Make a tower's embeddings place patches as in fp32.

    Transformers rounds the patches' places (0 to 1) to the pixels' dtype before it looks them up: in bf16, of 70 rows and
    as many columns 34 get their neighbour's position, and of 27 rows 6.
    """
    embeddings.register_forward_pre_hook(_pixels_in_fp32, with_kwargs=True)
    embeddings.get_submodule("patch_embedding").register_forward_pre_hook(_pixels_in_the_weights_dtype)


def _pixels_in_fp32(module: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    return args, kwargs | {"pixel_values": kwargs["pixel_values"].float()}


def _pixels_in_the_weights_dtype(module: torch.nn.Conv2d, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    return (args[0].to(module.weight.dtype),)


def rotate_by_sections(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, sections: list[int]
) -> Any:
    """Return queries and keys (B, H, T, D), rotated by angles (3, B, T, D) of which each axis has its section."""
    from liger_kernel.ops.qwen2vl_mrope import LigerQwen2VLMRopeFunction

    return LigerQwen2VLMRopeFunction.apply(q, k, cos, sin, sections)
