"""The kit of Gemma 4 with text and images: the aspect ratio of an image is kept, its number of tokens is bounded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    Gemma4AudioFeatureExtractor,
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    Gemma4ImageProcessor,
    Gemma4Processor,
    Gemma4VideoProcessor,
    GemmaTokenizer,
    PreTrainedTokenizerBase,
)
from transformers.models.gemma4.image_processing_gemma4 import get_aspect_ratio_preserving_size

from lmm_r1.data.messages import Message
from lmm_r1.lmm_kits.encoding import joined_texts
from lmm_r1.lmm_kits.features import FeaturePoint, Item
from lmm_r1.lmm_kits.kit import LmmKit, Media, Processor
from lmm_r1.lmm_kits.tiny_model import (
    HEAD_DIM,
    VISION_LAYERS,
    TinyModelSpec,
    TinyTokens,
    heads_of,
    show_places,
    text_settings,
    train_fallback_tokenizer,
)

END_OF_TURN = "<turn|>"
TINY_TOKENS = TinyTokens(
    special=(
        *("<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>"),
        *("<|tool_response>", "<tool_response|>", '<|"|>', "<|think|>", "<|channel>", "<channel|>", "<|turn>"),
        END_OF_TURN,
    ),
    # After all other tokens.
    names={
        "boi_token": "<|image>",
        "eoi_token": "<image|>",
        "image_token": "<|image|>",
        "boa_token": "<|audio>",
        "eoa_token": "<audio|>",
        "audio_token": "<|audio|>",
    },
    # The model stops after a tool call, too: the environment writes what follows the last of these.
    generation_ends=("<eos>", END_OF_TURN, "<|tool_response>"),
    # Texts lose white space at both ends, answers lose their thoughts, and successive answers are one turn.
    chat_template="""\
{%- macro visible(text) -%}
{%- set kept = namespace(text='') -%}
{%- for piece in text.split('<channel|>') -%}
{%- set kept.text = kept.text + piece.split('<|channel>')[0] -%}
{%- endfor -%}
{{- kept.text | trim -}}
{%- endmacro -%}
{{- bos_token -}}
{%- for turn in messages -%}
{%- set role = 'model' if turn.role == 'assistant' else turn.role -%}
{%- if not (role == 'model' and not loop.first and messages[loop.index0 - 1].role == 'assistant') -%}
{{- '<|turn>' + role + '\\n' -}}
{%- endif -%}
{%- set parts = [{'type': 'text', 'text': turn.content}] if turn.content is string else turn.content -%}
{%- for part in parts -%}
{%- if part.type == 'image' -%}
{{- '<|image|>' -}}
{%- elif part.type == 'text' -%}
{{- visible(part.text) if role == 'model' else part.text | trim -}}
{%- endif -%}
{%- endfor -%}
{{- '<turn|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|turn>model\\n' -}}{%- endif -%}
""",
)
VIDEO_TOKEN = "<|video|>"
ORDINARY_TOKENS = 256
VOCAB_MULTIPLE = 64
# 70 is the smallest budget that the processor takes; 280 in the releases, with 3 x 3 patches of 16 pixels a token.
TOKENS_PER_IMAGE, PATCH_SIZE, POOLED = 70, 8, 2
PLACES = 1024
# Longer than an image and shorter than long prompts, so that it has an effect.
SLIDING_WINDOW = 96
PER_LAYER_SIZE = 16


@dataclass(frozen=True, kw_only=True)
class PaddedPatches(FeaturePoint):
    """A call that gets the patches (N, P, C) of images, padded to one number, and their places (N, P, 2), -1 for padding."""

    def rows(self, owner: torch.nn.Module, item: Item) -> int:
        config: Any = owner.config
        return int((item[self.beside[0]] != -1).all(dim=-1).sum()) // config.pooling_kernel_size**2


class Gemma4Kit(LmmKit):
    """Text and images; audio and videos are refused, as are pixel bounds: the processor's budget of tokens sets the size."""

    model_type = "gemma4"
    checkpoints = "Gemma 4 (E2B, E4B, 31B, 26B-A4B)"
    config_class = Gemma4Config
    model_class = Gemma4ForConditionalGeneration
    processor_class = Gemma4Processor
    media_tokens = (*TINY_TOKENS.names.values(), VIDEO_TOKEN)
    media_keys = ("pixel_values", "image_position_ids")
    padded_media = {"pixel_values": 0, "image_position_ids": -1}
    tokenizer_adds_start = True
    bidirectional_within_window = True
    logit_cap = "final_logit_softcapping"
    # A name of its own: a server in the same environment that takes chats keeps vLLM's class.
    engine_architecture = "LmmR1Gemma4ForConditionalGeneration"
    engine_disagreement = (
        "in the 26B and 31B releases, tokens of an image attend to each other; vLLM's CPU backend lets a token attend only "
        "to those before it"
    )
    flash_refusal = "it takes neither heads of 512 dimensions nor the mask of attention within images"
    turn_end = END_OF_TURN
    image_types_input = "mm_token_type_ids"
    vision_prefixes = ("model.vision_tower.",)
    projector_prefixes = ("model.embed_vision.",)
    untrained_prefixes = ("model.audio_tower.", "model.embed_audio.")
    feature_points = (
        PaddedPatches(owner="model.vision_tower", beside=("pixel_position_ids",), reads="last_hidden_state"),
    )
    tiny_tokens = TINY_TOKENS

    def template_turns(self, messages: Sequence[Message]) -> Sequence[Mapping[str, Any]]:
        # The released template joins the texts of a system turn with spaces and ends them with one.
        return joined_texts(messages, separator="\n", role="system")

    def engine_ids(self, processor: Gemma4Processor, text: str, *, opens: bool = True) -> list[int]:
        image = f"{processor.boi_token}{processor.image_token}{processor.eoi_token}"
        return self.text_ids(processor, text.replace(processor.image_token, image), opens=opens)

    def media_token_ids(self, config: Gemma4Config, tokenizer: PreTrainedTokenizerBase) -> set[int]:
        named = (config.boi_token_id, config.eoi_token_id, config.boa_token_id, config.eoa_token_index)
        more = {token for token in (*named, config.audio_token_id, config.video_token_id) if token is not None}
        return super().media_token_ids(config, tokenizer) | more

    def tokens_of_size(self, processor: Processor, width: int, height: int) -> int:
        """Return the most tokens of an image; raises ValueError for one that the processor would scale to nothing."""
        images = processor.image_processor
        get_aspect_ratio_preserving_size(
            height=height,
            width=width,
            patch_size=images.patch_size,
            max_patches=images.max_soft_tokens * images.pooling_kernel_size**2,
            pooling_kernel_size=images.pooling_kernel_size,
        )
        return images.max_soft_tokens

    def bidirectional_token_ids(self, config: Gemma4Config) -> frozenset[int]:
        """Return the placeholder if the tokens of an image see each other, which only sliding layers allow."""
        visible = config.get_text_config().use_bidirectional_attention == "vision"
        return frozenset({config.image_token_id}) if visible else frozenset()

    def engine_disagrees(self, config: Gemma4Config) -> bool:
        return bool(self.bidirectional_token_ids(config))

    def filler_media(self, config: Gemma4Config) -> tuple[list[int], Media]:
        """Return a black image of one token between its markers."""
        vision = config.vision_config
        side = vision.pooling_kernel_size
        rows, columns = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
        places = torch.stack([columns.flatten(), rows.flatten()], dim=-1)[None]
        return [config.boi_token_id, config.image_token_id, config.eoi_token_id], {
            "pixel_values": torch.zeros(1, side**2, 3 * vision.patch_size**2),
            "image_position_ids": places,
        }

    def cut_inputs(self, language_model: Any, inputs: Mapping[str, Any], tokens: slice) -> dict[str, object]:
        """Return a language model's inputs for some of a sequence's T tokens, with their per-layer inputs (1, T, L, C)."""
        cut = super().cut_inputs(language_model, inputs, tokens)
        if inputs.get("per_layer_inputs") is not None:
            cut["per_layer_inputs"] = inputs["per_layer_inputs"][:, tokens]
        return cut

    def tiny_tokenizer(self, spec: TinyModelSpec, corpus: Iterable[str], folder: str | Path) -> GemmaTokenizer:
        """Return a tokenizer of the released class, which names `<eos>` as its end token, as the released ones do."""
        size = spec.tokens or ORDINARY_TOKENS
        return train_fallback_tokenizer(GemmaTokenizer, TINY_TOKENS, corpus, vocab_size=size, more=(VIDEO_TOKEN,))

    def tiny_config(self, spec: TinyModelSpec, tokenizer: PreTrainedTokenizerBase) -> Gemma4Config:
        """Return a config with both kinds of layers, of which the last ones share keys and values."""
        vocab_size = -(-len(tokenizer) // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
        ids = tokenizer.convert_tokens_to_ids
        return Gemma4Config(
            text_config={
                **text_settings(spec, tokenizer),
                "vocab_size": vocab_size,
                "vocab_size_per_layer_input": vocab_size,
                "hidden_size_per_layer_input": PER_LAYER_SIZE,
                "num_hidden_layers": 2 + spec.layers,
                "layer_types": ["sliding_attention", "full_attention"]
                + ["full_attention" if layer % 2 else "sliding_attention" for layer in range(spec.layers, 0, -1)],
                "num_kv_shared_layers": spec.layers,
                "head_dim": HEAD_DIM,
                "global_head_dim": 2 * HEAD_DIM,
                "num_global_key_value_heads": 1,
                "attention_k_eq_v": True,
                "use_double_wide_mlp": True,
                "sliding_window": SLIDING_WINDOW,
                "final_logit_softcapping": 30.0,
                "rope_parameters": {
                    "full_attention": {
                        "rope_type": "proportional",
                        "partial_rotary_factor": 0.25,
                        "rope_theta": 10_000.0,
                    },
                    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
                },
            },
            vision_config={
                "hidden_size": spec.hidden_size,
                "intermediate_size": 2 * spec.hidden_size,
                "num_hidden_layers": VISION_LAYERS,
                "num_attention_heads": heads_of(spec),
                "num_key_value_heads": heads_of(spec),
                "head_dim": HEAD_DIM,
                "patch_size": PATCH_SIZE,
                "pooling_kernel_size": POOLED,
                "position_embedding_size": PLACES,
                "default_output_length": TOKENS_PER_IMAGE,
                "standardize": True,
                "use_clipped_linears": True,
                "initializer_range": spec.hidden_size**-0.5,
            },
            audio_config=None,
            eoa_token_index=ids(TINY_TOKENS.names["eoa_token"]),
            **{f"{name}_id": ids(token) for name, token in TINY_TOKENS.names.items() if name != "eoa_token"},
            video_token_id=ids(VIDEO_TOKEN),
            initializer_range=spec.hidden_size**-0.5,
            tie_word_embeddings=spec.tie_embeddings,
        )

    def tune_tiny(self, model: Gemma4ForConditionalGeneration, spec: TinyModelSpec) -> None:
        show_places(model.model.vision_tower.patch_embedder.position_embedding_table)
        # Scores have no factor of their own: the releases' norms make them small.
        for name, weight in model.named_parameters():
            if name.endswith("q_norm.weight"):
                torch.nn.init.constant_(weight, len(weight) ** -0.5)
        # Released models have other values than those of a fresh model, and no gradient changes them.
        for layer in model.model.language_model.layers:
            layer.layer_scalar.fill_(0.75)
        model.generation_config.bos_token_id = model.config.text_config.bos_token_id

    def tiny_parts(self) -> dict[str, object]:
        sizes = {"patch_size": PATCH_SIZE, "pooling_kernel_size": POOLED, "max_soft_tokens": TOKENS_PER_IMAGE}
        return {
            "image_processor": Gemma4ImageProcessor(**sizes),
            "video_processor": Gemma4VideoProcessor(**sizes),
            "feature_extractor": Gemma4AudioFeatureExtractor(),
            "image_seq_length": TOKENS_PER_IMAGE,
        }
