"""The kit of LLaVA-OneVision: the whole image as one crop, and a grid of crops whose padding is cut off after the tower."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
from transformers import (
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    LlavaOnevisionImageProcessor,
    LlavaOnevisionProcessor,
    LlavaOnevisionVideoProcessor,
    PreTrainedTokenizerBase,
)

from lmm_r1.data.messages import Message
from lmm_r1.errors import UserError
from lmm_r1.lmm_kits.encoding import part_lists
from lmm_r1.lmm_kits.features import FeaturePoint
from lmm_r1.lmm_kits.kit import LmmKit, Media
from lmm_r1.lmm_kits.tiny_model import TinyModelSpec, TinyTokens, text_settings, tower_settings

TINY_TOKENS = TinyTokens(
    special=("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<image>", "<video>"),
    # A space after the role except in the generation prompt, images before the words of a message, each text on a line of
    # its own, and nothing between two turns.
    chat_template="""\
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + ' ' -}}
{%- for part in message['content'] | selectattr('type', 'equalto', 'image') -%}{{- '<image>' -}}{%- endfor -%}
{%- for part in message['content'] | selectattr('type', 'equalto', 'video') -%}{{- '<video>' -}}{%- endfor -%}
{%- for part in message['content'] | selectattr('type', 'equalto', 'text') -%}{{- '\\n' + part['text'] -}}{%- endfor -%}
{{- '<|im_end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
""",
)
# 4 x 4 patches per crop, and up to 4 x 4 crops, of which more than nine are scaled down; 27 x 27 and 6 x 6 in the releases.
CROP, PATCH_SIZE, CROPS = 56, 14, 4
GRIDS = [[rows * CROP, columns * CROP] for rows in range(1, CROPS + 1) for columns in range(1, CROPS + 1)]
# The most crops per image that vLLM expects; the features of more crops are scaled down to this many.
ASPECT_RATIO = "anyres_max_9"
# The released chat template writes a space after the role, except after the role of its generation prompt.
_ROLE = "message['role'] + ' '"
_OPENED_ROLE = "message['role'] + ('' if message['role'] == 'assistant' else ' ')"


class LlavaOnevisionKit(LmmKit):
    """Text and images.

    Every image is cut into crops, as in vLLM, so that its tokens do not depend on later images. Transformers' chats cut an
    image only if it is the single one of a conversation.
    """

    model_type = "llava_onevision"
    checkpoints = "LLaVA-OneVision (llava-hf)"
    config_class = LlavaOnevisionConfig
    model_class = LlavaOnevisionForConditionalGeneration
    processor_class = LlavaOnevisionProcessor
    media_tokens = ("<image>", "<video>")
    vision_features = (-1, "full")
    media_keys = ("pixel_values", "image_sizes", "batch_num_images")
    padded_media = {"pixel_values": 0}
    vision_prefixes = ("model.vision_tower.embeddings.", "model.vision_tower.encoder.")
    projector_prefixes = ("model.multi_modal_projector.", "model.image_newline")
    # Features before the projector, which is small: after it they are three times as large in the 7B model.
    feature_points = (FeaturePoint(owner="model.vision_tower", reads="hidden_states"),)
    # The projector reads the last layer's output, before these.
    untrained_prefixes = ("model.vision_tower.post_layernorm.", "model.vision_tower.head.")
    tiny_tokens = TINY_TOKENS
    tiny_tower_as_released = True

    def prepare_processor(self, processor: LlavaOnevisionProcessor, path: str) -> None:
        """Change the chat template so that a model's turn begins as one to generate.

        Raises UserError if images may take more features than vLLM expects.
        """
        if processor.vision_aspect_ratio != ASPECT_RATIO:
            raise UserError(
                f"{path}: vision_aspect_ratio is {processor.vision_aspect_ratio} in this checkpoint's processor, but vLLM "
                f"counts the tokens of an image as for {ASPECT_RATIO}, which the releases have; set it so, there and in "
                "config.json"
            )
        if isinstance(processor.chat_template, str):
            processor.chat_template = processor.chat_template.replace(_ROLE, _OPENED_ROLE)

    def template_turns(self, messages: Sequence[Message]) -> Sequence[Mapping[str, Any]]:
        # The template writes the images of a message before its words.
        return part_lists(messages)

    def collapsed(self, processor: LlavaOnevisionProcessor, token_ids: Sequence[int]) -> list[int]:
        """Return ids with one placeholder per image; several adjacent expanded ones become one.

        A run that is shorter than any image consists of placeholders that were not expanded, one for each.
        """
        ids: list[int] = []
        for token, run in groupby(token_ids):
            length = len(list(run))
            expanded = token == processor.image_token_id and length >= processor.num_image_tokens
            ids += [token] * (1 if expanded else length)
        return ids

    def pixel_limits(self, processor: LlavaOnevisionProcessor) -> tuple[int, int]:
        """Return 1 and the pixels of the processor's largest grid of crops."""
        return 1, max(height * width for height, width in processor.image_processor.image_grid_pinpoints)

    def tokens_of_size(self, processor: LlavaOnevisionProcessor, width: int, height: int) -> int:
        return processor._get_num_multimodal_tokens(image_sizes=[(height, width)])["num_image_tokens"][0]

    def filler_media(self, config: LlavaOnevisionConfig) -> tuple[list[int], Media]:
        """Return the smallest image that is cut: the whole image and one crop of all of it, with the ends of its rows."""
        vision = config.vision_config
        side, rows = vision.image_size, vision.image_size // vision.patch_size
        smallest = min(config.image_grid_pinpoints, key=lambda size: size[0] * size[1])
        assert list(smallest) == [side, side], "the smallest grid is one crop"
        media = {
            "pixel_values": torch.zeros(1, 2, vision.num_channels, side, side),
            "image_sizes": torch.tensor([[side, side]]),
            "batch_num_images": torch.tensor([1]),
        }
        return [config.image_token_id] * (2 * rows * rows + rows), media

    def tiny_config(self, spec: TinyModelSpec, tokenizer: PreTrainedTokenizerBase) -> LlavaOnevisionConfig:
        image, video = tokenizer.convert_tokens_to_ids(["<image>", "<video>"])
        return LlavaOnevisionConfig(
            text_config={
                **text_settings(spec, tokenizer),
                "model_type": "qwen2",
                "architectures": ["Qwen2ForCausalLM"],
            },
            vision_config={
                **tower_settings(spec, image_size=CROP, patch_size=PATCH_SIZE),
                "model_type": "siglip_vision_model",
                "vision_use_head": False,
            },
            image_grid_pinpoints=GRIDS,
            image_token_index=image,
            video_token_index=video,
            initializer_range=spec.hidden_size**-0.5,
            tie_word_embeddings=spec.tie_embeddings,
        )

    def tiny_parts(self) -> dict[str, object]:
        settings: dict[str, object] = {
            "size": {"height": CROP, "width": CROP},
            "image_mean": [0.5] * 3,
            "image_std": [0.5] * 3,
        }
        return {
            "image_processor": LlavaOnevisionImageProcessor(image_grid_pinpoints=GRIDS, **settings),
            "video_processor": LlavaOnevisionVideoProcessor(**settings),
            "num_image_tokens": (CROP // PATCH_SIZE) ** 2,
            "vision_feature_select_strategy": "full",
        }
