"""vLLM's InternVL for the kit's prompts, which already have the markers of an image and of a video's first frame."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from transformers import InternVLProcessor
from vllm.model_executor.models import interns1
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import MultiModalKwargsItems
from vllm.multimodal.parse import MultiModalDataItems
from vllm.multimodal.processing import PromptReplacement, PromptUpdate, PromptUpdateDetails


class MarkedProcessor(interns1.InternS1MultiModalProcessor):
    """Repeats the one placeholder that the kit writes per image, and replaces a video's token by its frames.

    All other ids stay as they are; vLLM's own takes bare placeholders and writes the markers around them itself.
    """

    def _get_prompt_updates(
        self,
        mm_items: MultiModalDataItems,
        hf_processor_mm_kwargs: Mapping[str, object],
        out_mm_kwargs: MultiModalKwargsItems,
    ) -> Sequence[PromptUpdate]:
        processor = self.info.get_hf_processor(**hf_processor_mm_kwargs)
        token, counts = processor.image_token_id, out_mm_kwargs.get_data()

        def placeholders(image: int) -> list[int]:
            return [token] * (int(counts["image_num_patches"][image]) * processor.image_seq_length)

        def frames(video: int) -> PromptUpdateDetails:
            shown = [torch.empty(int(counts["video_num_patches"][video]), 0)]
            text = processor.replace_video_token({"pixel_values_videos": shown}, 0)
            ids = processor.tokenizer(text, add_special_tokens=False)["input_ids"]
            # From the first placeholder to the last one: between special tokens, text is tokenized by itself.
            end = len(ids) - ids[::-1].index(token)
            return PromptUpdateDetails.select_token_id(ids[ids.index(token) : end], token)

        return [
            PromptReplacement(modality="image", target=[token], replacement=placeholders),
            PromptReplacement(modality="video", target=[processor.tokenizer.video_token_id], replacement=frames),
        ]


class UncutInfo(interns1.InternS1ProcessingInfo):
    """Keeps all frames of videos."""

    def get_hf_processor(self, **kwargs: object) -> InternVLProcessor:
        processor = super().get_hf_processor(**kwargs)
        # The processor cuts every image into tiles, whatever this setting is (false in the releases), but vLLM computes the
        # most tokens of an image from it.
        processor.image_processor.crop_to_patches = True
        processor.video_processor.do_sample_frames = False
        return processor


@MULTIMODAL_REGISTRY.register_processor(
    MarkedProcessor, info=UncutInfo, dummy_inputs=interns1.InternS1DummyInputsBuilder
)
class MarkedModel(interns1.InternS1ForConditionalGeneration):
    """vLLM's model with another preparation of prompts."""
