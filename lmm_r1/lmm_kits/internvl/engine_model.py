"""vLLM's InternVL for the kit's prompts, in which the markers of an image stand already."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from transformers import InternVLProcessor
from vllm.model_executor.models import interns1
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import MultiModalKwargsItems
from vllm.multimodal.parse import MultiModalDataItems
from vllm.multimodal.processing import PromptReplacement, PromptUpdate


class ImageProcessor(interns1.InternS1MultiModalProcessor):
    """Repeats the one placeholder that the kit writes per image, and leaves all other ids as they are.

    vLLM's own takes a bare placeholder and writes the markers around it itself.
    """

    def _get_prompt_updates(
        self,
        mm_items: MultiModalDataItems,
        hf_processor_mm_kwargs: Mapping[str, object],
        out_mm_kwargs: MultiModalKwargsItems,
    ) -> Sequence[PromptUpdate]:
        processor = self.info.get_hf_processor(**hf_processor_mm_kwargs)
        token = processor.image_token_id
        tiles = out_mm_kwargs.get_data().get("image_num_patches", [])

        def placeholders(image: int) -> list[int]:
            return [token] * (int(tiles[image]) * processor.image_seq_length)

        return [PromptReplacement(modality="image", target=[token], replacement=placeholders)]


class ImagesInfo(interns1.InternS1ProcessingInfo):
    """Images only: a video is refused."""

    def get_hf_processor(self, **kwargs: object) -> InternVLProcessor:
        processor = super().get_hf_processor(**kwargs)
        # It cuts every image into tiles, whatever the setting of the image processor in it (the releases say false), by
        # which vLLM works out how many tokens an image has at most.
        processor.image_processor.crop_to_patches = True
        return processor

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        return {"image": None}


@MULTIMODAL_REGISTRY.register_processor(
    ImageProcessor, info=ImagesInfo, dummy_inputs=interns1.InternS1DummyInputsBuilder
)
class ImagesModel(interns1.InternS1ForConditionalGeneration):
    """vLLM's model as it is; only its prompts are prepared differently."""
