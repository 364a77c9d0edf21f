"""The kits of GLM-4.1V to 4.6V: M-RoPE as in Qwen-VL; each step of a video is an image, followed by its second as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import (
    Glm4vConfig,
    Glm4vForConditionalGeneration,
    Glm4vImageProcessor,
    Glm4vMoeConfig,
    Glm4vMoeForConditionalGeneration,
    Glm4vProcessor,
    Glm4vVideoProcessor,
    Glm46VImageProcessor,
    Glm46VProcessor,
    Glm46VVideoProcessor,
    PretrainedConfig,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)

from lmm_r1.data.images import Video
from lmm_r1.data.messages import Message, TextPart, VideoPart
from lmm_r1.errors import UserError
from lmm_r1.lmm_kits.encoding import bounded_steps, joined_texts, known_ids
from lmm_r1.lmm_kits.kit import EncodedPrompt, RouterScores
from lmm_r1.lmm_kits.qwen_vl import IMAGE, VIDEO, QwenVlKit
from lmm_r1.lmm_kits.tiny_model import HEAD_DIM, TinyModelSpec, TinyTokens

END_OF_TURN = "<|user|>"
END_OF_ANSWER = "</answer>"
WRITTEN_ROLES = frozenset({"system", "user", "assistant"})


MEDIA_TOKENS = (
    *(f"<|{end}_of_{kind}|>" for kind in ("image", "video") for end in ("begin", "end")),
    *("<|image|>", "<|video|>"),
)
TINY_TOKENS = TinyTokens(
    special=(
        *("<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>"),
        *("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
        *MEDIA_TOKENS,
    ),
    end="<|endoftext|>",
    generation_ends=("<|endoftext|>", "<|user|>", "<|observation|>"),
    # As in the first release: nothing between two turns, media in place in the user's turns only, and nothing at all of
    # other roles. Later releases write tools' answers, and a thought before each turn of the model.
    chat_template="""\
[gMASK]<sop>
{%- macro shown(kind) -%}<|begin_of_{{ kind }}|><|{{ kind }}|><|end_of_{{ kind }}|>{%- endmacro -%}
{%- set openings = {'system': '<|system|>', 'user': '<|user|>', 'assistant': '<|assistant|>'} -%}
{%- for turn in messages if turn.role in openings -%}
{{- openings[turn.role] + '\\n' -}}
{%- if turn.role != 'user' or turn.content is string -%}
{{- turn.content -}}
{%- else -%}
{%- for part in turn.content -%}
{{- part.text if part.type == 'text' else shown(part.type) -}}
{%- endfor -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>\\n' -}}{%- endif -%}
""",
)
IMAGE_SIDE = 112  # Of 8 x 8 position embeddings; 336 pixels and 24 x 24 in the release.
# For both frames of a step: one merged patch is 28 x 28 pixels. The release needs at least 16 of them.
IMAGE_PIXELS = {"shortest_edge": 2 * 56 * 56, "longest_edge": 2 * 28 * 28 * 1280}
VIDEO_PIXELS = {"shortest_edge": 2 * 56 * 56, "longest_edge": 28 * 28 * 4096}
# The first half of a head's 32 dimensions is rotated, split over time, height and width in the release's proportions;
# `qwen_vl` explains why the base is so small.
ROPE = {"rope_type": "default", "rope_theta": 10.0, "partial_rotary_factor": 0.5, "mrope_section": [2, 3, 3]}
# Two groups of experts, of which a token takes one, as a release could; those so far have one group.
TINY_ROUTING = {"n_routed_experts": 6, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
CORRECTION_BIAS = "mlp.gate.e_score_correction_bias"


class GlmVKit(QwenVlKit):
    """A kit of the family sets its classes and what vLLM needs to know about its language model.

    The placeholders of a video are those of images, between two markers.
    """

    writes_thousandths = True
    template_leaves_turn_open = True
    spoken_tokens = ("<|begin_of_box|>", "<|end_of_box|>")
    # Releases before GLM-4.6V have the first. They write the seconds of a video differently: 4, or 4.0 seconds.
    other_processors = (Glm4vProcessor, Glm46VProcessor)
    media_tokens = MEDIA_TOKENS
    tiny_tokens = TINY_TOKENS
    vision_prefixes = (
        "model.visual.embeddings.",
        "model.visual.patch_embed.",
        "model.visual.post_conv_layernorm.",
        "model.visual.blocks.",
        "model.visual.post_layernorm.",
    )
    projector_prefixes = ("model.visual.downsample.", "model.visual.merger.")

    def prepare_processor(self, processor: ProcessorMixin, path: str) -> None:
        """Set the end token to the one that follows an assistant's turn.

        The chat template does not end turns: the model ends its own with the token that opens the user's. Released
        tokenizers name `<|endoftext|>`, which ends a document.
        """
        tokenizer, template = processor.tokenizer, str(processor.chat_template)
        if str(tokenizer.eos_token) not in template and END_OF_TURN in template:
            tokenizer.eos_token = END_OF_TURN

    def chat_text(self, processor: ProcessorMixin, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        """Return a conversation as the chat template writes it; raises UserError if the template omits a message."""
        text = super().chat_text(processor, messages, add_generation_prompt=add_generation_prompt)
        for message in messages:
            parts = [part.text.strip() for part in message.parts if isinstance(part, TextPart)]
            if message.role not in WRITTEN_ROLES and not all(part in text for part in parts):
                raise UserError(
                    f"the checkpoint's chat template does not write a message of the role {message.role}; give it the "
                    "role user, or take the row out"
                )
        return text

    def template_turns(self, messages: Sequence[Message]) -> Sequence[Mapping[str, Any]]:
        # The released template writes several text parts as a Python list, except in the user's turns.
        return joined_texts(messages, separator="")

    def bounded_video(self, processor: ProcessorMixin, video: Video, part: VideoPart) -> Video:
        return bounded_steps(processor, video, part)

    def pixel_limits(self, processor: ProcessorMixin) -> tuple[int, int]:
        """Return half of the processor's settings, which count an image as the two frames of a step."""
        lowest, highest = super().pixel_limits(processor)
        frames = processor.image_processor.temporal_patch_size
        return -(-lowest // frames), highest // frames

    def image_ends(self, config: PretrainedConfig) -> tuple[int, int]:
        return config.image_start_token_id, config.image_end_token_id

    def token_types(self, config: PretrainedConfig, token_ids: torch.Tensor) -> torch.Tensor:
        placeholders = token_ids == config.image_token_id
        opened = (token_ids == config.video_start_token_id).cumsum(-1)
        closed = (token_ids == config.video_end_token_id).cumsum(-1)
        types = torch.zeros_like(token_ids, dtype=torch.int32)
        types[placeholders & (opened == closed)] = IMAGE
        types[placeholders & (opened > closed)] = VIDEO
        return types

    def spoken_end_ids(self, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
        """Return the tag that ends an answer: one token, at which the release's generation config also ends responses."""
        return frozenset(known_ids(tokenizer, (END_OF_ANSWER,)))

    def grids_as_images(self, grids: torch.Tensor) -> torch.Tensor:
        """Return one grid for each step of each video (S, 3), because the tower looks positions up image by image."""
        steps = grids.repeat_interleave(grids[:, 0], dim=0)
        steps[:, 0] = 1
        return steps

    def engine_media(self, encoded: EncodedPrompt) -> dict[str, list[Any]]:
        """Return images, and videos with their times, with a setting by which vLLM keeps all frames."""
        media = super().engine_media(encoded)
        if "video" in media:
            media["video"] = [(frames, {**times, "do_sample_frames": False}) for frames, times in media["video"]]
        return media

    def tiny_vision(self, spec: TinyModelSpec) -> dict[str, object]:
        return {
            "image_size": IMAGE_SIDE,
            # Its output width, which is also the width of its layers' MLPs.
            "out_hidden_size": spec.hidden_size,
            # Of the merger.
            "intermediate_size": 2 * spec.hidden_size,
        }

    def tiny_text(self, spec: TinyModelSpec) -> dict[str, object]:
        return {"rope_parameters": dict(ROPE)}

    def tiny_token_ids(self, tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
        return {
            f"{kind}{place}_token_id": tokenizer.convert_tokens_to_ids(f"<|{opening}{kind}|>")
            for kind in ("image", "video")
            for place, opening in (("_start", "begin_of_"), ("_end", "end_of_"), ("", ""))
        }


class Glm4vKit(GlmVKit):
    """GLM-4.1V and GLM-4.6V-Flash, the dense models, with two norms around each attention and each MLP."""

    model_type = "glm4v"
    checkpoints = "GLM-4.1V, GLM-4.6V-Flash"
    config_class = Glm4vConfig
    model_class = Glm4vForConditionalGeneration
    processor_class = Glm4vProcessor
    video_engine_architecture = "LmmR1Glm4vForConditionalGeneration"
    # Always so in transformers' model.
    engine_text_config = {"attention_bias": True}
    # It reads the weight of its position embedding without running the module, and ZeRO-3 gathers only what runs.
    zero3_leaf_classes = ("Glm4vVisionEmbeddings",)

    def tiny_parts(self) -> dict[str, object]:
        return {
            "image_processor": Glm4vImageProcessor(size=dict(IMAGE_PIXELS)),
            "video_processor": Glm4vVideoProcessor(size=dict(VIDEO_PIXELS)),
        }


class Glm4vMoeKit(GlmVKit):
    """GLM-4.5V and GLM-4.6V: a token's experts have the highest sigmoid scores plus the router's bias, and are weighted
    without the bias.

    The bias (`e_score_correction_bias`) is a buffer, in fp32 whatever the training's precision. It balanced the experts'
    load in pre-training (https://arxiv.org/abs/2408.15664) and is not trained here.
    """

    model_type = "glm4v_moe"
    checkpoints = "GLM-4.5V, GLM-4.6V"
    config_class = Glm4vMoeConfig
    model_class = Glm4vMoeForConditionalGeneration
    processor_class = Glm46VProcessor
    engine_architecture = "LmmR1Glm4vMoeForConditionalGeneration"  # also without videos, for a tied output layer
    # Neither transformers' model nor any release with images has norms of queries and keys.
    engine_text_config = {"use_qk_norm": False}
    zero3_leaf_classes = ("Glm4vMoeVisionEmbeddings", "Glm4vMoeTextMoE")
    takes_4bit = False

    def router_scores(self, config: Glm4vMoeConfig) -> RouterScores:
        return "sigmoid"

    def tiny_text(self, spec: TinyModelSpec) -> dict[str, object]:
        return {
            **super().tiny_text(spec),
            **TINY_ROUTING,
            "routed_scaling_factor": 1.5,
            "head_dim": HEAD_DIM,
            # All sizes of a layer differ, so that a transposed tensor fits nowhere.
            "moe_intermediate_size": 3 * spec.hidden_size // 2,
            "first_k_dense_replace": min(1, spec.layers - 1),
        }

    def tune_tiny(self, model: Glm4vMoeForConditionalGeneration, spec: TinyModelSpec) -> None:
        for name, bias in model.named_buffers():
            if name.endswith(CORRECTION_BIAS):
                # As large as differences of scores, and not exact in bf16.
                bias.normal_(std=0.1)

    def tiny_parts(self) -> dict[str, object]:
        return {
            "image_processor": Glm46VImageProcessor(size=dict(IMAGE_PIXELS)),
            "video_processor": Glm46VVideoProcessor(size=dict(VIDEO_PIXELS)),
        }
