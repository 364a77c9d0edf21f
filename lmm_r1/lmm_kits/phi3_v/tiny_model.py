"""A small random Phi-3.5-vision with its real special tokens, chat template conventions and image processor."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from lmm_r1.lmm_kits.kit import TinyModelSpec
from lmm_r1.lmm_kits.phi3_v.configuration import Phi3VConfig
from lmm_r1.lmm_kits.phi3_v.modeling import Phi3VForCausalLM, Phi3VVisionTower
from lmm_r1.lmm_kits.phi3_v.processing import Phi3VImageProcessor, Phi3VProcessor
from lmm_r1.lmm_kits.tiny_model import HEAD_DIM, save_model, show_places, text_settings, train_tokenizer

SPECIAL_TOKENS = (
    "<unk>",
    "<s>",
    "</s>",
    "<|endoftext|>",
    "<|assistant|>",
    "<|system|>",
    "<|end|>",
    "<|user|>",
    "<|image|>",
)
# Renders as the released checkpoint's does: every role alike, nothing before the first turn, text alone as content.
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|' + message.role + '|>\\n' + message.content + '<|end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt and messages[-1].role != 'assistant' -%}{{- '<|assistant|>\\n' -}}{%- endif -%}
"""
# As deep as the release's tower, since the name of the one layer that is never trained counts them; narrow instead, and
# with patches so large that a crop of 336 pixels has 6 x 6 of them, which become 3 x 3 tokens.
CLIP_WIDTH = 32
PATCH_SIZE = 56
CROP_TOKENS = 9
# Of the layers' output matrices, of which 2 x 24 add up.
BRANCH_SCALE = 0.1


def build_tiny(spec: TinyModelSpec, tokenizer_corpus: Iterable[str], folder: str | Path) -> None:
    """Write a random checkpoint, its processor and chat template to `folder`."""
    tokenizer = train_tokenizer(
        tokenizer_corpus,
        vocab_size=spec.tokens,
        special_tokens=SPECIAL_TOKENS,
        eos_token="<|end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
    )
    torch.manual_seed(spec.seed)
    model = Phi3VForCausalLM(_config(spec, tokenizer))
    tower = model.model.vision_embed_tokens.img_processor["vision_model"]
    assert isinstance(tower, Phi3VVisionTower)
    _rescale_tower(tower)
    save_model(model, tokenizer, folder)
    image_processor = Phi3VImageProcessor(num_img_tokens=CROP_TOKENS)
    Phi3VProcessor(image_processor, tokenizer, chat_template=CHAT_TEMPLATE).save_pretrained(folder)


@torch.no_grad()
def _rescale_tower(tower: Phi3VVisionTower) -> None:
    """Let so deep a tower show at its end what patches and places were at its beginning, as a trained one does."""
    patches = tower.embeddings.patch_embedding.weight
    torch.nn.init.normal_(patches, std=patches[0].numel() ** -0.5)
    show_places(tower.embeddings.position_embedding.weight)
    for layer in tower.encoder.layers:
        for branch in (layer.self_attn.out_proj, layer.mlp.fc2):
            branch.weight *= BRANCH_SCALE


def _config(spec: TinyModelSpec, tokenizer: PreTrainedTokenizerBase) -> Phi3VConfig:
    settings = text_settings(spec, tokenizer)
    settings["bos_token_id"] = tokenizer.convert_tokens_to_ids("<s>")
    return Phi3VConfig(
        **settings,
        original_max_position_embeddings=settings["max_position_embeddings"],
        image_token_id=tokenizer.convert_tokens_to_ids("<|image|>"),
        img_processor={
            "image_dim_out": CLIP_WIDTH,
            "num_img_tokens": CROP_TOKENS,
            "clip_overrides": {
                "hidden_size": CLIP_WIDTH,
                "intermediate_size": CLIP_WIDTH,
                "num_attention_heads": CLIP_WIDTH // HEAD_DIM,
                "patch_size": PATCH_SIZE,
                "initializer_range": CLIP_WIDTH**-0.5,
            },
        },
    )
