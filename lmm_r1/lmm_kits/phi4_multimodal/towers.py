"""Phi-4-multimodal's towers (weight names, attention), and how an image is cut into crops."""

from __future__ import annotations

import torch
from transformers import Phi4MultimodalConfig, Phi4MultimodalImageProcessor
from transformers.models.phi4_multimodal.modeling_phi4_multimodal import (
    Phi4MultimodalAudioAttention,
    Phi4MultimodalVisionAttention,
)

IMAGE_EMBED = "model.embed_tokens_extend.image_embed."
AUDIO_EMBED = "model.embed_tokens_extend.audio_embed."
VISION_TOWER = f"{IMAGE_EMBED}img_processor."
# The release's tokenizer names <|endoftext|> its end token, yet every turn of its chat ends with this one.
TURN_END = "<|end|>"


def attend_bidirectionally(model: torch.nn.Module) -> None:
    """Stop the encoders' attention from being causal.

    Transformers 5.15 marks it causal, and SDPA and flash-attn follow that if they get no mask: attention in an image without
    padding was causal unless another crop of the batch had padding.
    """
    for module in model.modules():
        if isinstance(module, (Phi4MultimodalVisionAttention, Phi4MultimodalAudioAttention)):
            module.is_causal = False


def dead_prefixes(config: Phi4MultimodalConfig) -> tuple[str, ...]:
    """Return the prefixes of the parameters that none of our losses reaches."""
    # The projector reads `feature_layer` of the embeddings' and all layers' outputs.
    layers_made = config.vision_config.num_hidden_layers
    unused = range(range(layers_made + 1)[config.vision_config.feature_layer], layers_made)
    layers = (f"{VISION_TOWER}encoder.layers.{index}." for index in unused)
    return (AUDIO_EMBED, f"{VISION_TOWER}head.", f"{VISION_TOWER}post_layernorm.", *layers)


MEDIA_KEYS = ("image_pixel_values", "image_sizes", "image_attention_mask")


def crop_grid(image_size: torch.Tensor, *, crop_size: int) -> tuple[int, int]:
    """Return the rows and columns of an image's grid of crops, from its (height, width) in pixels."""
    height, width = image_size.tolist()
    return height // crop_size, width // crop_size


def num_placeholders(crop_masks: torch.Tensor, *, grid: tuple[int, int]) -> int:
    """Return how many tokens an image takes: the grid and the whole picture with their row ends, and one between.

    Args:
        crop_masks: patches that show image, (crops, S, S), that of the whole picture first.
    """
    rows, columns = grid
    # Which tokens of the grid show image and not padding.
    halved = crop_masks[1 : 1 + rows * columns, ::2, ::2].bool()
    side = halved.shape[-1]
    mask = halved.reshape(rows, columns, side, side).transpose(1, 2).reshape(rows * side, columns * side)
    return _with_row_ends(int(mask[:, 0].sum()), int(mask[0].sum()), side=crop_masks.shape[-1])


def _with_row_ends(rows: int, columns: int, *, side: int) -> int:
    half = (side + 1) // 2
    return rows * (columns + 1) + 1 + half * (half + 1)


def tokens_of_size(settings: Phi4MultimodalImageProcessor, width: int, height: int) -> int:
    """Return how many tokens an image of this size takes; raises ValueError for one that is refused."""
    crop, patch = settings.size["height"], settings.patch_size
    side = crop // patch
    # A tensor without memory, because only its size matters.
    image = torch.empty(3, height, width, device="meta")
    padded, _ = settings.dynamic_preprocess(image, crop, patch, side, max_num=settings.dynamic_hd)
    scale = min(whole / own for whole, own in zip(padded.shape[1:], image.shape[1:], strict=True))
    counts = []
    for whole, own in zip(padded.shape[1:], image.shape[1:], strict=True):
        patches = whole // patch - (whole - int(own * scale)) // patch
        counts.append(sum(place % side % 2 == 0 for place in range(patches)))
    return _with_row_ends(*counts, side=side)
