"""The kit of Janus in transformers' format: it trains what reads images and leaves what draws them as it is."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from PIL import Image
from transformers import JanusConfig, JanusForConditionalGeneration, JanusProcessor, PreTrainedTokenizerBase

from lmm_r1.data.messages import Message, images_of
from lmm_r1.data.videos import Video
from lmm_r1.lmm_kits.encoding import adds_special_tokens, any_of, check_placeholders, check_typed_media, part_lists
from lmm_r1.lmm_kits.features import FeaturePoint, last_hidden, of_last_hidden
from lmm_r1.lmm_kits.kit import EncodedPrompt, LmmKit, Media, TinyModelSpec


class JanusKit(LmmKit):
    """Images are squares of one size, with a fixed number of placeholders."""

    model_type = "janus"
    checkpoints = "Janus, Janus-Pro"
    config_class = JanusConfig
    model_class = JanusForConditionalGeneration
    processor_class = JanusProcessor
    engine_refusal = (
        "vLLM has no model class for it, and its Transformers backend takes only models whose attention it can replace"
    )
    vision_prefixes = ("model.vision_model.",)
    projector_prefixes = ("model.aligner.",)
    # The aligner, which is small, makes twice as many numbers of them.
    feature_points = (FeaturePoint(owner="model.vision_model", take=last_hidden, give=of_last_hidden),)
    untrained_prefixes = (
        "model.vqmodel.",
        "model.generation_embeddings.",
        "model.generation_aligner.",
        "model.generation_head.",
    )

    def encode_messages(
        self,
        processor: JanusProcessor,
        messages: Sequence[Message],
        *,
        images: Sequence[Image.Image],
        add_generation_prompt: bool,
        videos: Sequence[Video] = (),
    ) -> EncodedPrompt:
        """Encode a conversation with its images; raises UserError when it holds what the processor cannot take.

        Pixel bounds of an image change nothing: the processor scales and pads every image to one square.
        """
        if not images:
            return EncodedPrompt.of_text(
                self.render_messages(processor, messages, add_generation_prompt=add_generation_prompt)
            )
        text = self.chat_text(processor, messages, add_generation_prompt=add_generation_prompt)
        batch = _call(processor, text, images=list(images))
        return EncodedPrompt.of_batch(
            batch, images=images, media_keys=("pixel_values",), placeholders=self.placeholder_ids(processor)
        )

    def render_messages(
        self,
        processor: JanusProcessor,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        videos: Sequence[Video] = (),
    ) -> list[int]:
        text = self.chat_text(processor, messages, add_generation_prompt=add_generation_prompt)
        image = f"{processor.image_start_token}{processor.image_token}{processor.image_end_token}"
        return _call(processor, text.replace(processor.image_token, image))["input_ids"][0].tolist()

    def chat_text(self, processor: JanusProcessor, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        return _render_text(processor, messages, add_generation_prompt=add_generation_prompt)

    def placeholder_ids(self, processor: JanusProcessor) -> frozenset[int]:
        return frozenset({processor.tokenizer.convert_tokens_to_ids(processor.image_token)})

    def media_texts(self, processor: JanusProcessor) -> re.Pattern[str]:
        return any_of(_media_tokens(processor.tokenizer))

    def media_token_ids(self, config: JanusConfig, tokenizer: PreTrainedTokenizerBase) -> set[int]:
        return {config.image_token_id, *tokenizer.convert_tokens_to_ids(_media_tokens(tokenizer))}

    def filler_media(self, config: JanusConfig) -> tuple[list[int], Media]:
        """Return a black image, all of which are of one size, with its placeholders."""
        vision = config.vision_config
        patches = (vision.image_size // vision.patch_size) ** 2
        media = {"pixel_values": torch.zeros(1, vision.num_channels, vision.image_size, vision.image_size)}
        return [config.image_token_id] * patches, media

    def build_tiny(self, spec: TinyModelSpec, tokenizer_corpus: Iterable[str], folder: str | Path) -> None:
        from lmm_r1.lmm_kits.janus.tiny_model import build_tiny

        build_tiny(spec, tokenizer_corpus, folder)


def _call(processor: JanusProcessor, text: str, **images: list[Image.Image]) -> Mapping[str, torch.Tensor]:
    # The processor puts the default system prompt before the text, and the tokenizer the start token before both.
    special = adds_special_tokens(processor.tokenizer, text=text)
    return processor(text=[text], add_special_tokens=special, return_tensors="pt", **images)


def _render_text(processor: JanusProcessor, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
    check_typed_media(messages, media_tokens=_media_tokens(processor.tokenizer))
    text = processor.apply_chat_template(
        part_lists(messages), tokenize=False, add_generation_prompt=add_generation_prompt
    )
    check_placeholders(text.count(processor.image_token), given=len(images_of(messages)), kind="images")
    end = processor.tokenizer.eos_token
    # The template leaves the last turn open. A finished answer ends as it does where more messages follow.
    if not add_generation_prompt and messages[-1].role == "assistant" and not text.endswith(end):
        text += end
    return text


def _media_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[str, str, str]:
    return tokenizer.image_token, tokenizer.boi_token, tokenizer.eoi_token


KIT = JanusKit()
