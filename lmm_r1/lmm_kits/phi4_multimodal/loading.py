"""Phi-4-multimodal: config, model and processor of a checkpoint in transformers' own format.

Microsoft's original format (`phi4mm`) is another one: `original_format.py` converts it.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from transformers import (
    Phi4MultimodalConfig,
    Phi4MultimodalForCausalLM,
    Phi4MultimodalProcessor,
    PreTrainedTokenizerBase,
)
from transformers.models.phi4_multimodal.modeling_phi4_multimodal import (
    Phi4MultimodalAudioAttention,
    Phi4MultimodalVisionAttention,
)

from lmm_r1.errors import UserError
from lmm_r1.lmm_kits.base import load_image_processor

logger = logging.getLogger(__name__)

IMAGE_EMBED = "model.embed_tokens_extend.image_embed."
AUDIO_EMBED = "model.embed_tokens_extend.audio_embed."
VISION_TOWER = f"{IMAGE_EMBED}img_processor."
# The release's tokenizer names <|endoftext|> its end token, yet every turn of its chat ends with this one.
TURN_END = "<|end|>"
VISION_ADAPTER_FOLDER = "vision-lora"


def load_config(path: str, *, trust_remote_code: bool) -> Phi4MultimodalConfig:
    return Phi4MultimodalConfig.from_pretrained(path)


def load_model(
    path: str, *, dtype: torch.dtype, attn_implementation: str, trust_remote_code: bool, **kwargs: Any
) -> Phi4MultimodalForCausalLM:
    """Load the model with its generation cache off, its towers attending both ways, and its dead weights frozen.

    Weights are dead where no loss of ours reaches them: the audio tower, and of the vision tower its pooling head and
    the layers behind the one whose output is taken (`feature_layer`, the last but one in the release).
    """
    if (Path(path) / VISION_ADAPTER_FOLDER).is_dir():
        logger.warning(
            "%s: the adapter in %s/ is not loaded; convert Microsoft's original checkpoint to have it in the weights",
            path,
            VISION_ADAPTER_FOLDER,
        )
    model = Phi4MultimodalForCausalLM.from_pretrained(
        path, dtype=dtype, attn_implementation=attn_implementation, **kwargs
    )
    model.config.use_cache = False
    attend_both_ways(model)
    dead = dead_prefixes(model.config)
    for name, weight in model.named_parameters():
        if name.startswith(dead):
            weight.requires_grad_(False)
    return model


def attend_both_ways(model: Phi4MultimodalForCausalLM) -> None:
    """Stop the encoders' attention from being causal.

    Transformers (5.15) marks it causal, which SDPA and flash-attn go by wherever they get no mask: an image whose
    patches are all real was seen causally, unless another crop of the batch had padding.
    """
    for module in model.modules():
        if isinstance(module, (Phi4MultimodalVisionAttention, Phi4MultimodalAudioAttention)):
            module.is_causal = False


def vision_depth(config: Phi4MultimodalConfig) -> int:
    """Return how many layers of the vision tower the image features have been through."""
    layers, taken = config.vision_config.num_hidden_layers, config.vision_config.feature_layer
    return taken if taken >= 0 else layers + 1 + taken


def dead_prefixes(config: Phi4MultimodalConfig) -> tuple[str, ...]:
    """Return the prefixes of the parameters that no loss of ours reaches."""
    behind = range(vision_depth(config), config.vision_config.num_hidden_layers)
    layers = (f"{VISION_TOWER}encoder.layers.{index}." for index in behind)
    return (AUDIO_EMBED, f"{VISION_TOWER}head.", f"{VISION_TOWER}post_layernorm.", *layers)


def load_processor(path: str, *, trust_remote_code: bool) -> Phi4MultimodalProcessor:
    """Load processor and tokenizer; raises UserError when the checkpoint lacks one of them or a chat template."""
    processor = load_image_processor(path, processor_class=Phi4MultimodalProcessor)
    tokenizer = processor.tokenizer
    if tokenizer.convert_tokens_to_ids(TURN_END) in (None, tokenizer.unk_token_id):
        raise UserError(f"{path}: the tokenizer has no {TURN_END}; copy the original model's tokenizer files into it")
    tokenizer.eos_token = TURN_END
    return processor


def tokenizer_of(processor: Phi4MultimodalProcessor) -> PreTrainedTokenizerBase:
    return processor.tokenizer
