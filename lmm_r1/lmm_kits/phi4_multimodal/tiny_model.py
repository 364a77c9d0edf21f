"""A small random Phi-4-multimodal with its real special tokens, chat template conventions and image processor.

The crops keep their real size and number of patches: the image processor counts the placeholders with fixed numbers.
So an image of any size takes at least 290 tokens, and 545 where it is square.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from transformers import (
    Phi4MultimodalConfig,
    Phi4MultimodalFeatureExtractor,
    Phi4MultimodalForCausalLM,
    Phi4MultimodalImageProcessor,
    Phi4MultimodalProcessor,
    PreTrainedTokenizerFast,
)

from lmm_r1.lmm_kits.kit import TinyModelSpec
from lmm_r1.lmm_kits.phi4_multimodal.towers import TURN_END, VISION_TOWER, chat_template
from lmm_r1.lmm_kits.tiny_model import HEAD_DIM, heads_of, save_model, show_places, text_settings, train_tokenizer

IMAGE_TOKEN, AUDIO_TOKEN = "<|image|>", "<|audio|>"
SPECIAL_TOKENS = (
    "<|endoftext|>",
    IMAGE_TOKEN,
    AUDIO_TOKEN,
    "<|assistant|>",
    TURN_END,
    "<|user|>",
    "<|system|>",
    "<|tool|>",
    "<|/tool|>",
)
ROTATED = 0.75  # of a head's width, as in the release
VISION_LAYERS = 2  # of which the last is not used, as in the release
VISION_WIDTH = 64  # whatever the language model's is: 2,048 patches and more make most of what an image takes
AUDIO_WIDTH = 16


def build_tiny(spec: TinyModelSpec, tokenizer_corpus: Iterable[str], folder: str | Path) -> None:
    """Write a random checkpoint, its processor and chat template to `folder`."""
    template = chat_template(image_token=IMAGE_TOKEN, audio_token=AUDIO_TOKEN)
    trained = train_tokenizer(
        tokenizer_corpus,
        vocab_size=spec.tokens,
        special_tokens=SPECIAL_TOKENS,
        eos_token=TURN_END,
        pad_token="<|endoftext|>",
        chat_template=template,
    )
    trained.save_pretrained(folder)
    # Loaded again, as the media tokens get their names in the tokenizer on loading.
    tokenizer = PreTrainedTokenizerFast.from_pretrained(
        folder, extra_special_tokens={"image_token": IMAGE_TOKEN, "audio_token": AUDIO_TOKEN}
    )
    torch.manual_seed(spec.seed)
    model = Phi4MultimodalForCausalLM(_config(spec, tokenizer))
    _rescale_vision_tower(model)
    save_model(model, tokenizer, folder)
    processor = Phi4MultimodalProcessor(
        image_processor=Phi4MultimodalImageProcessor(),
        audio_processor=Phi4MultimodalFeatureExtractor(),
        tokenizer=tokenizer,
        chat_template=template,
    )
    processor.save_pretrained(folder)


def _rescale_vision_tower(model: Phi4MultimodalForCausalLM) -> None:
    """Draw the tower's matrices again: the class draws them with a variance of 1, and nothing can be learnt from that."""
    for name, weight in model.named_parameters():
        if name.startswith(VISION_TOWER) and weight.dim() > 1 and "embedding" not in name:
            torch.nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)
    show_places(model.get_parameter(f"{VISION_TOWER}embeddings.position_embedding.weight"))


def _config(spec: TinyModelSpec, tokenizer: PreTrainedTokenizerFast) -> Phi4MultimodalConfig:
    heads = heads_of(spec)
    frequencies = int(spec.hidden_size // heads * ROTATED) // 2
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
