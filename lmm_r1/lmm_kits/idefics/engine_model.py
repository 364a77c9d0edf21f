"""vLLM's Idefics 3 and SmolVLM, which count the tiles of an image as the processor cuts them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from transformers.models.smolvlm.image_processing_smolvlm import get_resize_output_image_size
from vllm.model_executor.models import idefics3, smolvlm
from vllm.multimodal import MULTIMODAL_REGISTRY


def tile_grid(image_processor: Any, *, height: int, width: int) -> tuple[int, int]:
    """Return the rows and columns of tiles into which an image is cut; (0, 0) if it is a single tile."""
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


class Tiles(idefics3.Idefics3ProcessingInfo):
    """Answers vLLM's questions about the sizes of images."""

    def _get_image_feature_grid_size(
        self, *, image_width: int, image_height: int, processor: Any, mm_kwargs: Mapping[str, object]
    ) -> tuple[int, int, int]:
        """Return an image's tiles with the one of the whole image, their rows and columns."""
        rows, columns = tile_grid(processor.image_processor, height=image_height, width=image_width)
        return rows * columns + 1, rows, columns


class SmolVLMTiles(Tiles, smolvlm.SmolVLMProcessingInfo):
    """The same for SmolVLM."""


@MULTIMODAL_REGISTRY.register_processor(
    idefics3.Idefics3MultiModalProcessor, info=Tiles, dummy_inputs=idefics3.Idefics3DummyInputsBuilder
)
class Idefics3EngineModel(idefics3.Idefics3ForConditionalGeneration):
    """vLLM's model with another count of tiles."""


@MULTIMODAL_REGISTRY.register_processor(
    smolvlm.SmolVLMMultiModalProcessor, info=SmolVLMTiles, dummy_inputs=smolvlm.SmolVLMDummyInputsBuilder
)
class SmolVLMEngineModel(smolvlm.SmolVLMForConditionalGeneration):
    """The same for SmolVLM."""
