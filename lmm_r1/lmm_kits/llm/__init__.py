"""The kit of every plain causal language model, whatever its `model_type`."""

from __future__ import annotations

import inspect
from collections.abc import Container, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from lmm_r1.data.messages import Message, Part, TextPart
from lmm_r1.data.videos import Video
from lmm_r1.errors import UserError
from lmm_r1.lmm_kits.encoding import check_chat
from lmm_r1.lmm_kits.kit import EncodedPrompt, LmmKit, Media, RouterScores, TinyModelSpec

# Inputs of a forward, and settings of a config, that are no text.
_MEDIA_INPUTS = frozenset({"pixel_values", "input_features", "image_patches"})
_MEDIA_CONFIGS = ("vision", "audio", "vq_")
# Those of any other mixture of experts score by a softmax.
_ROUTER_SCORES: dict[str, RouterScores | None] = {
    "afmoe": "sigmoid",
    "hy_v3": "sigmoid",
    "laguna": "sigmoid",
    "minimax_m2": "sigmoid",
    "minimax_m3_vl_text": "sigmoid",
    # By the square root of a softplus, and in its first layers by a table of tokens.
    "deepseek_v4": None,
}
# Found by trying; the classes themselves do not tell.
_FOUND = {
    "blt": "it reads bytes, and no tokens of a vocabulary",
    "doge": "in transformers its attention also sees the tokens that follow",
    "recurrent_gemma": "in transformers its recurrent layers take in the padding of a batch",
}


class LanguageModelKit(LmmKit):
    """Messages are text alone; the auto classes load whatever architecture the checkpoint names."""

    model_type = "llm"
    checkpoints = "any plain language model"
    takes_images = False
    takes_flash_attention = True
    language_prefixes = ("",)

    def load_config(self, path: str, *, trust_remote_code: bool) -> PretrainedConfig:
        return AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)

    def load_model(
        self, path: str, *, dtype: torch.dtype, attn_implementation: str, trust_remote_code: bool, **kwargs: Any
    ) -> PreTrainedModel:
        """Load the model with its generation cache off."""
        return self.adapt(
            AutoModelForCausalLM.from_pretrained(
                path,
                dtype=dtype,
                attn_implementation=attn_implementation,
                trust_remote_code=trust_remote_code,
                **kwargs,
            )
        )

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

    def encode_messages(
        self,
        processor: PreTrainedTokenizerBase,
        messages: Sequence[Message],
        *,
        images: Sequence[Image.Image],
        add_generation_prompt: bool,
        videos: Sequence[Video] = (),
    ) -> EncodedPrompt:
        """Encode a text conversation; raises UserError when it holds an image or a video."""
        if images or videos:
            given = f"{len(images)} image(s)" if images else f"{len(videos)} video(s)"
            raise UserError(f"a plain language model cannot take the {given} of this row")
        return EncodedPrompt.of_text(
            self.render_messages(processor, messages, add_generation_prompt=add_generation_prompt)
        )

    def render_messages(
        self,
        processor: PreTrainedTokenizerBase,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        videos: Sequence[Video] = (),
    ) -> list[int]:
        """Return the ids of a conversation in the chat template's form."""
        text = self.chat_text(processor, messages, add_generation_prompt=add_generation_prompt)
        return processor(text, add_special_tokens=False)["input_ids"]

    def chat_text(
        self, processor: PreTrainedTokenizerBase, messages: Sequence[Message], *, add_generation_prompt: bool
    ) -> str:
        # Chat templates of language models take text only; a list of text parts is joined as vLLM's server joins it.
        chat = [{"role": turn.role, "content": "\n".join(map(_text_of, turn.parts))} for turn in messages]
        return processor.apply_chat_template(chat, tokenize=False, add_generation_prompt=add_generation_prompt)

    def encode_text(
        self, processor: PreTrainedTokenizerBase, text: str, *, images: Sequence[Image.Image], opens: bool
    ) -> EncodedPrompt:
        """Encode a text with the chat template's marks, which has its start token where the template writes one."""
        if images:
            raise UserError(f"a plain language model cannot take the {len(images)} image(s) of a text")
        return EncodedPrompt.of_text(processor(text, add_special_tokens=False)["input_ids"])

    def placeholder_ids(self, processor: PreTrainedTokenizerBase) -> frozenset[int]:
        return frozenset()

    def media_token_ids(self, config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> set[int]:
        return set()

    def forward_inputs(
        self, config: PretrainedConfig, sequences: torch.Tensor, attention_mask: torch.Tensor, media: Media | None
    ) -> dict[str, torch.Tensor]:
        assert media is None, "a plain language model got media tensors"
        return super().forward_inputs(config, sequences, attention_mask, media)

    def router_scores(self, config: PretrainedConfig) -> RouterScores | None:
        return _ROUTER_SCORES.get(config.model_type, "softmax")

    def backbone_of(self, model: PreTrainedModel) -> torch.nn.Module:
        """Return what stands under the output layer; its name differs between architectures."""
        return model.base_model

    def language_model_of(self, model: PreTrainedModel) -> torch.nn.Module:
        return model.base_model

    def build_tiny(self, spec: TinyModelSpec, tokenizer_corpus: Iterable[str], folder: str | Path) -> None:
        from lmm_r1.lmm_kits.llm.tiny_model import build_tiny

        build_tiny(spec, tokenizer_corpus, folder)


def _text_of(part: Part) -> str:
    assert isinstance(part, TextPart), "the kit takes text alone"
    return part.text


def refusal_of(model_type: str) -> str | None:
    """Return why the model cannot be trained as a plain language model, for a message; None where it can.

    Models that can were tried with random weights: rows of a batch, padded on either side, give what each gives alone,
    and no token sees those behind it. Not tried, for want of a small config, were axk1, dbrx, deepseek_v3, dots1,
    falcon_h1, gemma3n_text, lfm2_moe, longcat_flash, youtu, zamba and zamba2.

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


KIT = LanguageModelKit()
