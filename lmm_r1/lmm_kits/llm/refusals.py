"""Which of transformers' causal language models the kit of plain language models does not take, and why.

Those that are taken were tried with random weights: rows of a batch, padded on either side, give what each gives alone,
and no token sees those behind it. Not tried, for want of a small config, were axk1, dbrx, deepseek_v3, dots1, falcon_h1,
gemma3n_text, lfm2_moe, longcat_flash, youtu, zamba and zamba2.
"""

from __future__ import annotations

import inspect
from collections.abc import Container

# Inputs of a forward, and settings of a config, that are no text.
_MEDIA_INPUTS = frozenset({"pixel_values", "input_features", "image_patches"})
_MEDIA_CONFIGS = ("vision", "audio", "vq_")
# Found by trying; the classes themselves do not tell.
_FOUND = {
    "blt": "it reads bytes, and no tokens of a vocabulary",
    "doge": "in transformers its attention also sees the tokens that follow",
    "recurrent_gemma": "in transformers its recurrent layers take in the padding of a batch",
}


def refusal_of(model_type: str) -> str | None:
    """Return why the model cannot be trained as a plain language model, for a message; None where it can.

    Args:
        model_type: of a model that transformers has a class for.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return "it is no causal language model"
    config = CONFIG_MAPPING[model_type]
    model = MODEL_FOR_CAUSAL_LM_MAPPING[config]
    inputs = inspect.signature(model.forward).parameters
    if _MEDIA_INPUTS & inputs.keys() or any(word in name for name in config.sub_configs for word in _MEDIA_CONFIGS):
        return "it takes images or sound"
    # Not every config has these.
    if getattr(config, "is_encoder_decoder", False) or _is_encoder(config, inputs):
        return "it is an encoder, or one with a decoder"
    if "position_ids" not in inputs:
        return "its forward takes no positions, without which rows of a batch cannot be padded or packed"
    if "logits_to_keep" not in inputs:
        return "it drafts tokens for another model"
    if not model._supports_sdpa:
        return "transformers computes its attention in a way of its own only, not by SDPA"
    return _FOUND.get(model_type)


def _is_encoder(config: type, inputs: Container[str]) -> bool:
    """Whether its attention is bidirectional unless told otherwise: BERT and its kind, and decoders that read an encoder."""
    return hasattr(config, "is_decoder") and "encoder_hidden_states" in inputs
