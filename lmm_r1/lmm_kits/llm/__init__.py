"""The kit of every plain causal language model, whatever its `model_type`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import (
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
from lmm_r1.lmm_kits.kit import EncodedPrompt, LmmKit, Media, TinyModelSpec


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
        model = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, attn_implementation=attn_implementation, trust_remote_code=trust_remote_code, **kwargs
        )
        model.config.use_cache = False
        return model

    def load_processor(self, path: str, *, trust_remote_code: bool) -> PreTrainedTokenizerBase:
        """Load the tokenizer; raises UserError when the folder has none or it has no chat template."""
        try:
            tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
        except (OSError, ValueError) as error:
            raise UserError(f"{path}: no tokenizer can be loaded from this checkpoint ({error})") from error
        check_chat(tokenizer, tokenizer=tokenizer, path=path)
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
        return tokenizer

    def tokenizer_of(self, processor: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
        return processor

    def encode(
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
        return EncodedPrompt.of_text(self.render(processor, messages, add_generation_prompt=add_generation_prompt))

    def render(
        self, processor: PreTrainedTokenizerBase, messages: Sequence[Message], *, add_generation_prompt: bool
    ) -> list[int]:
        """Return the ids of a conversation in the chat template's form."""
        # Chat templates of language models take text only; a list of text parts is joined as vLLM's server joins it.
        chat = [{"role": turn.role, "content": "\n".join(map(_text_of, turn.parts))} for turn in messages]
        text = processor.apply_chat_template(chat, tokenize=False, add_generation_prompt=add_generation_prompt)
        return processor(text, add_special_tokens=False)["input_ids"]

    def placeholder_ids(self, processor: PreTrainedTokenizerBase) -> frozenset[int]:
        return frozenset()

    def media_token_ids(self, config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> set[int]:
        return set()

    def forward_inputs(
        self, config: PretrainedConfig, sequences: torch.Tensor, attention_mask: torch.Tensor, media: Media | None
    ) -> dict[str, torch.Tensor]:
        assert media is None, "a plain language model got media tensors"
        return super().forward_inputs(config, sequences, attention_mask, media)

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


KIT = LanguageModelKit()
