"""How Phi-4-multimodal cuts an image into crops: how many there are, their placeholders, and crops put side by side.

An image is one crop of the whole picture and then a grid of crops, each 32 x 32 patches in the release. Two by two
patches become one token; every row of tokens ends with a separator, and one more stands before the whole picture.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import Phi4MultimodalConfig

from lmm_r1.lmm_kits.kit import Media

MEDIA_KEYS = ("image_pixel_values", "image_sizes", "image_attention_mask")


def crop_grid(image_size: torch.Tensor, *, crop_size: int) -> tuple[int, int]:
    """Return the rows and columns of an image's grid of crops, from its (height, width) in pixels."""
    height, width = image_size.tolist()
    return height // crop_size, width // crop_size


def token_mask(crop_masks: torch.Tensor, *, grid: tuple[int, int]) -> torch.Tensor:
    """Return which tokens of the grid show image and not padding, (rows * s, columns * s), from an image's crop masks.

    Args:
        crop_masks: patches that show image, (crops, S, S), that of the whole picture first; s is S / 2 rounded up.
    """
    rows, columns = grid
    halved = crop_masks[1 : 1 + rows * columns, ::2, ::2].bool()
    side = halved.shape[-1]
    return halved.reshape(rows, columns, side, side).transpose(1, 2).reshape(rows * side, columns * side)


def num_placeholders(crop_masks: torch.Tensor, *, grid: tuple[int, int]) -> int:
    """Return how many tokens an image takes: the grid and the whole picture with their row ends, and one between."""
    mask = token_mask(crop_masks, grid=grid)
    height, width = int(mask[:, 0].sum()), int(mask[0].sum())
    side = (crop_masks.shape[-1] + 1) // 2
    return height * (width + 1) + 1 + side * (side + 1)


def position_ids(patch_mask: torch.Tensor, *, side: int, dtype: torch.dtype) -> torch.Tensor:
    """Return where every patch of a crop lies among the tower's `side` x `side` positions, (crops, S * S).

    The part of a crop that shows image is stretched over all positions; padding is at 0. The fractions are rounded to
    the model's precision, as in transformers: in another one, patches near a border would get the next position.
    """
    counts = torch.stack([patch_mask[:, :, 0].sum(dim=1), patch_mask[:, 0].sum(dim=1)])  # (2, crops)
    steps = torch.arange(patch_mask.shape[-1], device=patch_mask.device, dtype=torch.float32)
    fractions = (steps * (1.0 / counts)[..., None]).clamp(max=1.0 - 1e-6).to(dtype)  # (2, crops, S)
    borders = torch.arange(1 / side, 1.0, 1 / side, device=patch_mask.device)
    rows, columns = torch.bucketize(fractions, borders, right=True)
    places = rows[:, :, None] * side + columns[:, None, :]
    return (places * patch_mask).flatten(1)


def merge_media(media: Sequence[Media]) -> Media:
    """Join the images of several prompts in row order, with empty crops where an image has fewer than the others.

    As in the processor, an empty crop is zeros, all of them unmasked: with all of it masked, its positions would be a
    division by zero and some attention kernels would return NaN. Nothing reads what comes of it.
    """
    width = max(item["image_pixel_values"].shape[1] for item in media)
    fills = {"image_pixel_values": 0, "image_attention_mask": 1}
    return {
        key: torch.cat([_widened(item[key], width, fills[key]) if key in fills else item[key] for item in media])
        for key in MEDIA_KEYS
    }


def _widened(crops: torch.Tensor, width: int, fill: int) -> torch.Tensor:
    missing = crops.new_full((len(crops), width - crops.shape[1], *crops.shape[2:]), fill)
    return torch.cat([crops, missing], dim=1)


def filler_media(config: Phi4MultimodalConfig) -> tuple[list[int], Media]:
    """Return the smallest image sample: the whole picture and one crop, of which one patch is not padding."""
    vision = config.vision_config
    side = vision.crop_size // vision.patch_size
    mask = torch.zeros(1, 2, side, side)
    mask[0, 0] = 1
    mask[0, 1, 0, 0] = 1
    media = {
        "image_pixel_values": torch.zeros(1, 2, vision.num_channels, vision.crop_size, vision.crop_size),
        "image_sizes": torch.tensor([[vision.crop_size, vision.crop_size]]),
        "image_attention_mask": mask,
    }
    return [vision.image_token_id] * num_placeholders(mask[0], grid=(1, 1)), media
