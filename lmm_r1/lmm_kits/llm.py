"""The kit of every plain causal language model, whatever its `model_type`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen2Config,
)

from lmm_r1.data.messages import Message
from lmm_r1.errors import UserError
from lmm_r1.lmm_kits.encoding import check_chat, joined_texts
from lmm_r1.lmm_kits.kit import LmmKit, RouterScores
from lmm_r1.lmm_kits.tiny_model import TinyModelSpec, TinyTokens, chatml, text_settings

TINY_TOKENS = TinyTokens(
    special=("<|endoftext|>", "<|im_start|>", "<|im_end|>"), chat_template=chatml({}, default_system=True)
)


# Inputs of a forward and settings of a config that are not text.
_MEDIA_INPUTS = frozenset({"pixel_values", "input_features", "image_patches"})
_MEDIA_CONFIGS = ("vision", "audio", "vq_")
# All other mixtures of experts score by a softmax.
_ROUTER_SCORES: dict[str, RouterScores | None] = {
    "afmoe": "sigmoid",
    "hy_v3": "sigmoid",
    "laguna": "sigmoid",
    "minimax_m2": "sigmoid",
    "minimax_m3_vl_text": "sigmoid",
    # It scores by the square root of a softplus, and in its first layers by a table of tokens.
    "deepseek_v4": None,
}
# Found by tests; the classes themselves do not show it.
_FOUND = {
    "blt": "it reads bytes, and no tokens of a vocabulary",
    "doge": "in transformers its attention also sees the tokens that follow",
    "recurrent_gemma": "in transformers its recurrent layers take in the padding of a batch",
}

# How a byte-level tokenizer cuts a text before it merges, by `tokenizer.ggml.pre`. transformers does not read this field.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CUTS = {"gpt-2": None, "smollm": None, "qwen2": _WORDS % "", "llama-bpe": _WORDS % "{1,3}"}


class LanguageModelKit(LmmKit):
    """Messages are text only; the auto classes load whatever architecture the checkpoint names."""

    model_type = "llm"
    checkpoints = "any plain language model"
    config_class = AutoConfig
    model_class = AutoModelForCausalLM
    takes_images = False
    takes_flash_attention = True
    language_prefixes = ("",)
    tiny_tokens = TINY_TOKENS

    def model_class_of(self, config: PretrainedConfig) -> type[PreTrainedModel]:
        """Return transformers' class; raises UserError for an architecture whose code comes with the checkpoint."""
        if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
            raise UserError(f"{config.name_or_path}: transformers has no class for {config.model_type}")
        return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]

    def load_processor(
        self, path: str, *, trust_remote_code: bool, chat_template: str | None = None
    ) -> PreTrainedTokenizerBase:
        """Load the tokenizer; raises UserError when the folder has none or it has no chat template."""
        try:
            tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
        except (OSError, ValueError) as error:
            raise UserError(f"{path}: no tokenizer can be loaded from this checkpoint ({error})") from error
        if chat_template is not None:
            tokenizer.chat_template = chat_template
        check_chat(tokenizer, tokenizer=tokenizer, path=path)
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
        return tokenizer

    def tokenizer_of(self, processor: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
        return processor

    def template_turns(self, messages: Sequence[Message]) -> Sequence[Mapping[str, Any]]:
        # Chat templates of language models take only strings; text parts are joined as vLLM's server joins them.
        return joined_texts(messages, separator="\n")

    def placeholder_ids(self, processor: PreTrainedTokenizerBase) -> frozenset[int]:
        return frozenset()

    def media_token_ids(self, config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> set[int]:
        return set()

    def router_scores(self, config: PretrainedConfig) -> RouterScores | None:
        return _ROUTER_SCORES.get(config.model_type, "softmax")

    def backbone_of(self, model: PreTrainedModel) -> torch.nn.Module:
        """Return the module before the output layer; its name differs between architectures."""
        return model.base_model

    def language_model_of(self, model: PreTrainedModel) -> torch.nn.Module:
        return model.base_model

    def tiny_config(self, spec: TinyModelSpec, tokenizer: PreTrainedTokenizerBase) -> Qwen2Config:
        return Qwen2Config(**text_settings(spec, tokenizer))

    def tiny_processor(self, tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
        return tokenizer


def refusal_of(model_type: str) -> str | None:
    """Return why the model cannot be trained as a plain language model, for a message; None if it can.

    Supported models were tested with random weights: each row of a padded batch gives the same result as on its own, and
    no token attends to later ones. These have no small config and were not tested: axk1, dbrx, deepseek_v3, dots1,
    falcon_h1, gemma3n_text, lfm2_moe, longcat_flash, youtu, zamba and zamba2.

    Args:
        model_type: the type of a model for which transformers has a class.
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
    # Attention is bidirectional by default in BERT and in decoders that read an encoder.
    encoder = hasattr(config, "is_decoder") and "encoder_hidden_states" in inputs
    if encoder or getattr(config, "is_encoder_decoder", False):
        return "it is an encoder, or one with a decoder"
    if "position_ids" not in inputs:
        return "its forward takes no positions, without which rows of a batch cannot be padded or packed"
    if "logits_to_keep" not in inputs:
        return "it drafts tokens for another model"
    if not model._supports_sdpa:
        return "transformers computes its attention in a way of its own only, not by SDPA"
    return _FOUND.get(model_type)


def byte_level_tokenizer(fields: Mapping[str, Any], *, file: Path) -> Tokenizer:
    """Return the byte-level tokenizer of a GGUF file with these fields, which begins no text with a token of its own.

    Raises UserError if the file cuts texts in a way that is not known.
    """
    cut, tokens = fields.get("tokenizer.ggml.pre", "gpt-2"), fields["tokenizer.ggml.tokens"]
    if cut not in _CUTS:
        raise UserError(f"{file}: its tokenizer cuts texts as {cut!r}; known: {', '.join(_CUTS)}")
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    made = Tokenizer(models.BPE({token: place for place, token in enumerate(tokens)}, merges))
    words, by_bytes = _CUTS[cut], pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=_CUTS[cut] is None)
    first = pre_tokenizers.Digits(True) if words is None else pre_tokenizers.Split(Regex(words), "isolated")
    made.pre_tokenizer = by_bytes if cut == "gpt-2" else pre_tokenizers.Sequence([first, by_bytes])
    made.decoder = decoders.ByteLevel()
    if cut == "qwen2":
        made.normalizer = normalizers.NFC()
    # 3 is a control token, and 4 one of a user's.
    kinds = list(zip(tokens, fields["tokenizer.ggml.token_type"], strict=True))
    made.add_special_tokens([AddedToken(token, normalized=False) for token, kind in kinds if kind == 3])
    made.add_tokens([AddedToken(token, normalized=False) for token, kind in kinds if kind == 4])
    return made
