"""The kit of Gemma 3 with images: square images of one size, whose tokens attend to each other in both directions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3ImageProcessor,
    Gemma3Processor,
    GemmaTokenizer,
    PreTrainedTokenizerBase,
)

from lmm_r1.data.messages import Message
from lmm_r1.errors import UserError
from lmm_r1.lmm_kits.encoding import joined_texts
from lmm_r1.lmm_kits.features import FeaturePoint
from lmm_r1.lmm_kits.kit import LmmKit, Media
from lmm_r1.lmm_kits.tiny_model import (
    HEAD_DIM,
    TinyModelSpec,
    TinyTokens,
    show_places,
    text_settings,
    tower_settings,
    train_fallback_tokenizer,
)

END_OF_TURN = "<end_of_turn>"
TINY_TOKENS = TinyTokens(
    special=("<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<start_of_turn>", END_OF_TURN),
    # After all other tokens.
    names={"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"},
    generation_ends=("<eos>", END_OF_TURN),
    # A system turn opens the first user turn, texts lose white space at both ends, and images are in place, without the
    # blank lines that the processor puts around them.
    chat_template="""\
{%- set opening = '' -%}
{%- set turns = messages -%}
{%- if messages[0].role == 'system' -%}
{%- set first = messages[0].content -%}
{%- set opening = (first if first is string else first[0].text) + '\\n\\n' -%}
{%- set turns = messages[1:] -%}
{%- endif -%}
{{- bos_token -}}
{%- for turn in turns -%}
{%- if (turn.role == 'user') == (loop.index0 % 2 == 1) -%}
{{- raise_exception('user and assistant do not alternate') -}}
{%- endif -%}
{{- '<start_of_turn>' + ('model' if turn.role == 'assistant' else turn.role) + '\\n' -}}
{%- if loop.first -%}{{- opening -}}{%- endif -%}
{%- if turn.content is string -%}
{{- turn.content | trim -}}
{%- else -%}
{%- for part in turn.content -%}
{%- if part.type == 'image' -%}
{{- '<start_of_image>' -}}
{%- elif part.type == 'text' -%}
{{- part.text | trim -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<end_of_turn>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<start_of_turn>model\\n' -}}{%- endif -%}
""",
)
# Runs of line breaks are tokens of their own, so that they never merge with other text.
ORDINARY_TOKENS = 256
VOCAB_MULTIPLE = 64  # The released vocabulary is padded, too.
# 8 x 8 patches, of which each 2 x 2 become one token; 64 x 64 and 4 x 4 in the releases.
IMAGE_SIZE, PATCH_SIZE, TOKENS_PER_IMAGE = 112, 14, 16
# Shorter than long prompts, so that it has an effect, and longer than an image, because vLLM's GPU backends treat images
# that are longer than the window differently.
SLIDING_WINDOW = 64


class Gemma3Kit(LmmKit):
    """Text and images; vLLM runs it with a class of its own (`engine_model`).

    Pixel bounds of an image change nothing: the processor scales every image, whatever its shape, to one square size,
    which always becomes the same number of tokens (256 in the releases).
    """

    model_type = "gemma3"
    checkpoints = "Gemma 3 (4B, 12B, 27B)"
    config_class = Gemma3Config
    model_class = Gemma3ForConditionalGeneration
    processor_class = Gemma3Processor
    media_tokens = ("<start_of_image>", "<end_of_image>", "<image_soft_token>")
    tokenizer_adds_start = True
    # A name of its own: a server in the same environment that takes chats keeps vLLM's class.
    engine_architecture = "LmmR1Gemma3ForConditionalGeneration"
    engine_disagreement = (
        "vLLM's CPU backend lets a token of an image attend only to those before it, where the model lets all tokens of "
        "one image attend to each other"
    )
    vision_prefixes = ("model.vision_tower.",)
    projector_prefixes = ("model.multi_modal_projector.",)
    feature_points = (
        FeaturePoint(owner="model", method="get_image_features", projects=True, reads="pooler_output"),
        FeaturePoint(owner="model.vision_tower", reads="last_hidden_state"),
    )
    flash_refusal = "its attention within images would be causal, because it takes no mask"
    turn_end = END_OF_TURN
    # Without these token types the model attends causally within images, without a warning.
    image_types_input = "token_type_ids"
    # The releases have no pooling head; one in a checkpoint would be computed, but nothing reads its output.
    untrained_prefixes = ("model.vision_tower.head.",)
    tiny_tokens = TINY_TOKENS
    tiny_tower_as_released = True

    def prepare_processor(self, processor: Gemma3Processor, path: str) -> None:
        """Set the end token; raises UserError if the checkpoint wants images cut into crops."""
        super().prepare_processor(processor, path)
        if processor.image_processor.do_pan_and_scan:
            raise UserError(
                f"{path}: do_pan_and_scan is true in this checkpoint's image processor, but crops of images are "
                "supported neither in training (transformers' processor does not follow the setting) nor in rollouts; "
                "set it to false"
            )

    def template_turns(self, messages: Sequence[Message]) -> Sequence[Mapping[str, Any]]:
        # The released template writes the first text part of a system turn and drops the others.
        return joined_texts(messages, separator="\n", role="system")

    def image_token(self, processor: Gemma3Processor) -> str:
        return processor.boi_token

    def engine_ids(self, processor: Gemma3Processor, text: str, *, opens: bool = True) -> list[int]:
        # The blank lines that the processor puts around an image merge with line breaks of the text next to it.
        token = processor.tokenizer.image_token
        image = processor.full_image_sequence.replace(token * processor.image_seq_length, token)
        return self.text_ids(processor, text.replace(processor.boi_token, image), opens=opens)

    def placeholder_ids(self, processor: Gemma3Processor) -> frozenset[int]:
        # (processor.image_token_id is that of <start_of_image>)
        return frozenset({processor.tokenizer.image_token_id})

    def bidirectional_token_ids(self, config: Gemma3Config) -> frozenset[int]:
        """Return the placeholder: the tokens of an image see each other, within the window of sliding layers."""
        return frozenset({config.image_token_index})

    def filler_media(self, config: Gemma3Config) -> tuple[list[int], Media]:
        """Return a black image between its markers; all images have one size."""
        vision = config.vision_config
        ids = [
            config.boi_token_index,
            *[config.image_token_index] * config.mm_tokens_per_image,
            config.eoi_token_index,
        ]
        return ids, {"pixel_values": torch.zeros(1, vision.num_channels, vision.image_size, vision.image_size)}

    def tiny_tokenizer(self, spec: TinyModelSpec, corpus: Iterable[str], folder: str | Path) -> GemmaTokenizer:
        """Return a tokenizer of the released class, which names `<eos>` as its end token, as the released ones do."""
        size = spec.tokens or ORDINARY_TOKENS
        return train_fallback_tokenizer(GemmaTokenizer, TINY_TOKENS, corpus, vocab_size=size)

    def tiny_config(self, spec: TinyModelSpec, tokenizer: PreTrainedTokenizerBase) -> Gemma3Config:
        tower = tower_settings(spec, image_size=IMAGE_SIZE, patch_size=PATCH_SIZE)
        del tower["initializer_range"]
        return Gemma3Config(
            text_config={
                **text_settings(spec, tokenizer),
                "vocab_size": -(-len(tokenizer) // VOCAB_MULTIPLE) * VOCAB_MULTIPLE,
                "head_dim": HEAD_DIM,
                "query_pre_attn_scalar": HEAD_DIM,
                "sliding_window": SLIDING_WINDOW,
                # The last layer sees everything, and every second one before it; one in six in the releases.
                "layer_types": [
                    "full_attention" if layer % 2 else "sliding_attention" for layer in range(spec.layers, 0, -1)
                ],
                "rope_parameters": {
                    # With the releases' factor of 8 and base of 1,000,000, a head as narrow as this one would have no
                    # rotation that distinguishes the tokens of an image.
                    "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 20_000.0},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
                },
            },
            vision_config={**tower, "vision_use_head": False},
            mm_tokens_per_image=TOKENS_PER_IMAGE,
            boi_token_index=tokenizer.boi_token_id,
            eoi_token_index=tokenizer.eoi_token_id,
            image_token_index=tokenizer.image_token_id,
            initializer_range=spec.hidden_size**-0.5,
            tie_word_embeddings=spec.tie_embeddings,
        )

    def tune_tiny(self, model: Gemma3ForConditionalGeneration, spec: TinyModelSpec) -> None:
        # A fresh projector is zero, so images would have no effect.
        torch.nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight, std=spec.hidden_size**-0.5)
        show_places(model.model.vision_tower.embeddings.position_embedding.weight)
        model.generation_config.bos_token_id = model.config.text_config.bos_token_id

    def tiny_parts(self) -> dict[str, object]:
        image_processor = Gemma3ImageProcessor(
            size={"height": IMAGE_SIZE, "width": IMAGE_SIZE}, image_mean=[0.5] * 3, image_std=[0.5] * 3
        )
        return {"image_processor": image_processor, "image_seq_length": TOKENS_PER_IMAGE}
