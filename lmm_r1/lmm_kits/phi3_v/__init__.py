"""The kit of Phi-3.5-vision, which transformers has no classes for: config, processor and model are here.

Microsoft's checkpoint was not available. The names of the weights are those in vLLM's and MLC's loaders. The pixels, the
order of an image's tokens and the start token before every piece of text between images follow public copies of
Microsoft's processing code and vLLM's class. Nothing was tested with the release itself: neither its logits, nor its
tokenizer on the pieces, nor long contexts. vLLM, started on Microsoft's own folder, stops at the end tokens of that folder,
which reportedly do not include `<|end|>`; folders saved from here do include it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import count
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

from lmm_r1.data.messages import Message, Part, TextPart
from lmm_r1.errors import UserError
from lmm_r1.lmm_kits.encoding import check_image_marks, check_tokens
from lmm_r1.lmm_kits.features import FeaturePoint
from lmm_r1.lmm_kits.kit import EncodedPrompt, LmmKit, Media, RawMedia
from lmm_r1.lmm_kits.phi3_v.modeling import (
    CLIP_LAYERS,
    CROP,
    IMAGE_TAG,
    IMAGE_TOKEN,
    Phi3VConfig,
    Phi3VForCausalLM,
    Phi3VImageProcessor,
    Phi3VModel,
    Phi3VProcessor,
    Phi3VVisionTower,
    tokens_of_grid,
)
from lmm_r1.lmm_kits.tiny_model import HEAD_DIM, TinyModelSpec, TinyTokens, show_places, text_settings

END_TOKEN = "<|end|>"
# The mark of an image, whatever its number.
IMAGE_TAG_FORM = "<|image_N|>"
_IMAGES = "model.vision_embed_tokens."
_TOWER = f"{_IMAGES}img_processor.vision_model."
_LAST_LAYER = CLIP_LAYERS - 1
TINY_TOKENS = TinyTokens(
    special=(
        *("<unk>", "<s>", "</s>", "<|endoftext|>", "<|assistant|>", "<|system|>"),
        *(END_TOKEN, "<|user|>", IMAGE_TOKEN),
    ),
    end=END_TOKEN,
    # Every role alike, nothing before the first turn, only text as content.
    chat_template="""\
{%- for message in messages -%}
{{- '<|' + message.role + '|>\\n' + message.content + '<|end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt and messages[-1].role != 'assistant' -%}{{- '<|assistant|>\\n' -}}{%- endif -%}
""",
)
# The tiny tower is as deep as the release's, because the name of the one layer that is never trained counts the layers. It
# is narrow instead, with patches so large that a crop of 336 pixels has 6 x 6 of them, which become 3 x 3 tokens.
CLIP_WIDTH = 32
PATCH_SIZE = 56
CROP_TOKENS = 9
# Of the layers' output matrices, of which 2 x 24 add up.
BRANCH_SCALE = 0.1


class Phi3VKit(LmmKit):
    """Text and images, which are cut into crops; config, processor and model are those of this folder.

    Pixel bounds of an image change nothing: every image, small or large, is scaled to as many crops as the processor's
    `num_crops` allows for its aspect ratio.
    """

    model_type = "phi3_v"
    checkpoints = "Phi-3.5-vision"
    config_class = Phi3VConfig
    model_class = Phi3VForCausalLM
    processor_class = Phi3VProcessor
    media_keys = ("pixel_values", "image_sizes")
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
    tiny_tokens = TINY_TOKENS

    def prepare_processor(self, processor: Phi3VProcessor, path: str) -> None:
        """Set the end token to `<|end|>`, with which the chat template ends a turn; the release names `<|endoftext|>`.

        Raises UserError if a token is missing.
        """
        tokenizer = processor.tokenizer
        check_tokens(tokenizer, {IMAGE_TOKEN, END_TOKEN}, path=path)
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        tokenizer.eos_token = END_TOKEN

    def encode_text(
        self, processor: Phi3VProcessor, text: str, *, images: Sequence[Image.Image], opens: bool
    ) -> EncodedPrompt:
        """Encode a text with the chat template's marks, those of images `<|image_1|>`, `<|image_2|>` in every text."""
        check_image_marks(
            IMAGE_TAG.sub(IMAGE_TAG_FORM, text), mark=IMAGE_TAG_FORM, media_tokens=(IMAGE_TOKEN,), given=len(images)
        )
        encoded = self.encode_chat(processor, text, RawMedia(images=images))
        if self.collapsed(processor, encoded.token_ids).count(processor.image_token_id) != len(images):
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

    def adds_start(self, processor: Phi3VProcessor, text: str, *, opens: bool) -> bool:
        """Return True: the tokenizer may begin each piece of text between images with its start token."""
        return True

    def tokens_of_size(self, processor: Phi3VProcessor, width: int, height: int) -> int:
        return processor.image_processor.num_image_tokens(width=width, height=height)

    def images_written(self, processor: Phi3VProcessor, text: str) -> int:
        return len(IMAGE_TAG.findall(text))

    def template_turns(self, messages: Sequence[Message]) -> list[dict[str, str]]:
        """Return the turns with only text: images are numbered through the conversation, each tag on a line of its own."""
        numbers = count(1)

        def written(part: Part) -> str:
            return part.text if isinstance(part, TextPart) else f"<|image_{next(numbers)}|>\n"

        return [{"role": message.role, "content": "".join(map(written, message.parts))} for message in messages]

    def engine_ids(self, processor: Phi3VProcessor, text: str, *, opens: bool = True) -> list[int]:
        return processor.token_ids(text, counts=[1] * self.images_written(processor, text))

    def media_texts(self, processor: Phi3VProcessor) -> re.Pattern[str]:
        """Return a pattern of the placeholder and of the tags of images, which are not tokens but plain text."""
        return re.compile(f"{IMAGE_TAG.pattern}|{re.escape(IMAGE_TOKEN)}")

    def media_token_ids(self, config: Phi3VConfig, tokenizer: PreTrainedTokenizerBase) -> set[int]:
        """Return the placeholder's id.

        A sampled `<|image_1|>` is ordinary text to the model and cannot be banned; it matters only if it becomes part of
        a later prompt, which is then refused.
        """
        return {config.image_token_id, tokenizer.convert_tokens_to_ids(IMAGE_TOKEN)}

    def filler_media(self, config: Phi3VConfig) -> tuple[list[int], Media]:
        """Return an image of a single crop, in grey, with its placeholders."""
        media = {"pixel_values": torch.zeros(1, 2, 3, CROP, CROP), "image_sizes": torch.tensor([[CROP, CROP]])}
        tokens = tokens_of_grid(1, 1, crop_tokens=config.image_settings["num_img_tokens"])
        return [config.image_token_id] * tokens, media

    def language_model_of(self, model: Phi3VForCausalLM) -> Phi3VModel:
        return model.model

    def cut_inputs(self, language_model: Phi3VModel, inputs: Mapping[str, Any], tokens: slice) -> dict[str, object]:
        """Return the inputs for some tokens; the model would merge images into all embeddings, so this method merges them first."""
        if inputs.get("pixel_values") is None:
            return super().cut_inputs(language_model, inputs, tokens)
        embeds = language_model.with_images(inputs["input_ids"], inputs["pixel_values"], inputs["image_sizes"])
        merged = {**inputs, **dict.fromkeys(("input_ids", *self.media_keys)), "inputs_embeds": embeds}
        return super().cut_inputs(language_model, merged, tokens)

    def tiny_config(self, spec: TinyModelSpec, tokenizer: PreTrainedTokenizerBase) -> Phi3VConfig:
        settings = text_settings(spec, tokenizer)
        settings["bos_token_id"] = tokenizer.convert_tokens_to_ids("<s>")
        return Phi3VConfig(
            **settings,
            original_max_position_embeddings=settings["max_position_embeddings"],
            image_token_id=tokenizer.convert_tokens_to_ids(IMAGE_TOKEN),
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

    @torch.no_grad()
    def tune_tiny(self, model: Phi3VForCausalLM, spec: TinyModelSpec) -> None:
        """Rescale the deep tower so that its output still shows patches and places, as a trained tower's does."""
        tower = model.model.vision_embed_tokens.img_processor["vision_model"]
        assert isinstance(tower, Phi3VVisionTower)
        patches = tower.embeddings.patch_embedding.weight
        torch.nn.init.normal_(patches, std=patches[0].numel() ** -0.5)
        show_places(tower.embeddings.position_embedding.weight)
        for layer in tower.encoder.layers:
            for branch in (layer.self_attn.out_proj, layer.mlp.fc2):
                branch.weight *= BRANCH_SCALE

    def tiny_parts(self) -> dict[str, object]:
        return {"image_processor": Phi3VImageProcessor(num_img_tokens=CROP_TOKENS)}


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
