"""The kit of Phi-4-multimodal: images and text; its audio tower stays in the checkpoint, untrained.

It serves transformers' own format, not Microsoft's original one (`phi4mm`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import (
    Phi4MultimodalConfig,
    Phi4MultimodalFeatureExtractor,
    Phi4MultimodalForCausalLM,
    Phi4MultimodalImageProcessor,
    Phi4MultimodalModel,
    Phi4MultimodalProcessor,
    PreTrainedTokenizerBase,
)
from transformers.models.phi4_multimodal.modeling_phi4_multimodal import (
    Phi4MultimodalAudioAttention,
    Phi4MultimodalVisionAttention,
)

from lmm_r1.data.messages import Message, TextPart
from lmm_r1.lmm_kits.encoding import check_tokens
from lmm_r1.lmm_kits.features import FeaturePoint
from lmm_r1.lmm_kits.kit import LmmKit, Media
from lmm_r1.lmm_kits.tiny_model import (
    HEAD_DIM,
    VISION_LAYERS,
    TinyModelSpec,
    TinyTokens,
    heads_of,
    show_places,
    text_settings,
)

IMAGE_EMBED = "model.embed_tokens_extend.image_embed."
AUDIO_EMBED = "model.embed_tokens_extend.audio_embed."
VISION_TOWER = f"{IMAGE_EMBED}img_processor."
# The release's tokenizer names <|endoftext|> its end token, yet every turn of its chat ends with this one.
TURN_END = "<|end|>"


def attend_bidirectionally(model: torch.nn.Module) -> None:
    """Stop the encoders' attention from being causal.

    Transformers 5.15 marks it causal, and SDPA and flash-attn follow that if they get no mask: attention in an image without
    padding was causal unless another crop of the batch had padding.
    """
    for module in model.modules():
        if isinstance(module, (Phi4MultimodalVisionAttention, Phi4MultimodalAudioAttention)):
            module.is_causal = False


def dead_prefixes(config: Phi4MultimodalConfig) -> tuple[str, ...]:
    """Return the prefixes of the parameters that none of our losses reaches."""
    # The projector reads `feature_layer` of the embeddings' and all layers' outputs.
    layers_made = config.vision_config.num_hidden_layers
    unused = range(range(layers_made + 1)[config.vision_config.feature_layer], layers_made)
    layers = (f"{VISION_TOWER}encoder.layers.{index}." for index in unused)
    return (AUDIO_EMBED, f"{VISION_TOWER}head.", f"{VISION_TOWER}post_layernorm.", *layers)


MEDIA_KEYS = ("image_pixel_values", "image_sizes", "image_attention_mask")


def crop_grid(image_size: torch.Tensor, *, crop_size: int) -> tuple[int, int]:
    """Return the rows and columns of an image's grid of crops, from its (height, width) in pixels."""
    height, width = image_size.tolist()
    return height // crop_size, width // crop_size


def num_placeholders(crop_masks: torch.Tensor, *, grid: tuple[int, int]) -> int:
    """Return how many tokens an image takes: the grid and the whole picture with their row ends, and one between.

    Args:
        crop_masks: patches that show image, (crops, S, S), that of the whole picture first.
    """
    rows, columns = grid
    # Which tokens of the grid show image and not padding.
    halved = crop_masks[1 : 1 + rows * columns, ::2, ::2].bool()
    side = halved.shape[-1]
    mask = halved.reshape(rows, columns, side, side).transpose(1, 2).reshape(rows * side, columns * side)
    return _with_row_ends(int(mask[:, 0].sum()), int(mask[0].sum()), side=crop_masks.shape[-1])


def _with_row_ends(rows: int, columns: int, *, side: int) -> int:
    half = (side + 1) // 2
    return rows * (columns + 1) + 1 + half * (half + 1)


def tokens_of_size(settings: Phi4MultimodalImageProcessor, width: int, height: int) -> int:
    """Return how many tokens an image of this size takes; raises ValueError for one that is refused."""
    crop, patch = settings.size["height"], settings.patch_size
    side = crop // patch
    # A tensor without memory, because only its size matters.
    image = torch.empty(3, height, width, device="meta")
    padded, _ = settings.dynamic_preprocess(image, crop, patch, side, max_num=settings.dynamic_hd)
    scale = min(whole / own for whole, own in zip(padded.shape[1:], image.shape[1:], strict=True))
    counts = []
    for whole, own in zip(padded.shape[1:], image.shape[1:], strict=True):
        patches = whole // patch - (whole - int(own * scale)) // patch
        counts.append(sum(place % side % 2 == 0 for place in range(patches)))
    return _with_row_ends(*counts, side=side)


logger = logging.getLogger(__name__)

VISION_ADAPTER_FOLDER = "vision-lora"
IMAGE_TOKEN, AUDIO_TOKEN = "<|image|>", "<|audio|>"
TINY_TOKENS = TinyTokens(
    special=(
        *("<|endoftext|>", IMAGE_TOKEN, AUDIO_TOKEN, "<|assistant|>", TURN_END),
        *("<|user|>", "<|system|>", "<|tool|>", "<|/tool|>"),
    ),
    end=TURN_END,
    names={"image_token": IMAGE_TOKEN, "audio_token": AUDIO_TOKEN},
    # No default system turn, no line breaks between turns, nothing between two adjacent images.
    chat_template="""\
{%- for message in messages -%}
{{- '<|' + message.role + '|>' -}}
{%- if message.content is string -%}
{{- message.content -}}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' -%}
{{- '<|image|>' -}}
{%- elif part.type == 'audio' -%}
{{- '<|audio|>' -}}
{%- elif part.type == 'text' -%}
{{- part.text -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- if message.role == 'system' and message.tools -%}
{{- '<|tool|>' + message.tools + '<|/tool|>' -}}
{%- endif -%}
{{- '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
""",
)
ROTATED = 0.75  # of a head's width, as in the release
# The tiny tower's width does not depend on the language model's, because an image has at least 2,048 patches: the image
# processor counts placeholders with fixed numbers. An image takes at least 290 tokens, and 545 if it is square.
VISION_WIDTH = 64
AUDIO_WIDTH = 16


class Phi4MultimodalKit(LmmKit):
    """Text and images, which are cut into crops."""

    model_type = "phi4_multimodal"
    checkpoints = "Phi-4-multimodal"
    config_class = Phi4MultimodalConfig
    model_class = Phi4MultimodalForCausalLM
    processor_class = Phi4MultimodalProcessor
    media_keys = MEDIA_KEYS
    # As in the processor, an empty crop is zeros, all of them unmasked: with all of it masked, its positions would be a
    # division by zero and some attention kernels would return NaN. The result of an empty crop is not used.
    padded_media = {"image_pixel_values": 0, "image_attention_mask": 1}
    vision_prefixes = (VISION_TOWER,)
    projector_prefixes = (
        f"{IMAGE_EMBED}img_projection_",
        f"{IMAGE_EMBED}global_img_feature_extensor",
        f"{IMAGE_EMBED}sub_img_feature_extensor",
    )
    feature_points = (
        FeaturePoint(
            owner=IMAGE_EMBED.removesuffix("."),
            method="get_img_features",
            pixels="img_embeds",
            beside=("attention_mask",),
        ),
    )
    language_prefixes = ("model.embed_tokens.", "model.layers.", "model.norm.", "lm_head.")
    # The last layers of the vision tower belong here too; their number depends on the config (`dead_prefixes`).
    untrained_prefixes = (AUDIO_EMBED, f"{VISION_TOWER}head.", f"{VISION_TOWER}post_layernorm.")
    # The projection runs once per image, so ranks with different numbers of images would gather its weights out of step.
    zero3_leaf_classes = ("Phi4MultimodalImageEmbedding",)
    tiny_tokens = TINY_TOKENS

    def load_model(self, path: str, **settings: Any) -> Phi4MultimodalForCausalLM:
        """Load the model; if the folder has an adapter, which is not loaded, log a warning."""
        if (Path(path) / VISION_ADAPTER_FOLDER).is_dir():
            logger.warning(
                "%s: the adapter in %s/ is not loaded; lmm-r1 merge --base ... --adapter ... merges it into the weights",
                path,
                VISION_ADAPTER_FOLDER,
            )
        return super().load_model(path, **settings)

    def adapt(self, model: Phi4MultimodalForCausalLM) -> Phi4MultimodalForCausalLM:
        """Turn the cache off, make attention in the towers bidirectional, and freeze dead weights.

        Weights are dead if none of our losses reaches them: the audio tower, and the vision tower's pooling head and its
        layers after the one whose output is used (`feature_layer`, the last but one in the release).
        """
        super().adapt(model)
        attend_bidirectionally(model)
        dead = dead_prefixes(model.config)
        for name, weight in model.named_parameters():
            if name.startswith(dead):
                weight.requires_grad_(False)
        return model

    def prepare_processor(self, processor: Phi4MultimodalProcessor, path: str) -> None:
        """Set the end token to the one that ends a turn; raises UserError if the tokenizer lacks it."""
        check_tokens(processor.tokenizer, {TURN_END}, path=path)
        processor.tokenizer.eos_token = TURN_END

    def pixel_limits(self, processor: Phi4MultimodalProcessor) -> tuple[int, int]:
        """Return 1 and the pixels of the processor's largest number of crops."""
        image_processor = processor.image_processor
        return 1, image_processor.dynamic_hd * image_processor.size["height"] * image_processor.size["width"]

    def tokens_of_size(self, processor: Phi4MultimodalProcessor, width: int, height: int) -> int:
        return tokens_of_size(processor.image_processor, width, height)

    def apply_template(
        self, processor: Phi4MultimodalProcessor, messages: Sequence[Message], *, add_generation_prompt: bool
    ) -> str:
        # The original release's template takes only texts, so the images are written into them here.
        image = processor.image_token
        texts = ([part.text if isinstance(part, TextPart) else image for part in one.parts] for one in messages)
        chat = [{"role": one.role, "content": "".join(said)} for one, said in zip(messages, texts, strict=True)]
        # That template also writes the end token after a finished conversation, where it is never sampled.
        return processor.tokenizer.apply_chat_template(
            chat,
            chat_template=processor.chat_template,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            eos_token="",
        )

    def media_marks(self, processor: Phi4MultimodalProcessor) -> tuple[str, ...]:
        return processor.image_token, processor.audio_token

    def media_token_ids(self, config: Phi4MultimodalConfig, tokenizer: PreTrainedTokenizerBase) -> set[int]:
        return {config.vision_config.image_token_id, config.audio_config.audio_token_id}

    def filler_media(self, config: Phi4MultimodalConfig) -> tuple[list[int], Media]:
        """Return the smallest image sample: the whole picture and one crop, of which one patch is not padding."""
        vision = config.vision_config
        side = vision.crop_size // vision.patch_size
        mask = torch.zeros(1, 2, side, side)
        mask[0, 0] = 1
        mask[0, 1, 0, 0] = 1
        media = {
            "image_pixel_values": torch.zeros(1, 2, vision.num_channels, vision.crop_size, vision.crop_size),
            "image_sizes": torch.tensor([[vision.crop_size, vision.crop_size]]),
            "image_attention_mask": mask,
        }
        return [vision.image_token_id] * num_placeholders(mask[0], grid=(1, 1)), media

    def language_model_of(self, model: Phi4MultimodalForCausalLM) -> Phi4MultimodalModel:
        return model.model

    def cut_inputs(
        self, language_model: Phi4MultimodalModel, inputs: Mapping[str, Any], tokens: slice
    ) -> dict[str, object]:
        """Return the inputs for some tokens; the model would merge images into all embeddings, so this method merges them first."""
        ids, images = inputs["input_ids"], {name: inputs.get(name) for name in self.media_keys}
        embeds = language_model.embed_tokens_extend(ids, language_model.embed_tokens(ids), **images)
        merged = {**inputs, **dict.fromkeys(("input_ids", *self.media_keys)), "inputs_embeds": embeds}
        return super().cut_inputs(language_model, merged, tokens)

    def tiny_config(self, spec: TinyModelSpec, tokenizer: PreTrainedTokenizerBase) -> Phi4MultimodalConfig:
        frequencies = int(spec.hidden_size // heads_of(spec) * ROTATED) // 2
        settings = text_settings(spec, tokenizer) | {
            "max_position_embeddings": 131072,
            "bos_token_id": tokenizer.pad_token_id,
            "eos_token_id": [tokenizer.pad_token_id, tokenizer.eos_token_id],
        }
        return Phi4MultimodalConfig(
            **settings,
            original_max_position_embeddings=4096,
            rope_parameters={
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "partial_rotary_factor": ROTATED,
                "original_max_position_embeddings": 4096,
                "short_factor": [1.0] * frequencies,
                "long_factor": [1.0 + index for index in range(frequencies)],
            },
            vision_config={
                "hidden_size": VISION_WIDTH,
                "intermediate_size": 2 * VISION_WIDTH,
                # The last layer is not used, as in the release.
                "num_hidden_layers": VISION_LAYERS,
                "num_attention_heads": VISION_WIDTH // HEAD_DIM,
                "image_token_id": tokenizer.image_token_id,
            },
            audio_config={
                "hidden_size": AUDIO_WIDTH,
                "intermediate_size": AUDIO_WIDTH,
                "num_blocks": 1,
                "num_attention_heads": 2,
                "ext_pw_out_channel": AUDIO_WIDTH,
                "depthwise_separable_out_channel": AUDIO_WIDTH,
                "nemo_conv_channels": AUDIO_WIDTH,
                "bias_max_distance": AUDIO_WIDTH,
                "audio_token_id": tokenizer.audio_token_id,
            },
        )

    def tune_tiny(self, model: Phi4MultimodalForCausalLM, spec: TinyModelSpec) -> None:
        """Initialise the tower's matrices again: the class gives them a variance of 1, with which nothing can be learned."""
        for name, weight in model.named_parameters():
            if name.startswith(VISION_TOWER) and weight.dim() > 1 and "embedding" not in name:
                torch.nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)
        show_places(model.get_parameter(f"{VISION_TOWER}embeddings.position_embedding.weight"))

    def tiny_parts(self) -> dict[str, object]:
        return {"image_processor": Phi4MultimodalImageProcessor(), "audio_processor": Phi4MultimodalFeatureExtractor()}
