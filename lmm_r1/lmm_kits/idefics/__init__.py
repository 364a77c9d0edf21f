"""The kits of Idefics 3 and of SmolVLM2, whose images are cut into tiles, each with a mark of its place."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from types import MethodType
from typing import Any

import torch
from transformers import (
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3ImageProcessor,
    Idefics3Processor,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
    SmolVLMImageProcessor,
    SmolVLMProcessor,
    SmolVLMVideoProcessor,
)
from transformers.modeling_outputs import BaseModelOutputWithPooling

from lmm_r1.data.messages import Message
from lmm_r1.errors import UserError
from lmm_r1.lmm_kits.assembly import Assembly
from lmm_r1.lmm_kits.encoding import check_tokens, known_ids, part_lists
from lmm_r1.lmm_kits.features import FeaturePoint, exact_patch_positions
from lmm_r1.lmm_kits.kit import LmmKit, Media
from lmm_r1.lmm_kits.tiny_model import TinyModelSpec, TinyTokens, text_settings, tower_settings

IMAGE, AROUND_IMAGE, WHOLE_IMAGE = "<image>", "<fake_token_around_image>", "<global-img>"
END_OF_TURN = "<end_of_utterance>"
# As an image of a single tile is written: text next to its marks has the same tokens as next to any other image's.
SMALLEST_IMAGE = f"{AROUND_IMAGE}{WHOLE_IMAGE}{IMAGE}{AROUND_IMAGE}"
START, PAD, UNKNOWN = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
# The places of tiles that the released tokenizers know.
PLACES = tuple(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7))
# After these, the released tokenizers have further tokens up to the end of a turn, so that 128 follow the language model's.
RESERVED = tuple(f"<|reserved_special_token_{number}|>" for number in range(88))
LLAMA_START = "<|begin_of_text|>"
TINY_TOKENS = TinyTokens(
    special=(UNKNOWN, START, PAD, WHOLE_IMAGE, *PLACES, AROUND_IMAGE, IMAGE, END_OF_TURN),
    end=END_OF_TURN,
    padding=PAD,
    names={
        "image_token": IMAGE,
        "fake_image_token": AROUND_IMAGE,
        "global_image_token": WHOLE_IMAGE,
        "end_of_utterance_token": END_OF_TURN,
    },
    roles={"bos_token": START, "unk_token": UNKNOWN},
    # One start token, no space between "User:" and an image, and nothing at all for a message that is a string.
    chat_template=START + """\
{%- for message in messages -%}
{{- message.role | capitalize + ':' -}}
{%- if message.content[0].type != 'image' -%}{{- ' ' -}}{%- endif -%}
{%- for part in message.content -%}
{%- if part.type == 'text' -%}{{- part.text -}}{%- elif part.type == 'image' -%}{{- '<image>' -}}{%- endif -%}
{%- endfor -%}
{{- '<end_of_utterance>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- 'Assistant:' -}}{%- endif -%}
""",
)
# 6 x 6 patches per tile, of which each 3 x 3 become one token, and two tiles along the longer side of an image. The
# releases have 27 x 27 patches and 3 x 3, or 32 x 32 and 4 x 4, and four tiles.
PATCH_SIZE, TILE, SCALE = 14, 84, 3
LONGEST_SIDE = 2 * TILE
SIZES = {"size": {"longest_edge": LONGEST_SIDE}, "max_image_size": {"longest_edge": TILE}}
"""The settings of the tiny image processor."""
_TILE = re.compile(r"<row_\d+_col_\d+>")


class IdeficsKit(LmmKit):
    """A kit of the family sets its classes and `engine_architecture`.

    An image is a grid of tiles, row by row, and then the whole image as one more tile. Each tile begins with a mark and its
    place, and the mark also ends the last tile; `collapsed` replaces all of this by one placeholder. Pixel bounds change
    nothing: the processor scales the longer side of every image to one length before it cuts it into tiles.
    """

    media_keys = ("pixel_values", "pixel_attention_mask")
    vision_prefixes = ("model.vision_model.",)
    projector_prefixes = ("model.connector.",)
    feature_points = (
        FeaturePoint(
            owner="model",
            method="get_image_features",
            projects=True,
            unread=("pixel_attention_mask",),
            items_in=1,
            reads="pooler_output",
        ),
        FeaturePoint(owner="model.vision_model", reads="last_hidden_state"),
    )
    language_prefixes = ("model.text_model.", "lm_head.")
    turn_end = END_OF_TURN
    tiny_tokens = TINY_TOKENS

    def adapt(self, model: PreTrainedModel) -> PreTrainedModel:
        """Turn the cache off, make patch positions exact in any dtype, and let the tower see every tile."""
        super().adapt(model)
        exact_patch_positions(model.model.vision_model.embeddings)
        model.model.get_image_features = MethodType(_features_of_all_tiles, model.model)
        return model

    def prepare_processor(self, processor: ProcessorMixin, path: str) -> None:
        """Set the end token to the one that ends a turn in the chat template.

        Raises UserError if a token is missing, or images are not scaled to the tower's one size.
        """
        check_tokens(processor.tokenizer, {IMAGE, AROUND_IMAGE, WHOLE_IMAGE}, path=path)
        if not (processor.image_processor.do_resize and processor.image_processor.do_pad):
            raise UserError(
                f"{path}: do_resize or do_pad is false in this checkpoint's image processor, but all tiles must have the "
                "vision tower's one size; set both to true"
            )
        super().prepare_processor(processor, path)

    def apply_template(
        self, processor: ProcessorMixin, messages: Sequence[Message], *, add_generation_prompt: bool
    ) -> str:
        # SmolVLM's processor would pass video settings to the template, and warn each time that they belong elsewhere.
        return processor.tokenizer.apply_chat_template(
            part_lists(messages),
            chat_template=processor.chat_template,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
        )

    def media_marks(self, processor: ProcessorMixin) -> list[str]:
        return self.marks_of(processor.tokenizer)

    def marks_of(self, tokenizer: PreTrainedTokenizerBase) -> list[str]:
        """Return the texts that only media may have; marks of tiles are included if they are tokens."""
        return [IMAGE, AROUND_IMAGE, WHOLE_IMAGE, *sorted(filter(_TILE.fullmatch, tokenizer.get_added_vocab()))]

    def engine_ids(self, processor: ProcessorMixin, text: str, *, opens: bool = True) -> list[int]:
        ids = processor.tokenizer(text.replace(IMAGE, SMALLEST_IMAGE), add_special_tokens=False)["input_ids"]
        return self.collapsed(processor, ids)

    def collapsed(self, processor: ProcessorMixin, token_ids: Sequence[int]) -> list[int]:
        """Return ids with one placeholder for all tiles of an image, the marks of their places and the line breaks."""
        image, around, whole = processor.tokenizer.convert_tokens_to_ids([IMAGE, AROUND_IMAGE, WHOLE_IMAGE])
        ids, inside, closes = [], False, False
        for token in token_ids:
            if not inside:
                ids.append(image if token == around else token)
                inside, closes = token == around, False
            elif token == whole:
                closes = True
            elif token == around and closes:
                inside = False
        return ids

    def media_token_ids(self, config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> set[int]:
        return {config.image_token_id, *known_ids(tokenizer, self.marks_of(tokenizer))}

    def merge_media(self, media: Sequence[Media]) -> Media:
        """Join the tiles of several prompts, (1, tiles, ...) each, along their second dimension, in the order of their tokens."""
        return {key: torch.cat([item[key] for item in media], dim=1) for key in self.media_keys}

    def filler_media(self, config: PretrainedConfig) -> tuple[list[int], Media]:
        """Return a single tile with its placeholders; it is white, because transformers takes a tile of zeros for padding."""
        vision = config.vision_config
        side = vision.image_size
        media = {
            "pixel_values": torch.ones(1, 1, vision.num_channels, side, side),
            "pixel_attention_mask": torch.ones(1, 1, side, side),
        }
        patches = (side // vision.patch_size) ** 2
        return [config.image_token_id] * (patches // config.scale_factor**2), media

    def language_model_of(self, model: PreTrainedModel) -> torch.nn.Module:
        return model.model.text_model

    def tiny_config(self, spec: TinyModelSpec, tokenizer: PreTrainedTokenizerBase) -> PretrainedConfig:
        return self.config_class(
            text_config={**text_settings(spec, tokenizer), "model_type": "llama"},
            vision_config=tower_settings(spec, image_size=TILE, patch_size=PATCH_SIZE),
            scale_factor=SCALE,
            image_token_id=tokenizer.convert_tokens_to_ids(IMAGE),
            pad_token_id=tokenizer.pad_token_id,
            initializer_range=spec.hidden_size**-0.5,
            tie_word_embeddings=spec.tie_embeddings,
        )

    def tiny_parts(self) -> dict[str, object]:
        return {
            "image_processor": Idefics3ImageProcessor(**SIZES),
            "image_seq_len": (TILE // PATCH_SIZE // SCALE) ** 2,
        }


def _features_of_all_tiles(
    model: PreTrainedModel, pixel_values: torch.Tensor, pixel_attention_mask: torch.Tensor | None = None, **_: Any
) -> BaseModelOutputWithPooling:
    """Return the features (tiles, tokens, H) of all tiles (1, tiles, 3, side, side).

    Transformers' own method searches for tiles of zeros, with which it pads batches, and a GPU must wait for that search.
    The kit pads no batches, and all tiles are whole, so that the mask of their pixels hides nothing.
    """
    hidden = model.vision_model(pixel_values=pixel_values.flatten(0, 1).to(model.dtype)).last_hidden_state
    return BaseModelOutputWithPooling(last_hidden_state=hidden, pooler_output=model.connector(hidden))


class Idefics3Kit(IdeficsKit):
    """Idefics 3, which the first SmolVLM also is: text and images. Tiny models begin a text as Idefics3-8B does."""

    model_type = "idefics3"
    tiny_tokens = replace(
        TINY_TOKENS,
        special=tuple(LLAMA_START if token == START else token for token in TINY_TOKENS.special),
        roles={**TINY_TOKENS.roles, "bos_token": LLAMA_START},
        chat_template=TINY_TOKENS.chat_template.replace(START, LLAMA_START),
    )
    checkpoints = "SmolVLM, Idefics3-8B"
    config_class = Idefics3Config
    model_class = Idefics3ForConditionalGeneration
    processor_class = Idefics3Processor
    engine_architecture = "LmmR1Idefics3ForConditionalGeneration"


def smolvlm_parts(*, side: int, tiles: int, tokens: int) -> dict[str, object]:
    sizes = {"size": {"longest_edge": tiles * side}, "max_image_size": {"longest_edge": side}}
    return {
        "image_processor": SmolVLMImageProcessor(**sizes),
        "video_processor": SmolVLMVideoProcessor(**sizes),
        "image_seq_len": tokens,
    }


class SmolVlmKit(IdeficsKit):
    """SmolVLM2, with text and images."""

    model_type = "smolvlm"
    checkpoints = "SmolVLM2"
    config_class = SmolVLMConfig
    model_class = SmolVLMForConditionalGeneration
    processor_class = SmolVLMProcessor
    engine_architecture = "LmmR1SmolVLMForConditionalGeneration"
    assembly = Assembly(
        language_models=("llama",),
        tokens=(WHOLE_IMAGE, *PLACES, AROUND_IMAGE, IMAGE, *RESERVED, END_OF_TURN),
        marks={"image": IMAGE},
        scales=(4, 3, 2),
        settings=lambda *, scale, tokens: {"scale_factor": scale},
        parts=smolvlm_parts,
    )

    def marks_of(self, tokenizer: PreTrainedTokenizerBase) -> list[str]:
        # The template would write it for a video.
        return [*super().marks_of(tokenizer), "<video>"]

    def tiny_parts(self) -> dict[str, object]:
        return smolvlm_parts(side=TILE, tiles=LONGEST_SIDE // TILE, tokens=(TILE // PATCH_SIZE // SCALE) ** 2)
