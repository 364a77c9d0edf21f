"""The kit of Gemma 3 with images: square images of one size, whose tokens attend to each other in both directions."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import torch
from PIL import Image
from transformers import Gemma3Config, Gemma3ForConditionalGeneration, Gemma3Processor, PreTrainedTokenizerBase

from lmm_r1.data.messages import Message, images_of
from lmm_r1.data.videos import Video
from lmm_r1.errors import UserError
from lmm_r1.lmm_kits.encoding import (
    adds_special_tokens,
    any_of,
    chat_ids,
    chat_of,
    check_image_marks,
    check_placeholders,
    check_typed_media,
)
from lmm_r1.lmm_kits.features import FeaturePoint, last_hidden, of_last_hidden, of_pooled, pooled
from lmm_r1.lmm_kits.kit import EncodedPrompt, LmmKit, Media, TinyModelSpec

END_OF_TURN = "<end_of_turn>"
MEDIA_TOKENS = ("<start_of_image>", "<end_of_image>", "<image_soft_token>")
# The class of `engine_model`, which vLLM knows by a name of its own: a server in the same environment that takes chats
# goes on with vLLM's class.
ENGINE_ARCHITECTURE = "LmmR1Gemma3ForConditionalGeneration"


class Gemma3Kit(LmmKit):
    """Text and images; vLLM runs it with a class of its own (`engine_model`)."""

    model_type = "gemma3"
    checkpoints = "Gemma 3 (4B, 12B, 27B)"
    config_class = Gemma3Config
    model_class = Gemma3ForConditionalGeneration
    processor_class = Gemma3Processor
    engine_disagreement = (
        "vLLM's CPU backend lets a token of an image attend only to those before it, where the model lets all tokens of "
        "one image attend to each other"
    )
    vision_prefixes = ("model.vision_tower.",)
    projector_prefixes = ("model.multi_modal_projector.",)
    feature_points = (
        FeaturePoint(owner="model", method="get_image_features", projects=True, take=pooled, give=of_pooled),
        FeaturePoint(owner="model.vision_tower", take=last_hidden, give=of_last_hidden),
    )
    # The releases have no pooling head; one in a checkpoint would be computed, but nothing reads its output.
    untrained_prefixes = ("model.vision_tower.head.",)

    def load_model(
        self, path: str, *, dtype: torch.dtype, attn_implementation: str, trust_remote_code: bool, **kwargs: Any
    ) -> Gemma3ForConditionalGeneration:
        """Load the model with its generation cache off; raises UserError for flash attention.

        Transformers' flash attention takes no mask: without a warning, images would be attended to causally.
        """
        if "flash" in attn_implementation:
            raise UserError(
                f"--ds.attn_implementation {attn_implementation}: flash attention cannot let the tokens of an image "
                "attend to each other in both directions, as Gemma 3 does; give --ds.attn_implementation sdpa"
            )
        return super().load_model(
            path, dtype=dtype, attn_implementation=attn_implementation, trust_remote_code=trust_remote_code, **kwargs
        )

    def load_processor(
        self, path: str, *, trust_remote_code: bool, chat_template: str | None = None
    ) -> Gemma3Processor:
        """Load processor and tokenizer, whose end token is what ends an assistant's turn.

        Released tokenizers name `<eos>`, which ends a document, while the chat template ends turns with `<end_of_turn>`
        and the generation config stops at both. Training must learn, and rollouts count as ended, the one that is
        sampled.

        Raises:
            UserError: the checkpoint lacks processor, tokenizer or chat template, or wants images cut into crops.
        """
        processor = super().load_processor(path, trust_remote_code=trust_remote_code, chat_template=chat_template)
        if processor.image_processor.do_pan_and_scan:
            raise UserError(
                f"{path}: do_pan_and_scan is true in this checkpoint's image processor, but crops of images are "
                "supported neither in training (transformers' processor does not follow the setting) nor in rollouts; "
                "set it to false"
            )
        tokenizer = processor.tokenizer
        if END_OF_TURN in str(processor.chat_template) and END_OF_TURN in tokenizer.get_vocab():
            tokenizer.eos_token = END_OF_TURN
        return processor

    def encode_messages(
        self,
        processor: Gemma3Processor,
        messages: Sequence[Message],
        *,
        images: Sequence[Image.Image],
        add_generation_prompt: bool,
        videos: Sequence[Video] = (),
    ) -> EncodedPrompt:
        """Encode a conversation with its images; raises UserError when it holds what the processor cannot take.

        Pixel bounds of an image change nothing: the processor scales every image, whatever its shape, to one square
        size, which always becomes the same number of tokens (256 in the releases).
        """
        text = self.chat_text(processor, messages, add_generation_prompt=add_generation_prompt)
        return self._encoded(processor, text, images=images, opens=True)

    def encode_text(
        self, processor: Gemma3Processor, text: str, *, images: Sequence[Image.Image], opens: bool
    ) -> EncodedPrompt:
        _, *others = MEDIA_TOKENS
        check_image_marks(text, mark=processor.boi_token, media_tokens=others, given=len(images))
        return self._encoded(processor, text, images=images, opens=opens)

    def _encoded(
        self, processor: Gemma3Processor, text: str, *, images: Sequence[Image.Image], opens: bool
    ) -> EncodedPrompt:
        special = opens and adds_special_tokens(processor.tokenizer, text=text)
        if not images:
            return EncodedPrompt.of_text(processor.tokenizer(text, add_special_tokens=special)["input_ids"])
        batch = processor(text=[text], images=list(images), add_special_tokens=special, return_tensors="pt")
        return EncodedPrompt.of_batch(
            batch, images=images, media_keys=("pixel_values",), placeholders=self.placeholder_ids(processor)
        )

    def chat_text(
        self, processor: Gemma3Processor, messages: Sequence[Message], *, add_generation_prompt: bool
    ) -> str:
        """Return the chat as text, with one `<start_of_image>` per image."""
        return _render_text(processor, messages, add_generation_prompt=add_generation_prompt)

    def render_messages(
        self,
        processor: Gemma3Processor,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        videos: Sequence[Video] = (),
    ) -> list[int]:
        text = self.chat_text(processor, messages, add_generation_prompt=add_generation_prompt)
        # The blank lines that the processor puts around an image grow together with line breaks of the text beside it.
        token = processor.tokenizer.image_token
        image = processor.full_image_sequence.replace(token * processor.image_seq_length, token)
        return chat_ids(processor.tokenizer, text.replace(processor.boi_token, image))

    def placeholder_ids(self, processor: Gemma3Processor) -> frozenset[int]:
        # (processor.image_token_id is that of <start_of_image>)
        return frozenset({processor.tokenizer.image_token_id})

    def media_texts(self, processor: Gemma3Processor) -> re.Pattern[str]:
        return any_of(MEDIA_TOKENS)

    def media_token_ids(self, config: Gemma3Config, tokenizer: PreTrainedTokenizerBase) -> set[int]:
        return {config.boi_token_index, config.eoi_token_index, config.image_token_index}

    def engine_arguments(self, config: Gemma3Config, *, max_images: int, max_videos: int) -> dict[str, Any]:
        limits = super().engine_arguments(config, max_images=max_images, max_videos=max_videos)
        return {**limits, "hf_overrides": {"architectures": [ENGINE_ARCHITECTURE]}}

    def forward_inputs(
        self, config: Gemma3Config, sequences: torch.Tensor, attention_mask: torch.Tensor, media: Media | None
    ) -> dict[str, torch.Tensor]:
        """Return positions (B, T), and for a batch with images its media and which tokens are an image's, (B, T).

        Without those token types the model attends causally within images, and does not say so.
        """
        inputs = super().forward_inputs(config, sequences, attention_mask, media)
        if media is None:
            return inputs
        return {**inputs, "token_type_ids": (sequences == config.image_token_index).long()}

    def bidirectional_token_ids(self, config: Gemma3Config) -> frozenset[int]:
        """Return the placeholder: the tokens of an image see one another, within the window of sliding layers."""
        return frozenset({config.image_token_index})

    def filler_media(self, config: Gemma3Config) -> tuple[list[int], Media]:
        """Return an image in black between its markers; there is no smaller one, as all images have one size."""
        vision = config.vision_config
        ids = [
            config.boi_token_index,
            *[config.image_token_index] * config.mm_tokens_per_image,
            config.eoi_token_index,
        ]
        return ids, {"pixel_values": torch.zeros(1, vision.num_channels, vision.image_size, vision.image_size)}

    def build_tiny(self, spec: TinyModelSpec, tokenizer_corpus: Iterable[str], folder: str | Path) -> None:
        from lmm_r1.lmm_kits.gemma3.tiny_model import build_tiny

        build_tiny(spec, tokenizer_corpus, folder)


def _render_text(processor: Gemma3Processor, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
    """Return the chat as text, with one `<start_of_image>` per image."""
    check_typed_media(messages, media_tokens=MEDIA_TOKENS)
    chat = [_with_one_system_text(turn) for turn in chat_of(messages)]
    try:
        text = processor.apply_chat_template(chat, tokenize=False, add_generation_prompt=add_generation_prompt)
    except jinja2.TemplateError as error:
        roles = ", ".join(message.role for message in messages)
        raise UserError(
            f"the checkpoint's chat template refuses the messages of a row, whose roles are {roles} ({error}); after a "
            "system turn, which is text, user and assistant must take turns, the user first"
        ) from error
    check_placeholders(text.count(processor.boi_token), given=len(images_of(messages)), kind="images")
    return text


def _with_one_system_text(turn: Mapping[str, Any]) -> Mapping[str, Any]:
    """Join the texts of a system turn: of several parts the released template writes the first and drops the others."""
    content = turn["content"]
    if turn["role"] != "system" or isinstance(content, str) or any(part["type"] != "text" for part in content):
        return turn
    return {**turn, "content": "\n".join(part["text"] for part in content)}


KIT = Gemma3Kit()
