"""The kit of Aria: square images of one size with a mask over their padding."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import AriaConfig, AriaForConditionalGeneration, AriaProcessor, PreTrainedTokenizerBase

from lmm_r1.data.messages import Message, images_of
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
from lmm_r1.lmm_kits.features import FeaturePoint, exact_patch_positions, last_layer, of_last_layer, of_pooled, pooled
from lmm_r1.lmm_kits.kit import EncodedPrompt, LmmKit, Media, TinyModelSpec

# The chat template writes an image between two tokens that text models use for infilling.
MEDIA_TOKENS = ("<|img|>", "<fim_prefix>", "<fim_suffix>")
MEDIA_KEYS = ("pixel_values", "pixel_mask")


class AriaKit(LmmKit):
    """Text and images; in transformers its experts are computed one after the other."""

    model_type = "aria"
    checkpoints = "Aria"
    config_class = AriaConfig
    model_class = AriaForConditionalGeneration
    processor_class = AriaProcessor
    vision_prefixes = ("model.vision_tower.embeddings.", "model.vision_tower.encoder.")
    projector_prefixes = ("model.multi_modal_projector.",)
    feature_points = (
        FeaturePoint(
            owner="model",
            method="get_image_features",
            projects=True,
            beside=("pixel_mask",),
            take=pooled,
            give=of_pooled,
        ),
        FeaturePoint(
            owner="model.vision_tower", beside=("patch_attention_mask",), take=last_layer, give=of_last_layer
        ),
    )
    # The projector reads the last layer's output, which this norm comes after.
    untrained_prefixes = ("model.vision_tower.post_layernorm.",)
    zero3_leaf_classes = ("AriaTextMoELayer",)

    def load_model(
        self, path: str, *, dtype: torch.dtype, attn_implementation: str, trust_remote_code: bool, **kwargs: Any
    ) -> AriaForConditionalGeneration:
        """Load the model with its generation cache off and the patch positions of its vision tower exact in any dtype.

        Raises UserError for a way to compute the experts that transformers does not have for this architecture.
        """
        experts = kwargs.pop("experts_implementation", None)
        if experts not in (None, "eager"):
            raise UserError(
                f"--ds.experts_implementation {experts}: transformers computes this architecture's experts one after the "
                "other only; leave the flag out"
            )
        return super().load_model(
            path, dtype=dtype, attn_implementation=attn_implementation, trust_remote_code=trust_remote_code, **kwargs
        )

    def adapt(self, model: AriaForConditionalGeneration) -> AriaForConditionalGeneration:
        """Turn the cache off, and make the patch positions of the vision tower exact in any dtype."""
        super().adapt(model)
        exact_patch_positions(model.model.vision_tower.embeddings)
        return model

    def encode_messages(
        self,
        processor: AriaProcessor,
        messages: Sequence[Message],
        *,
        images: Sequence[Image.Image],
        add_generation_prompt: bool,
        videos: Sequence[Video] = (),
    ) -> EncodedPrompt:
        """Encode a conversation with its images; raises UserError when it holds what the processor cannot take.

        Pixel bounds of an image change nothing: the processor scales the longer side of every image to 980 pixels and
        pads it to a square, and neither it nor vLLM cuts large images into crops, whatever the checkpoint's
        `split_image` says.
        """
        text = self.chat_text(processor, messages, add_generation_prompt=add_generation_prompt)
        return self._encoded(processor, text, images=images, opens=True)

    def encode_text(
        self, processor: AriaProcessor, text: str, *, images: Sequence[Image.Image], opens: bool
    ) -> EncodedPrompt:
        image, before, behind = MEDIA_TOKENS
        check_image_marks(text, mark=f"{before}{image}{behind}", media_tokens=MEDIA_TOKENS, given=len(images))
        return self._encoded(processor, text, images=images, opens=opens)

    def _encoded(
        self, processor: AriaProcessor, text: str, *, images: Sequence[Image.Image], opens: bool
    ) -> EncodedPrompt:
        special = opens and adds_special_tokens(processor.tokenizer, text=text)
        if not images:
            return EncodedPrompt.of_text(processor.tokenizer(text, add_special_tokens=special)["input_ids"])
        batch = processor(text=[text], images=list(images), add_special_tokens=special, return_tensors="pt")
        return EncodedPrompt.of_batch(
            batch, images=images, media_keys=MEDIA_KEYS, placeholders=self.placeholder_ids(processor)
        )

    def chat_text(self, processor: AriaProcessor, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        return _render_text(processor, messages, add_generation_prompt=add_generation_prompt)

    def render_messages(
        self,
        processor: AriaProcessor,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        videos: Sequence[Video] = (),
    ) -> list[int]:
        text = self.chat_text(processor, messages, add_generation_prompt=add_generation_prompt)
        return chat_ids(processor.tokenizer, text)

    def media_texts(self, processor: AriaProcessor) -> re.Pattern[str]:
        return any_of(MEDIA_TOKENS)

    def media_token_ids(self, config: AriaConfig, tokenizer: PreTrainedTokenizerBase) -> set[int]:
        media = [tokenizer.convert_tokens_to_ids(token) for token in MEDIA_TOKENS]
        known = [token for token in media if token is not None and token != tokenizer.unk_token_id]
        return {config.image_token_id, *known}

    def filler_media(self, config: AriaConfig) -> tuple[list[int], Media]:
        """Return the smaller of the two legal images, in black, with its placeholders."""
        patches = min(config.projector_patch_to_query_dict)
        side = math.isqrt(patches) * config.vision_config.patch_size
        media = {
            "pixel_values": torch.zeros(1, config.vision_config.num_channels, side, side),
            "pixel_mask": torch.ones(1, side, side, dtype=torch.bool),
        }
        return [config.image_token_id] * config.projector_patch_to_query_dict[patches], media

    def build_tiny(self, spec: TinyModelSpec, tokenizer_corpus: Iterable[str], folder: str | Path) -> None:
        from lmm_r1.lmm_kits.aria.tiny_model import build_tiny

        build_tiny(spec, tokenizer_corpus, folder)


def _render_text(processor: AriaProcessor, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
    check_typed_media(messages, media_tokens=MEDIA_TOKENS)
    text = processor.apply_chat_template(
        chat_of(messages), tokenize=False, add_generation_prompt=add_generation_prompt
    )
    check_placeholders(text.count(processor.image_token), given=len(images_of(messages)), kind="images")
    return text


KIT = AriaKit()
