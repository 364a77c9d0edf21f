"""The kit of Janus in transformers' format: it trains the side that reads images; the side that draws stays as it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import (
    JanusConfig,
    JanusForConditionalGeneration,
    JanusImageProcessor,
    JanusProcessor,
    PreTrainedTokenizerBase,
)

from lmm_r1.data.messages import Message
from lmm_r1.lmm_kits.encoding import part_lists
from lmm_r1.lmm_kits.features import FeaturePoint
from lmm_r1.lmm_kits.kit import LmmKit, Media
from lmm_r1.lmm_kits.tiny_model import VISION_LAYERS, TinyModelSpec, TinyTokens, heads_of, text_settings

BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
IMAGE, IMAGE_START, IMAGE_END = "<image_placeholder>", "<begin_of_image>", "<end_of_image>"
TINY_TOKENS = TinyTokens(
    special=(BOS, EOS, PAD, IMAGE, IMAGE_START, IMAGE_END, "<|User|>", "<|Assistant|>"),
    end=EOS,
    padding=PAD,
    first=BOS,
    names={"image_token": IMAGE, "boi_token": IMAGE_START, "eoi_token": IMAGE_END},
    roles={"bos_token": BOS},
    # The role and a colon before each message; after it two newlines for a user's and the end token for any other, but
    # nothing after the last one; an image on a line of its own; texts stripped.
    chat_template="""\
{%- macro write(message) -%}
{%- for part in message.content -%}
{%- if part.type == 'image' -%}
{{- '' if loop.first else '\\n' -}}<image_placeholder>{{- '' if loop.last else '\\n' -}}
{%- elif part.type == 'text' -%}
{%- set text = part.text.lstrip() if loop.first else part.text -%}
{%- set text = text.rstrip() if loop.last else text -%}
{{- ' ' if not loop.first and loop.previtem.type == 'text' -}}{{- text -}}
{%- endif -%}
{%- endfor -%}
{%- endmacro -%}
{%- for message in messages -%}
{%- set role = message.role|lower -%}
{{- {'user': '<|User|>', 'assistant': '<|Assistant|>'}.get(role, message.role|capitalize) + ': ' -}}
{{- write(message) -}}
{%- if add_generation_prompt or not loop.last -%}
{{- '\\n\\n' if role == 'user' else '"""
    + EOS
    + """' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|Assistant|>:' -}}{%- endif -%}
""",
)
# The released models cut 384 x 384 pixels into 24 x 24 patches of 16: 576 placeholders. Here there are 6 x 6.
IMAGE_SIZE, PATCH_SIZE = 96, 16
IMAGE_TOKENS = (IMAGE_SIZE // PATCH_SIZE) ** 2


class JanusKit(LmmKit):
    """Images are squares of one size, with a fixed number of placeholders; pixel bounds change nothing."""

    model_type = "janus"
    checkpoints = "Janus, Janus-Pro"
    config_class = JanusConfig
    model_class = JanusForConditionalGeneration
    processor_class = JanusProcessor
    media_tokens = (IMAGE, IMAGE_START, IMAGE_END)
    tokenizer_adds_start = True
    template_leaves_turn_open = True
    engine_refusal = (
        "vLLM has no model class for it, and its Transformers backend takes only models whose attention it can replace"
    )
    vision_prefixes = ("model.vision_model.",)
    projector_prefixes = ("model.aligner.",)
    # Features before the aligner, which is small: after it they are twice as large.
    feature_points = (FeaturePoint(owner="model.vision_model", reads="last_hidden_state"),)
    untrained_prefixes = (
        "model.vqmodel.",
        "model.generation_embeddings.",
        "model.generation_aligner.",
        "model.generation_head.",
    )
    tiny_tokens = TINY_TOKENS

    def template_turns(self, messages: Sequence[Message]) -> Sequence[Mapping[str, Any]]:
        return part_lists(messages)

    def engine_ids(self, processor: JanusProcessor, text: str, *, opens: bool = True) -> list[int]:
        # The processor puts the default system prompt before the text, and the tokenizer the start token before both.
        special = self.adds_start(processor, text, opens=opens)
        image = f"{processor.image_start_token}{processor.image_token}{processor.image_end_token}"
        marked = text.replace(processor.image_token, image)
        return processor(text=[marked], add_special_tokens=special, return_tensors="pt")["input_ids"][0].tolist()

    def placeholder_ids(self, processor: JanusProcessor) -> frozenset[int]:
        return frozenset({processor.tokenizer.convert_tokens_to_ids(processor.image_token)})

    def filler_media(self, config: JanusConfig) -> tuple[list[int], Media]:
        """Return a black image with its placeholders; all images have one size."""
        vision = config.vision_config
        patches = (vision.image_size // vision.patch_size) ** 2
        media = {"pixel_values": torch.zeros(1, vision.num_channels, vision.image_size, vision.image_size)}
        return [config.image_token_id] * patches, media

    def tiny_config(self, spec: TinyModelSpec, tokenizer: PreTrainedTokenizerBase) -> JanusConfig:
        return JanusConfig(
            text_config={**text_settings(spec, tokenizer), "model_type": "llama"},
            vision_config={
                "hidden_size": spec.hidden_size,
                "num_hidden_layers": VISION_LAYERS,
                "num_attention_heads": heads_of(spec),
                "image_size": IMAGE_SIZE,
                "patch_size": PATCH_SIZE,
                "projection_dim": spec.hidden_size,
                "num_image_tokens": IMAGE_TOKENS,
                "initializer_range": spec.hidden_size**-0.5,
            },
            # The side that draws images never runs here; it is as small as its group norms of 32 groups allow.
            vq_config={
                "num_embeddings": 64,
                "latent_channels": 32,
                "base_channels": 32,
                "channel_multiplier": [1, 1],
                "num_res_blocks": 1,
                "projection_dim": spec.hidden_size,
                "image_token_embed_dim": spec.hidden_size,
            },
            image_token_id=tokenizer.image_token_id,
            initializer_range=spec.hidden_size**-0.5,
            tie_word_embeddings=spec.tie_embeddings,
        )

    def tiny_parts(self) -> dict[str, object]:
        return {
            "image_processor": JanusImageProcessor(size={"height": IMAGE_SIZE, "width": IMAGE_SIZE}),
            "use_default_system_prompt": True,
            "num_image_tokens": IMAGE_TOKENS,
        }
