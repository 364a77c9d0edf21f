"""vLLM's Gemma 3, taking prompts with one placeholder per image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import BatchFeature
from vllm.model_executor.models import gemma3_mm
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems
from vllm.multimodal.parse import MultiModalDataItems
from vllm.multimodal.processing import BaseMultiModalProcessor, PromptReplacement, PromptUpdate


class DummyInputs(gemma3_mm.Gemma3DummyInputsBuilder):
    """The prompts with which vLLM measures memory, in the form of the kit's."""

    def get_dummy_text(self, mm_counts: Mapping[str, int]) -> str:
        """Return one placeholder per image."""
        return self.info.get_hf_processor().tokenizer.image_token * mm_counts.get("image", 0)


class ImageProcessor(BaseMultiModalProcessor[gemma3_mm.Gemma3ProcessingInfo]):
    """Repeats the one placeholder that the kit writes per image, and keeps all other ids.

    vLLM's own processor takes ids with only `<start_of_image>`, writes the blank lines around images itself, and joins them
    with up to four adjacent line breaks; the tokenizer joins more of them.
    """

    def _get_hf_processor_text(self, mm_counts: Mapping[str, int]) -> str:
        return self.info.get_hf_processor().boi_token * mm_counts.get("image", 0)

    def _postprocess_hf_mm_data(
        self, mm_data: Mapping[str, object], hf_processor_mm_kwargs: Mapping[str, object], processed_data: BatchFeature
    ) -> BatchFeature:
        if "pixel_values" in processed_data:
            # One piece per image: the kit refuses checkpoints that want crops.
            processed_data["num_patches"] = torch.ones(len(processed_data["pixel_values"]), dtype=torch.long)
        return processed_data

    def _get_mm_fields_config(
        self, hf_inputs: BatchFeature, hf_processor_mm_kwargs: Mapping[str, object]
    ) -> Mapping[str, MultiModalFieldConfig]:
        pieces = hf_inputs.get("num_patches", torch.empty(0))
        return {
            "pixel_values": MultiModalFieldConfig.flat_from_sizes("image", pieces),
            "num_patches": MultiModalFieldConfig.batched("image", keep_on_cpu=True),
        }

    def _get_prompt_updates(
        self,
        mm_items: MultiModalDataItems,
        hf_processor_mm_kwargs: Mapping[str, Any],
        out_mm_kwargs: MultiModalKwargsItems,
    ) -> Sequence[PromptUpdate]:
        processor = self.info.get_hf_processor(**hf_processor_mm_kwargs)
        token = processor.tokenizer.image_token_id
        return [PromptReplacement(modality="image", target=[token], replacement=[token] * processor.image_seq_length)]


@MULTIMODAL_REGISTRY.register_processor(ImageProcessor, info=gemma3_mm.Gemma3ProcessingInfo, dummy_inputs=DummyInputs)
class Gemma3ForConditionalGeneration(gemma3_mm.Gemma3ForConditionalGeneration):
    """vLLM's class with another preparation of prompts."""
