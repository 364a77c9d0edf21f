"""The kit of SmolVLM2; the first SmolVLM has the `model_type` of Idefics 3."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import (
    PretrainedConfig,
    PreTrainedTokenizerBase,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
    SmolVLMImageProcessor,
    SmolVLMProcessor,
    SmolVLMVideoProcessor,
)
from transformers.models.smolvlm.processing_smolvlm import DEFAULT_CHAT_TEMPLATE
from transformers.video_utils import VideoMetadata

from lmm_r1.data.messages import Message, videos_of
from lmm_r1.data.videos import Video
from lmm_r1.lmm_kits.encoding import channels_first, video_metadata
from lmm_r1.lmm_kits.idefics import AROUND_IMAGE, IMAGE, SIZES, SMALLEST_IMAGE, IdeficsKit
from lmm_r1.lmm_kits.kit import EncodedPrompt, Media, RawMedia

VIDEO = "<video>"
"""What the chat template writes for a video."""


def video_text(processor: SmolVLMProcessor, metadata: Mapping[str, Any]) -> str:
    """Return the text that the processor writes for a video with all its frames."""
    frames = torch.empty(1, metadata["total_num_frames"], 0)
    return processor.replace_video_token({"pixel_values": frames, "video_metadata": [VideoMetadata(**metadata)]}, 0)


def around_frames(text: str) -> tuple[str, str]:
    """Return the parts of such a text before the first frame and after the last one."""
    return text[: text.index(AROUND_IMAGE)], text[text.rindex(AROUND_IMAGE) + len(AROUND_IMAGE) :]


class SmolVlmKit(IdeficsKit):
    """Text, images, and videos, whose text begins with their length; each frame is one tile after its time as text.

    vLLM's prompts have this text, too, but two tokens replace everything from the first frame to the last.
    """

    model_type = "smolvlm"
    checkpoints = "SmolVLM2"
    config_class = SmolVLMConfig
    model_class = SmolVLMForConditionalGeneration
    processor_class = SmolVLMProcessor
    engine_architecture = "LmmR1SmolVLMForConditionalGeneration"
    takes_videos = True
    engine_wants_times = True

    def load_processor(
        self, path: str, *, trust_remote_code: bool, chat_template: str | None = None
    ) -> SmolVLMProcessor:
        """Load processor and tokenizer; frames of videos are scaled to the size of a tile."""
        processor = super().load_processor(path, trust_remote_code=trust_remote_code, chat_template=chat_template)
        processor.video_processor.max_image_size = processor.image_processor.max_image_size
        return processor

    def template_for(self, processor: SmolVLMProcessor, messages: Sequence[Message]) -> str:
        """Return the checkpoint's template, or transformers' own for videos that the checkpoint's does not write."""
        template = processor.chat_template
        return DEFAULT_CHAT_TEMPLATE if videos_of(messages) and "video" not in template else template

    def video_token(self, processor: SmolVLMProcessor) -> str:
        return VIDEO

    def marks_of(self, tokenizer: PreTrainedTokenizerBase) -> list[str]:
        return [*super().marks_of(tokenizer), VIDEO]

    def media_token_ids(self, config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> set[int]:
        known = tokenizer.get_vocab()
        # The mark of a video is not a token in the releases.
        return {config.image_token_id, *(known[mark] for mark in self.marks_of(tokenizer) if mark in known)}

    def encode_chat(
        self, processor: SmolVLMProcessor, text: str, raw: RawMedia, *, opens: bool = True
    ) -> EncodedPrompt:
        if not raw.videos:
            return super().encode_chat(processor, text, raw, opens=opens)
        # One by one: the processor gives tiles and frames the same name, and takes only videos of equal length.
        cut = [
            processor.image_processor([[image]], return_row_col_info=True, return_tensors="pt") for image in raw.images
        ]
        shown = [_frames(processor, video) for video in raw.videos]
        [expanded], _ = processor.get_text_with_replacements(
            [text],
            images_replacements=[processor.replace_image_token(one, 0) for one in cut],
            videos_replacements=[video_text(processor, video_metadata(video)) for video in raw.videos],
        )
        left = {IMAGE: iter(cut), VIDEO: iter(shown)}
        in_order = [next(left[mark]) for mark in re.findall(f"{IMAGE}|{VIDEO}", text)]
        return EncodedPrompt(
            token_ids=processor.tokenizer(expanded, add_special_tokens=False)["input_ids"],
            engine_token_ids=self.engine_ids(processor, text, videos=raw.videos),
            images=list(raw.images),
            media=self.merge_media(in_order),
            videos=list(raw.videos),
        )

    def engine_ids(self, processor: SmolVLMProcessor, text: str, *, videos: Sequence[Video]) -> list[int]:
        count = text.count(VIDEO)
        assert len(videos) >= count, "the text holds the length of each video"
        if not count:
            return super().engine_ids(processor, text, videos=videos)
        written_out = [video_text(processor, video_metadata(video)) for video in videos[:count]]
        [written], _ = processor.get_text_with_replacements(
            [text],
            images_replacements=[SMALLEST_IMAGE] * text.count(IMAGE),
            videos_replacements=[
                f"{before}{AROUND_IMAGE}{IMAGE}{behind}" for before, behind in map(around_frames, written_out)
            ],
        )
        return self.collapsed(processor, processor.tokenizer(written, add_special_tokens=False)["input_ids"])

    def tiny_parts(self) -> dict[str, Any]:
        return {
            **super().tiny_parts(),
            "image_processor": SmolVLMImageProcessor(**SIZES),
            "video_processor": SmolVLMVideoProcessor(**SIZES),
        }


def _frames(processor: SmolVLMProcessor, video: Video) -> Media:
    """Return the frames of a video as tiles, (1, F, 3, side, side), and their pixel mask, in the dtype of images' tensors."""
    made = processor.video_processor([channels_first(video)], do_sample_frames=False, return_tensors="pt")
    return {key: made[key].float() for key in IdeficsKit.media_keys}
