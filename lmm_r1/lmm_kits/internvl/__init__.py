"""The kit of InternVL in transformers' format: an image is cut into tiles, and a video's frames are tiles with their numbers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import InternVLConfig, InternVLForConditionalGeneration, InternVLProcessor, PreTrainedTokenizerBase

from lmm_r1.data.messages import Message, images_of, videos_of
from lmm_r1.data.videos import Video
from lmm_r1.errors import UserError
from lmm_r1.lmm_kits.encoding import (
    adds_special_tokens,
    any_of,
    chat_ids,
    chat_of,
    check_image_marks,
    check_placeholders,
    check_typed_media,
)
from lmm_r1.lmm_kits.features import FeaturePoint, last_hidden, of_last_hidden, of_pooled, pooled
from lmm_r1.lmm_kits.kit import EncodedPrompt, LmmKit, Media, TinyModelSpec
from lmm_r1.lmm_kits.video_frames import channels_first

# What vLLM calls the language models of the releases, by their `model_type`.
LANGUAGE_MODELS = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
# The class of `engine_model`, which vLLM knows by a name of its own.
ENGINE_CLASS = "LmmR1InternVLForConditionalGeneration"


class InternVlKit(LmmKit):
    """Text, images and videos; vLLM runs it with a class of its own (`engine_model`).

    A frame is one tile behind its number as text, with an image's placeholders. For vLLM a video's own token stands in
    place of the first frame's placeholders and of all behind them.
    """

    model_type = "internvl"
    checkpoints = "InternVL2.5, InternVL3, InternVL3.5 (-hf)"
    config_class = InternVLConfig
    model_class = InternVLForConditionalGeneration
    processor_class = InternVLProcessor
    takes_videos = True
    takes_flash_attention = True
    spoken_tokens = ("<ref>", "</ref>", "<box>", "</box>", "<quad>", "</quad>")
    writes_thousandths = True
    vision_prefixes = ("model.vision_tower.",)
    projector_prefixes = ("model.multi_modal_projector.",)
    feature_points = (
        FeaturePoint(owner="model", method="get_image_features", projects=True, take=pooled, give=of_pooled),
        FeaturePoint(owner="model.vision_tower", take=last_hidden, give=of_last_hidden),
    )
    # For training the tower with masked patches, which is not done here; the releases have none.
    untrained_prefixes = ("model.vision_tower.embeddings.mask_token",)

    def load_config(self, path: str, *, trust_remote_code: bool) -> InternVLConfig:
        """Load the config; raises UserError for a language model or features of the tower that were not tried."""
        config = super().load_config(path, trust_remote_code=trust_remote_code)
        language_model = config.text_config.model_type
        if language_model not in LANGUAGE_MODELS:
            raise UserError(
                f"{path}: InternVL with the language model {language_model} is not supported; with these it is: "
                f"{', '.join(sorted(LANGUAGE_MODELS))}"
            )
        features = (config.vision_feature_layer, config.vision_feature_select_strategy)
        if features != (-1, "default"):
            raise UserError(
                f"{path}: vision_feature_layer {features[0]} and vision_feature_select_strategy {features[1]} are not "
                "supported: vLLM reads the last layer's patches whatever they say; the releases have -1 and default"
            )
        return config

    def load_processor(
        self, path: str, *, trust_remote_code: bool, chat_template: str | None = None
    ) -> InternVLProcessor:
        """Load processor and tokenizer; frames of videos are scaled to the size of a tile, as vLLM does it."""
        processor = super().load_processor(path, trust_remote_code=trust_remote_code, chat_template=chat_template)
        processor.video_processor.size = processor.image_processor.size
        return processor

    def encode_messages(
        self,
        processor: InternVLProcessor,
        messages: Sequence[Message],
        *,
        images: Sequence[Image.Image],
        add_generation_prompt: bool,
        videos: Sequence[Video] = (),
    ) -> EncodedPrompt:
        """Encode a conversation with its media; raises UserError when it holds what the processor cannot take.

        Pixel bounds change nothing: an image's shape alone says into how many tiles of one size it is scaled, and each
        frame of a video is one.
        """
        text = self.chat_text(processor, messages, add_generation_prompt=add_generation_prompt)
        return _encoded(processor, text, images=images, videos=videos, opens=True)

    def encode_text(
        self, processor: InternVLProcessor, text: str, *, images: Sequence[Image.Image], opens: bool
    ) -> EncodedPrompt:
        check_image_marks(
            text, mark=processor.image_token, media_tokens=_media_tokens(processor.tokenizer), given=len(images)
        )
        return _encoded(processor, text, images=images, videos=(), opens=opens)

    def chat_text(
        self, processor: InternVLProcessor, messages: Sequence[Message], *, add_generation_prompt: bool
    ) -> str:
        check_typed_media(messages, media_tokens=_media_tokens(processor.tokenizer))
        text = processor.apply_chat_template(
            chat_of(messages), tokenize=False, add_generation_prompt=add_generation_prompt
        )
        check_placeholders(text.count(processor.image_token), given=len(images_of(messages)), kind="images")
        check_placeholders(text.count(processor.video_token), given=len(videos_of(messages)), kind="videos")
        return text

    def render_messages(
        self,
        processor: InternVLProcessor,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        videos: Sequence[Video] = (),
    ) -> list[int]:
        text = self.chat_text(processor, messages, add_generation_prompt=add_generation_prompt)
        return chat_ids(processor.tokenizer, _for_the_engine(processor, text))

    def placeholder_ids(self, processor: InternVLProcessor) -> frozenset[int]:
        return frozenset({processor.image_token_id, processor.tokenizer.video_token_id})

    def media_texts(self, processor: InternVLProcessor) -> re.Pattern[str]:
        return any_of(_media_tokens(processor.tokenizer))

    def media_token_ids(self, config: InternVLConfig, tokenizer: PreTrainedTokenizerBase) -> set[int]:
        return {config.image_token_id, *tokenizer.convert_tokens_to_ids(list(_media_tokens(tokenizer)))}

    def filler_media(self, config: InternVLConfig) -> tuple[list[int], Media]:
        """Return a black tile, all of which are of one size, with its placeholders."""
        vision = config.vision_config
        (height, width), (rows, columns) = vision.image_size, vision.patch_size
        patches = (height // rows) * (width // columns)
        placeholders = int(patches * config.downsample_ratio**2)
        media = {"pixel_values": torch.zeros(1, vision.num_channels, height, width)}
        return [config.image_token_id] * placeholders, media

    def engine_arguments(self, config: InternVLConfig, *, max_images: int, max_videos: int) -> dict[str, Any]:
        """Return vLLM's limits, the class of `engine_model`, and a name for the language model, which vLLM looks up."""
        limits = super().engine_arguments(config, max_images=max_images, max_videos=max_videos)
        language_model = LANGUAGE_MODELS[config.text_config.model_type]
        overrides = {"architectures": [ENGINE_CLASS], "text_config": {"architectures": [language_model]}}
        return {**limits, "hf_overrides": overrides}

    def build_tiny(self, spec: TinyModelSpec, tokenizer_corpus: Iterable[str], folder: str | Path) -> None:
        from lmm_r1.lmm_kits.internvl.tiny_model import build_tiny

        build_tiny(spec, tokenizer_corpus, folder)


def _encoded(
    processor: InternVLProcessor,
    text: str,
    *,
    images: Sequence[Image.Image],
    videos: Sequence[Video],
    opens: bool,
) -> EncodedPrompt:
    def tokenized(expanded: str) -> list[int]:
        special = opens and adds_special_tokens(processor.tokenizer, text=text)
        return processor.tokenizer(expanded, add_special_tokens=special)["input_ids"]

    if not images and not videos:
        return EncodedPrompt.of_text(tokenized(text))
    # One by one: the processor takes videos of one length alone.
    tiles = {
        "image": [_pixels(processor, processor.image_token, images=[image]) for image in images],
        "video": [_pixels(processor, processor.video_token, videos=[channels_first(video)]) for video in videos],
    }
    expanded = _with_marks(
        processor,
        text,
        images=[processor.replace_image_token({"num_patches": [len(one)]}, 0) for one in tiles["image"]],
        videos=[processor.replace_video_token({"pixel_values_videos": [one]}, 0) for one in tiles["video"]],
    )
    left = {kind: iter(of_kind) for kind, of_kind in tiles.items()}
    in_order = [next(left[str(mark.lastgroup)]) for mark in processor.multimodal_pattern.finditer(text)]
    return EncodedPrompt(
        token_ids=tokenized(expanded),
        engine_token_ids=tokenized(_for_the_engine(processor, text)),
        images=list(images),
        media={"pixel_values": torch.cat(in_order)},
        videos=list(videos),
    )


def _pixels(processor: InternVLProcessor, mark: str, **media: Sequence[Any]) -> torch.Tensor:
    """Return an image's or a video's tiles, (N, 3, side, side)."""
    return processor(text=[mark], **media, do_sample_frames=False, return_tensors="pt")["pixel_values"]


def _for_the_engine(processor: InternVLProcessor, text: str) -> str:
    """Return a text with the markers around each image, and around a video's first frame behind its number."""
    start, end = processor.start_image_token, processor.end_image_token
    images, videos = (text.count(token) for token in (processor.image_token, processor.video_token))
    return _with_marks(
        processor,
        text,
        images=[f"{start}{processor.image_token}{end}"] * images,
        videos=[f"Frame1: {start}{processor.video_token}{end}"] * videos,
    )


def _with_marks(processor: InternVLProcessor, text: str, *, images: list[str], videos: list[str]) -> str:
    """Return a text with what is written for each image and each video in the place of its token."""
    [written], _ = processor.get_text_with_replacements([text], images, videos)
    return written


def _media_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[str, str, str, str]:
    return (
        tokenizer.start_image_token,
        tokenizer.end_image_token,
        tokenizer.context_image_token,
        tokenizer.video_token,
    )


KIT = InternVlKit()
