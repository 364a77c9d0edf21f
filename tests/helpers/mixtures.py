"""Kits of mixtures of experts, and checkpoints like their tiny ones with other sizes."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from helpers.tiny_models import make_actor, pad

from lmm_r1.lmm_kits import EncodedPrompt, LmmKit, TinyModelSpec

# Those whose load can be balanced. Their experts are computed by a grouped matmul, which takes no fp64, unless told otherwise.
BALANCED_KITS = ("glm4v_moe", "qwen3_5_moe", "qwen3_vl_moe")


def reshaped(kit: LmmKit, tiny: Path, folder: Path, settings: Mapping[str, object]) -> Path:
    """Write a checkpoint like the tiny one, with other sizes in its language model and buffers that do something."""
    shutil.copytree(tiny, folder)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"] |= settings
    torch.manual_seed(0)
    model = kit.model_class(kit.config_class(**config))
    text = model.config.get_text_config()
    kit.tune_tiny(
        model,
        TinyModelSpec(
            hidden_size=text.hidden_size,
            layers=text.num_hidden_layers,
            seed=0,
            tie_embeddings=model.config.tie_word_embeddings,
        ),
    )
    stored = model.state_dict()
    for name, buffer in model.named_buffers():
        if name in stored:
            buffer.normal_(std=0.1)
    model.save_pretrained(folder)
    return folder


def logits(folder: Path, prompt: EncodedPrompt, **settings: Any) -> torch.Tensor:
    """Return a prompt's logits (1, T, V) as the checkpoint's actor with these settings computes them."""
    actor = make_actor(folder, **settings)
    sequences, mask = pad([prompt.token_ids], side="right")
    with torch.no_grad():
        return actor(sequences, attention_mask=mask, media=[prompt.media])["logits"]
