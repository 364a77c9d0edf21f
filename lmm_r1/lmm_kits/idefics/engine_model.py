"""vLLM's Idefics 3, and what of SmolVLM is like it, with the tiles of an image counted as the processor cuts them.

vLLM 0.29 asks `get_number_of_image_patches`, which says 0 for an image of a single tile (`do_image_splitting` false, or a
longest side of one tile), so that vLLM splits its features into none; and which rounds other than the processor does
where the longest side is no multiple of a tile's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from transformers.models.smolvlm.image_processing_smolvlm import get_resize_output_image_size
from vllm.model_executor.models import idefics3, smolvlm
from vllm.multimodal import MULTIMODAL_REGISTRY


def tile_grid(image_processor: Any, *, height: int, width: int) -> tuple[int, int]:
    """Return the rows and columns of tiles that an image is cut into; (0, 0) where it is one tile as a whole."""
    if not image_processor.do_image_splitting:
        return 0, 0
    tile = image_processor.max_image_size["longest_edge"]
    image = torch.empty(height, width, device="meta")
    height, width = get_resize_output_image_size(image, image_processor.size["longest_edge"])
    ratio = width / height
    if width >= height:
        columns = math.ceil(width / tile)
        rows = math.ceil(int(columns * tile / ratio) / tile)
    else:
        rows = math.ceil(height / tile)
        columns = math.ceil(int(rows * tile * ratio) / tile)
    return (rows, columns) if max(rows, columns) > 1 else (0, 0)


def _tiles(image_processor: Any, *, height: int, width: int) -> tuple[int, int, int]:
    """Return an image's tiles with the one of the whole image, their rows and columns."""
    rows, columns = tile_grid(image_processor, height=height, width=width)
    return rows * columns + 1, rows, columns


class Idefics3Tiles(idefics3.Idefics3ProcessingInfo):
    """What vLLM asks of the sizes of images."""

    def _get_image_feature_grid_size(
        self, *, image_width: int, image_height: int, processor: Any, mm_kwargs: Mapping[str, object]
    ) -> tuple[int, int, int]:
        return _tiles(processor.image_processor, height=image_height, width=image_width)


class SmolVLMTiles(smolvlm.SmolVLMProcessingInfo):
    """The same for SmolVLM."""

    def _get_image_feature_grid_size(
        self, *, image_width: int, image_height: int, processor: Any, mm_kwargs: Mapping[str, object]
    ) -> tuple[int, int, int]:
        return _tiles(processor.image_processor, height=image_height, width=image_width)


@MULTIMODAL_REGISTRY.register_processor(
    idefics3.Idefics3MultiModalProcessor, info=Idefics3Tiles, dummy_inputs=idefics3.Idefics3DummyInputsBuilder
)
class Idefics3EngineModel(idefics3.Idefics3ForConditionalGeneration):
    """vLLM's model as it is; only the tiles are counted otherwise."""
