"""The kit of Phi-3.5-vision, which transformers has no classes for: config, processor and model are here.

Microsoft's checkpoint was not at hand. The names of the weights are those that vLLM's and MLC's loaders of it list; the
pixels, the order of an image's tokens and the start token before every piece of text between images follow public copies
of Microsoft's processing code and vLLM's class. Nothing was run against the release itself: not its logits, nor what its
tokenizer makes of the pieces, nor long contexts. vLLM, started on Microsoft's own folder, stops at the end tokens named there,
which `<|end|>` is reported not to be among; folders saved from here name it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    PreTrainedTokenizerBase,
)

from lmm_r1.data.messages import ImagePart, Message, TextPart, VideoPart, images_of
from lmm_r1.data.videos import Video
from lmm_r1.errors import UserError
from lmm_r1.lmm_kits.encoding import (
    chat_of,
    check_image_marks,
    check_placeholders,
    check_typed_media,
    images_refused,
)
from lmm_r1.lmm_kits.features import FeaturePoint
from lmm_r1.lmm_kits.kit import EncodedPrompt, LmmKit, Media, TinyModelSpec
from lmm_r1.lmm_kits.phi3_v.configuration import CLIP_LAYERS, Phi3VConfig
from lmm_r1.lmm_kits.phi3_v.modeling import Phi3VForCausalLM, Phi3VModel
from lmm_r1.lmm_kits.phi3_v.processing import (
    CROP,
    IMAGE_TAG,
    IMAGE_TOKEN,
    Phi3VImageProcessor,
    Phi3VProcessor,
    tokens_of_grid,
)

END_TOKEN = "<|end|>"
MEDIA_KEYS = ("pixel_values", "image_sizes")
# The mark of an image, whatever its number.
IMAGE_TAG_FORM = "<|image_N|>"
_IMAGES = "model.vision_embed_tokens."
_TOWER = f"{_IMAGES}img_processor.vision_model."
_LAST_LAYER = CLIP_LAYERS - 1


class Phi3VKit(LmmKit):
    """Text and images, which are cut into crops; config, processor and model are those of this folder."""

    model_type = "phi3_v"
    checkpoints = "Phi-3.5-vision"
    config_class = Phi3VConfig
    model_class = Phi3VForCausalLM
    processor_class = Phi3VProcessor
    takes_flash_attention = True
    vision_prefixes = (
        f"{_TOWER}embeddings.",
        f"{_TOWER}pre_layrnorm.",
        *(f"{_TOWER}encoder.layers.{layer}." for layer in range(_LAST_LAYER)),
    )
    projector_prefixes = (f"{_IMAGES}img_projection.", f"{_IMAGES}glb_GN", f"{_IMAGES}sub_GN")
    feature_points = (FeaturePoint(owner=_TOWER.removesuffix(".")),)
    language_prefixes = ("model.embed_tokens.", "model.layers.", "model.norm.", "lm_head.")
    # The projector reads the last layer but one, in the release and in tiny models, which keep the tower's depth.
    untrained_prefixes = (f"{_TOWER}encoder.layers.{_LAST_LAYER}.", f"{_TOWER}post_layernorm.")

    def load_model(
        self, path: str, *, dtype: torch.dtype, attn_implementation: str, trust_remote_code: bool, **kwargs: Any
    ) -> Phi3VForCausalLM:
        """Load the model with its cache off; raises UserError where the checkpoint lacks some of its weights."""
        model, report = Phi3VForCausalLM.from_pretrained(
            path, dtype=dtype, attn_implementation=attn_implementation, output_loading_info=True, **kwargs
        )
        # A critic's checkpoint has no output layer, and names its value head.
        absent = {"lm_head.weight"} if hasattr(model.config, "value_head_prefix") else set()
        missing = sorted(set(report["missing_keys"]) - absent)
        if missing:
            raise UserError(
                f"{path}: {len(missing)} weights are not in this checkpoint, {missing[0]} among them; copy the original "
                "model's weight files into it"
            )
        return self.adapt(model)

    def load_processor(
        self, path: str, *, trust_remote_code: bool, chat_template: str | None = None
    ) -> Phi3VProcessor:
        """Load processor and tokenizer; raises UserError when one of them, a token or a chat template is lacking.

        The end token becomes `<|end|>`, with which the chat template ends a turn; the release names `<|endoftext|>`.
        """
        processor = super().load_processor(path, trust_remote_code=trust_remote_code, chat_template=chat_template)
        tokenizer = processor.tokenizer
        lacking = {IMAGE_TOKEN, END_TOKEN} - tokenizer.get_vocab().keys()
        if lacking:
            raise UserError(
                f"{path}: the tokenizer of this checkpoint has no {' and no '.join(sorted(lacking))}; copy the original "
                "model's tokenizer files into it"
            )
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        tokenizer.eos_token = END_TOKEN
        return processor

    def encode_messages(
        self,
        processor: Phi3VProcessor,
        messages: Sequence[Message],
        *,
        images: Sequence[Image.Image],
        add_generation_prompt: bool,
        videos: Sequence[Video] = (),
    ) -> EncodedPrompt:
        """Encode a conversation with its images; raises UserError when it holds what the processor cannot take.

        Pixel bounds of an image change nothing: every image, small or large, is scaled to as many crops as the
        processor's `num_crops` allows for its aspect ratio.
        """
        text = self.chat_text(processor, messages, add_generation_prompt=add_generation_prompt)
        return self._encoded(processor, text, images=images)

    def encode_text(
        self, processor: Phi3VProcessor, text: str, *, images: Sequence[Image.Image], opens: bool
    ) -> EncodedPrompt:
        """Encode a text with the chat template's marks, those of images `<|image_1|>`, `<|image_2|>` in every text."""
        check_image_marks(
            IMAGE_TAG.sub(IMAGE_TAG_FORM, text), mark=IMAGE_TAG_FORM, media_tokens=(IMAGE_TOKEN,), given=len(images)
        )
        encoded = self._encoded(processor, text, images=images)
        if encoded.engine_token_ids.count(processor.image_token_id) != len(images):
            raise UserError(
                "two images stand side by side in the text, where nobody can tell them apart; write something between"
            )
        start = processor.tokenizer.bos_token
        if (
            opens
            or start is None
            or text.startswith(start)
            or encoded.token_ids[:1] != [processor.tokenizer.bos_token_id]
        ):
            return encoded
        return replace(encoded, token_ids=encoded.token_ids[1:], engine_token_ids=encoded.engine_token_ids[1:])

    def _encoded(self, processor: Phi3VProcessor, text: str, *, images: Sequence[Image.Image]) -> EncodedPrompt:
        if not images:
            return EncodedPrompt.of_text(processor.token_ids(text, counts=[]))
        try:
            batch = processor(text=[text], images=list(images), return_tensors="pt")
        except ValueError as error:
            raise images_refused([image.size for image in images], error) from error
        return EncodedPrompt.of_batch(
            batch, images=images, media_keys=MEDIA_KEYS, placeholders=self.placeholder_ids(processor)
        )

    def check_size(self, processor: Phi3VProcessor, part: ImagePart | VideoPart, *, width: int, height: int) -> None:
        try:
            processor.image_processor.num_image_tokens(width=width, height=height)
        except ValueError as error:
            raise images_refused([(width, height)], error) from error

    def chat_text(self, processor: Phi3VProcessor, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        return _render_text(processor, messages, add_generation_prompt=add_generation_prompt)

    def render_messages(
        self,
        processor: Phi3VProcessor,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        videos: Sequence[Video] = (),
    ) -> list[int]:
        text = self.chat_text(processor, messages, add_generation_prompt=add_generation_prompt)
        return processor.token_ids(text, counts=[1] * len(images_of(messages)))

    def media_texts(self, processor: Phi3VProcessor) -> re.Pattern[str]:
        """Return the placeholder, and the tags of images, which are no tokens but plain text."""
        return re.compile(f"{IMAGE_TAG.pattern}|{re.escape(IMAGE_TOKEN)}")

    def media_token_ids(self, config: Phi3VConfig, tokenizer: PreTrainedTokenizerBase) -> set[int]:
        """Return the placeholder's id.

        A sampled `<|image_1|>` is ordinary text to the model and cannot be banned; it matters only where it comes back
        in a later prompt, which is then refused.
        """
        return {config.image_token_id, tokenizer.convert_tokens_to_ids(IMAGE_TOKEN)}

    def filler_media(self, config: Phi3VConfig) -> tuple[list[int], Media]:
        """Return an image of a single crop, in grey, with its placeholders."""
        media = {"pixel_values": torch.zeros(1, 2, 3, CROP, CROP), "image_sizes": torch.tensor([[CROP, CROP]])}
        tokens = tokens_of_grid(1, 1, crop_tokens=config.image_settings["num_img_tokens"])
        return [config.image_token_id] * tokens, media

    def language_model_of(self, model: Phi3VForCausalLM) -> Phi3VModel:
        return model.model

    def cut_inputs(self, language_model: Phi3VModel, inputs: Mapping[str, Any], tokens: slice) -> dict[str, Any]:
        """Return the inputs for some tokens; the model would merge images into all embeddings, which is done here."""
        if inputs.get("pixel_values") is None:
            return super().cut_inputs(language_model, inputs, tokens)
        embeds = language_model.with_images(inputs["input_ids"], inputs["pixel_values"], inputs["image_sizes"])
        merged = {**inputs, **dict.fromkeys(("input_ids", *MEDIA_KEYS)), "inputs_embeds": embeds}
        return super().cut_inputs(language_model, merged, tokens)

    def build_tiny(self, spec: TinyModelSpec, tokenizer_corpus: Iterable[str], folder: str | Path) -> None:
        from lmm_r1.lmm_kits.phi3_v.tiny_model import build_tiny

        build_tiny(spec, tokenizer_corpus, folder)


def _render_text(processor: Phi3VProcessor, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
    # The tags that stand for images are no tokens but plain text, so any number of them can be typed.
    typed = {
        tag.group()
        for message in messages
        for part in message.parts
        if isinstance(part, TextPart)
        for tag in IMAGE_TAG.finditer(part.text)
    }
    check_typed_media(messages, media_tokens=(IMAGE_TOKEN, *sorted(typed)))
    text = processor.apply_chat_template(
        chat_of(messages), tokenize=False, add_generation_prompt=add_generation_prompt
    )
    check_placeholders(len(IMAGE_TAG.findall(text)), given=len(images_of(messages)), kind="images")
    return text


def register_auto_classes() -> None:
    """Make transformers' Auto classes know config, processors and models under `phi3_v`; may be called again."""
    AutoConfig.register(Phi3VConfig.model_type, Phi3VConfig, exist_ok=True)
    # One class for either backend: it takes Pillow's images and makes tensors.
    AutoImageProcessor.register(
        Phi3VConfig,
        image_processor_classes={"pil": Phi3VImageProcessor, "torchvision": Phi3VImageProcessor},
        exist_ok=True,
    )
    AutoProcessor.register(Phi3VConfig, Phi3VProcessor, exist_ok=True)
    AutoModel.register(Phi3VConfig, Phi3VModel, exist_ok=True)
    AutoModelForCausalLM.register(Phi3VConfig, Phi3VForCausalLM, exist_ok=True)
    AutoModelForImageTextToText.register(Phi3VConfig, Phi3VForCausalLM, exist_ok=True)


register_auto_classes()
KIT = Phi3VKit()
