"""vLLM's Idefics 3 and SmolVLM, which count the tiles of an image as the processor cuts them; SmolVLM takes videos."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from transformers import BatchFeature, SmolVLMProcessor
from transformers.models.smolvlm.image_processing_smolvlm import get_resize_output_image_size
from vllm.model_executor.models import idefics3, smolvlm
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems
from vllm.multimodal.parse import MultiModalDataItems, MultiModalDataParser
from vllm.multimodal.processing import PromptReplacement, PromptUpdate, PromptUpdateDetails

from lmm_r1.lmm_kits.idefics import around_frames, video_text


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


@MULTIMODAL_REGISTRY.register_processor(
    idefics3.Idefics3MultiModalProcessor, info=Tiles, dummy_inputs=idefics3.Idefics3DummyInputsBuilder
)
class Idefics3EngineModel(idefics3.Idefics3ForConditionalGeneration):
    """vLLM's model with another count of tiles."""


# The two tokens around each frame and the one that marks it as whole; its time has at least one more.
MARKS_OF_A_FRAME = 4


class VideosInfo(Tiles, smolvlm.SmolVLMProcessingInfo):
    """Takes videos as pairs of frames and metadata."""

    def get_hf_processor(self, **kwargs: object) -> SmolVLMProcessor:
        processor = super().get_hf_processor(**kwargs)
        processor.video_processor.max_image_size = processor.image_processor.max_image_size
        return processor

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        return {"image": None, "video": None}

    def get_data_parser(self) -> MultiModalDataParser:
        return MultiModalDataParser(video_needs_metadata=True, expected_hidden_size=self._get_expected_hidden_size())

    def most_frames(self, seq_len: int, *, videos: int) -> int:
        """Return an upper bound of the frames per video, for this many videos in a prompt of this length."""
        per_frame = self.get_hf_processor().image_seq_len + MARKS_OF_A_FRAME
        return max(seq_len // per_frame // max(videos, 1), 1)


class VideosDummies(smolvlm.SmolVLMDummyInputsBuilder):
    """The inputs with which vLLM measures its memory."""

    def get_dummy_text(self, mm_counts: Mapping[str, int]) -> str:
        processor = self.info.get_hf_processor()
        video = f"{processor.fake_image_token}{processor.image_token}"
        return super().get_dummy_text(mm_counts) + video * mm_counts.get("video", 0)

    def get_dummy_mm_data(self, seq_len: int, mm_counts: Mapping[str, int], mm_options: Mapping[str, Any]) -> Any:
        videos = mm_counts.get("video", 0)
        number = self.info.most_frames(seq_len, videos=videos)
        side = self.info.get_hf_processor().image_processor.max_image_size["longest_edge"]
        frames = self._get_dummy_videos(
            width=side, height=side, num_frames=number, num_videos=videos, overrides=mm_options.get("video")
        )
        times = {"fps": 2.0, "total_num_frames": number, "frames_indices": list(range(number))}
        return {
            **super().get_dummy_mm_data(seq_len, mm_counts, mm_options),
            "video": [(one, {**times, "total_num_frames": len(one)}) for one in frames],
        }


class VideosProcessor(smolvlm.SmolVLMMultiModalProcessor):
    """Prepares videos one by one; images are prepared as in vLLM."""

    def _apply_hf_processor_main(
        self, mm_items: MultiModalDataItems, hf_processor_mm_kwargs: Mapping[str, object]
    ) -> BatchFeature:
        counts = mm_items.get_all_counts()
        images = mm_items.select({kind for kind, count in counts.items() if count and kind != "video"})
        made = super()._apply_hf_processor_main(images, hf_processor_mm_kwargs)
        if not counts.get("video", 0):
            return made
        given, _ = self._get_hf_mm_data(mm_items.select({"video"}))
        videos = given["videos"]
        assert isinstance(videos, list), "vLLM gives a pair of frames and metadata for each"
        processor = self.info.get_hf_processor(**hf_processor_mm_kwargs)
        shown = [
            self.info.ctx.call_hf_processor(
                processor,
                {
                    "text": processor.video_token,
                    "videos": [[frames]],
                    "video_metadata": [metadata],
                    "do_sample_frames": False,
                },
                hf_processor_mm_kwargs,
            )["pixel_values"][0]
            for frames, metadata in videos
        ]
        return BatchFeature(
            {**made, "video_frames": torch.cat(shown), "video_lengths": torch.tensor([len(one) for one in shown])}
        )

    def _get_mm_fields_config(
        self, hf_inputs: BatchFeature, hf_processor_mm_kwargs: Mapping[str, object]
    ) -> Mapping[str, MultiModalFieldConfig]:
        lengths = hf_inputs.get("video_lengths", torch.empty(0))
        return {
            **super()._get_mm_fields_config(hf_inputs, hf_processor_mm_kwargs),
            "video_frames": MultiModalFieldConfig.flat_from_sizes("video", lengths),
            "video_lengths": MultiModalFieldConfig.batched("video", keep_on_cpu=True),
        }

    def _get_prompt_updates(
        self,
        mm_items: MultiModalDataItems,
        hf_processor_mm_kwargs: Mapping[str, object],
        out_mm_kwargs: MultiModalKwargsItems,
    ) -> Sequence[PromptUpdate]:
        processor = self.info.get_hf_processor(**hf_processor_mm_kwargs)
        tokenizer, image = processor.tokenizer, processor.image_token_id

        def frames(video: int) -> PromptUpdateDetails:
            _, metadata = mm_items["video"][video]
            text = video_text(processor, metadata)
            before, behind = around_frames(text)
            # Between special tokens, text is tokenized by itself.
            ids = tokenizer(text[len(before) : len(text) - len(behind)], add_special_tokens=False)["input_ids"]
            return PromptUpdateDetails.select_token_id(ids, image)

        mark = [tokenizer.convert_tokens_to_ids(processor.fake_image_token), image]
        images = super()._get_prompt_updates(mm_items, hf_processor_mm_kwargs, out_mm_kwargs)
        return [*images, PromptReplacement(modality="video", target=mark, replacement=frames)]


@MULTIMODAL_REGISTRY.register_processor(VideosProcessor, info=VideosInfo, dummy_inputs=VideosDummies)
class SmolVLMEngineModel(smolvlm.SmolVLMForConditionalGeneration):
    """vLLM's model, which gets the frames of a video as the tiles of an image."""

    def _mark_tower_model(self, vllm_config: Any, modalities: Any, **targets: Any) -> AbstractContextManager[None]:
        """Leave the tower out only if the engine takes neither images nor videos."""
        return super()._mark_tower_model(vllm_config, {"image", "video"}, **targets)

    def embed_multimodal(self, **kwargs: Any) -> Any:
        frames = kwargs.pop("video_frames", None)
        if frames is None:
            return super().embed_multimodal(**kwargs)
        assert "pixel_values" not in kwargs, "vLLM asks for the features of one kind at a time"
        whole = torch.ones(len(frames), *frames.shape[-2:], dtype=torch.bool, device=frames.device)
        return super().embed_multimodal(
            pixel_values=frames, pixel_attention_mask=whole, num_patches=kwargs["video_lengths"]
        )
