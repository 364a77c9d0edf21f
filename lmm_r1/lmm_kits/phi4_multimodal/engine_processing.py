"""What vLLM does with an image before the model sees it: the processor's own crops, and the placeholders they take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import BatchFeature, Phi4MultimodalProcessor
from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems
from vllm.multimodal.parse import MultiModalDataItems
from vllm.multimodal.processing import BaseDummyInputsBuilder, BaseMultiModalProcessor, BaseProcessingInfo
from vllm.multimodal.processing.processor import PromptReplacement, PromptUpdate

from lmm_r1.lmm_kits.phi4_multimodal.crops import crop_grid, num_placeholders

MEDIA_KEYS = ("image_pixel_values", "image_sizes", "image_attention_mask")


class Phi4ProcessingInfo(BaseProcessingInfo):
    """Images only: an audio prompt is refused."""

    def get_hf_processor(self, **kwargs: object) -> Phi4MultimodalProcessor:
        return self.ctx.get_hf_processor(Phi4MultimodalProcessor, **kwargs)

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        return {"image": None}


class Phi4DummyInputs(BaseDummyInputsBuilder[Phi4ProcessingInfo]):
    """The largest input, for which vLLM keeps memory free."""

    def get_dummy_text(self, mm_counts: Mapping[str, int]) -> str:
        return self.info.get_hf_processor().image_token * mm_counts.get("image", 0)

    def get_dummy_mm_data(
        self, seq_len: int, mm_counts: Mapping[str, int], mm_options: Mapping[str, Any]
    ) -> dict[str, Any]:
        # One column of crops: every row of tokens has an end of its own, and this has the most rows.
        image_processor = self.info.get_hf_processor().image_processor
        side = image_processor.size["height"]
        images = self._get_dummy_images(
            width=side,
            height=side * image_processor.dynamic_hd,
            num_images=mm_counts.get("image", 0),
            overrides=mm_options.get("image"),
        )
        return {"image": images}


class Phi4Processor(BaseMultiModalProcessor[Phi4ProcessingInfo]):
    """Expands every placeholder as the processor does."""

    def _get_hf_processor_text(self, mm_counts: Mapping[str, int]) -> str:
        return self.dummy_inputs.get_dummy_text(mm_counts)

    def _postprocess_hf_mm_data(
        self,
        mm_data: Mapping[str, object],
        hf_processor_mm_kwargs: Mapping[str, object],
        processed_data: BatchFeature,
    ) -> BatchFeature:
        """Take off the empty crops with which the processor makes all images of a prompt alike."""
        if "image_sizes" not in processed_data:
            return BatchFeature({})
        crop_size = self.info.get_hf_config().vision_config.crop_size
        kept = []
        for size in processed_data["image_sizes"]:
            rows, columns = crop_grid(size, crop_size=crop_size)
            kept.append(1 + rows * columns)
        return BatchFeature(
            {
                "image_sizes": processed_data["image_sizes"],
                **{
                    key: [crops[:number] for crops, number in zip(processed_data[key], kept, strict=True)]
                    for key in ("image_pixel_values", "image_attention_mask")
                },
            }
        )

    def _get_mm_fields_config(
        self, hf_inputs: BatchFeature, hf_processor_mm_kwargs: Mapping[str, object]
    ) -> Mapping[str, MultiModalFieldConfig]:
        return {key: MultiModalFieldConfig.batched("image") for key in MEDIA_KEYS}

    def _get_prompt_updates(
        self,
        mm_items: MultiModalDataItems,
        hf_processor_mm_kwargs: Mapping[str, object],
        out_mm_kwargs: MultiModalKwargsItems,
    ) -> Sequence[PromptUpdate]:
        config = self.info.get_hf_config().vision_config

        def replacement(index: int) -> list[int]:
            item = out_mm_kwargs["image"][index]
            size: torch.Tensor = item["image_sizes"].data
            masks: torch.Tensor = item["image_attention_mask"].data
            grid = crop_grid(size, crop_size=config.crop_size)
            return [config.image_token_id] * num_placeholders(masks, grid=grid)

        return [PromptReplacement(modality="image", target=[config.image_token_id], replacement=replacement)]
