"""The kit of Phi-4-multimodal: images and text; its audio tower stays in the checkpoint, untrained.

It serves transformers' own format. Microsoft's original one (`phi4mm`) is another: `conversion.py` converts it.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import (
    Phi4MultimodalConfig,
    Phi4MultimodalForCausalLM,
    Phi4MultimodalModel,
    Phi4MultimodalProcessor,
    PreTrainedTokenizerBase,
)

from lmm_r1.data.messages import ImagePart, Message, Part, TextPart, VideoPart, images_of
from lmm_r1.data.videos import Video
from lmm_r1.errors import UserError
from lmm_r1.lmm_kits.encoding import (
    any_of,
    check_image_marks,
    check_placeholders,
    check_typed_media,
    images_refused,
    within_bounds,
    within_pixel_bounds,
)
from lmm_r1.lmm_kits.features import FeaturePoint
from lmm_r1.lmm_kits.kit import EncodedPrompt, LmmKit, Media, TinyModelSpec
from lmm_r1.lmm_kits.phi4_multimodal import crops, towers

logger = logging.getLogger(__name__)

VISION_ADAPTER_FOLDER = "vision-lora"


class Phi4MultimodalKit(LmmKit):
    """Text and images, which are cut into crops."""

    model_type = "phi4_multimodal"
    checkpoints = "Phi-4-multimodal"
    config_class = Phi4MultimodalConfig
    model_class = Phi4MultimodalForCausalLM
    processor_class = Phi4MultimodalProcessor
    vision_prefixes = (towers.VISION_TOWER,)
    projector_prefixes = (
        f"{towers.IMAGE_EMBED}img_projection_",
        f"{towers.IMAGE_EMBED}global_img_feature_extensor",
        f"{towers.IMAGE_EMBED}sub_img_feature_extensor",
    )
    feature_points = (
        FeaturePoint(
            owner=towers.IMAGE_EMBED.removesuffix("."),
            method="get_img_features",
            pixels="img_embeds",
            beside=("attention_mask",),
        ),
    )
    language_prefixes = ("model.embed_tokens.", "model.layers.", "model.norm.", "lm_head.")
    # The last layers of the vision tower belong here too; how many depends on the config, see `towers.dead_prefixes`.
    untrained_prefixes = (towers.AUDIO_EMBED, f"{towers.VISION_TOWER}head.", f"{towers.VISION_TOWER}post_layernorm.")
    # The projection runs once per image, so ranks with different numbers of images would gather its weights out of step.
    zero3_leaf_classes = ("Phi4MultimodalImageEmbedding",)

    def load_model(
        self, path: str, *, dtype: torch.dtype, attn_implementation: str, trust_remote_code: bool, **kwargs: Any
    ) -> Phi4MultimodalForCausalLM:
        """Load the model as `adapt` says; an adapter beside it is not loaded, which a warning says."""
        if (Path(path) / VISION_ADAPTER_FOLDER).is_dir():
            logger.warning(
                "%s: the adapter in %s/ is not loaded; convert Microsoft's original checkpoint to have it in the weights",
                path,
                VISION_ADAPTER_FOLDER,
            )
        return super().load_model(
            path, dtype=dtype, attn_implementation=attn_implementation, trust_remote_code=trust_remote_code, **kwargs
        )

    def adapt(self, model: Phi4MultimodalForCausalLM) -> Phi4MultimodalForCausalLM:
        """Turn the cache off, make attention in the towers bidirectional, and freeze dead weights.

        Weights are dead where no loss of ours reaches them: the audio tower, and of the vision tower its pooling head
        and the layers behind the one whose output is taken (`feature_layer`, the last but one in the release).
        """
        super().adapt(model)
        towers.attend_bidirectionally(model)
        dead = towers.dead_prefixes(model.config)
        for name, weight in model.named_parameters():
            if name.startswith(dead):
                weight.requires_grad_(False)
        return model

    def load_processor(
        self, path: str, *, trust_remote_code: bool, chat_template: str | None = None
    ) -> Phi4MultimodalProcessor:
        """Load processor and tokenizer; raises UserError when one of them, a token or a chat template is lacking."""
        processor = super().load_processor(path, trust_remote_code=trust_remote_code, chat_template=chat_template)
        tokenizer = processor.tokenizer
        if tokenizer.convert_tokens_to_ids(towers.TURN_END) in (None, tokenizer.unk_token_id):
            raise UserError(
                f"{path}: the tokenizer has no {towers.TURN_END}; copy the original model's tokenizer files into it"
            )
        tokenizer.eos_token = towers.TURN_END
        return processor

    def pixel_limits(self, processor: Phi4MultimodalProcessor) -> tuple[int, int]:
        return 1, _most_pixels(processor)

    def encode_messages(
        self,
        processor: Phi4MultimodalProcessor,
        messages: Sequence[Message],
        *,
        images: Sequence[Image.Image],
        add_generation_prompt: bool,
        videos: Sequence[Video] = (),
    ) -> EncodedPrompt:
        """Encode a conversation with its images; raises UserError when it holds what the processor cannot take."""
        if videos:
            raise UserError(f"this model cannot take the {len(videos)} video(s) of this row")
        most = _most_pixels(processor)
        resized = [
            within_pixel_bounds(image, min_pixels=part.min_pixels, max_pixels=part.max_pixels, most=most)
            for image, part in zip(images, images_of(messages), strict=True)
        ]
        text = self.chat_text(processor, messages, add_generation_prompt=add_generation_prompt)
        return self._encoded(processor, text, images=resized, opens=True)

    def encode_text(
        self, processor: Phi4MultimodalProcessor, text: str, *, images: Sequence[Image.Image], opens: bool
    ) -> EncodedPrompt:
        check_image_marks(text, mark=processor.image_token, media_tokens=(processor.audio_token,), given=len(images))
        return self._encoded(processor, text, images=images, opens=opens)

    def _encoded(
        self, processor: Phi4MultimodalProcessor, text: str, *, images: Sequence[Image.Image], opens: bool
    ) -> EncodedPrompt:
        # Not the runs of `token_ids` collapsed: images may stand side by side, and their placeholders are all alike.
        engine_token_ids = processor.tokenizer(text, add_special_tokens=False)["input_ids"]
        if not images:
            return EncodedPrompt.of_text(engine_token_ids)
        try:
            batch = processor(text=[text], images=list(images), add_special_tokens=False, return_tensors="pt")
        except ValueError as error:
            raise images_refused([image.size for image in images], error) from error
        return EncodedPrompt(
            token_ids=batch["input_ids"][0].tolist(),
            engine_token_ids=engine_token_ids,
            images=list(images),
            media={key: batch[key] for key in crops.MEDIA_KEYS},
        )

    def check_size(
        self, processor: Phi4MultimodalProcessor, part: ImagePart | VideoPart, *, width: int, height: int
    ) -> None:
        width, height = within_bounds(
            width=width,
            height=height,
            min_pixels=part.min_pixels,
            max_pixels=part.max_pixels,
            most=_most_pixels(processor),
        )
        settings = processor.image_processor
        side, patch = settings.size["height"], settings.patch_size
        # A tensor without memory: only its size is looked at.
        image = torch.empty(3, height, width, device="meta")
        try:
            settings.dynamic_preprocess(image, side, patch, side // patch, max_num=settings.dynamic_hd)
        except ValueError as error:
            raise images_refused([(width, height)], error) from error

    def chat_text(
        self, processor: Phi4MultimodalProcessor, messages: Sequence[Message], *, add_generation_prompt: bool
    ) -> str:
        return _render_text(processor, messages, add_generation_prompt=add_generation_prompt)

    def render_messages(
        self,
        processor: Phi4MultimodalProcessor,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        videos: Sequence[Video] = (),
    ) -> list[int]:
        text = self.chat_text(processor, messages, add_generation_prompt=add_generation_prompt)
        return processor.tokenizer(text, add_special_tokens=False)["input_ids"]

    def media_texts(self, processor: Phi4MultimodalProcessor) -> re.Pattern[str]:
        return any_of((processor.image_token, processor.audio_token))

    def media_token_ids(self, config: Phi4MultimodalConfig, tokenizer: PreTrainedTokenizerBase) -> set[int]:
        return {config.vision_config.image_token_id, config.audio_config.audio_token_id}

    def merge_media(self, media: Sequence[Media]) -> Media:
        return crops.merge_media(media)

    def filler_media(self, config: Phi4MultimodalConfig) -> tuple[list[int], Media]:
        return crops.filler_media(config)

    def language_model_of(self, model: Phi4MultimodalForCausalLM) -> Phi4MultimodalModel:
        return model.model

    def cut_inputs(
        self, language_model: Phi4MultimodalModel, inputs: Mapping[str, Any], tokens: slice
    ) -> dict[str, Any]:
        """Return the inputs for some tokens; the model would merge images into all embeddings, which is done here."""
        ids, images = inputs["input_ids"], {name: inputs.get(name) for name in crops.MEDIA_KEYS}
        embeds = language_model.embed_tokens_extend(ids, language_model.embed_tokens(ids), **images)
        merged = {**inputs, **dict.fromkeys(("input_ids", *crops.MEDIA_KEYS)), "inputs_embeds": embeds}
        return super().cut_inputs(language_model, merged, tokens)

    def build_tiny(self, spec: TinyModelSpec, tokenizer_corpus: Iterable[str], folder: str | Path) -> None:
        from lmm_r1.lmm_kits.phi4_multimodal.tiny_model import build_tiny

        build_tiny(spec, tokenizer_corpus, folder)


def _render_text(
    processor: Phi4MultimodalProcessor, messages: Sequence[Message], *, add_generation_prompt: bool
) -> str:
    check_typed_media(messages, media_tokens=(processor.image_token, processor.audio_token))
    # The original release's template takes texts only, so the images are written into them here.
    chat = [
        {
            "role": message.role,
            "content": "".join(_written(part, image_token=processor.image_token) for part in message.parts),
        }
        for message in messages
    ]
    # That template also puts the end token behind a finished conversation, where it is never sampled.
    text = processor.tokenizer.apply_chat_template(
        chat,
        chat_template=processor.chat_template,
        tokenize=False,
        add_generation_prompt=add_generation_prompt,
        eos_token="",
    )
    check_placeholders(text.count(processor.image_token), given=len(images_of(messages)), kind="images")
    return text


def _most_pixels(processor: Phi4MultimodalProcessor) -> int:
    """Pixels of the processor's largest number of crops."""
    image_processor = processor.image_processor
    return image_processor.dynamic_hd * image_processor.size["height"] * image_processor.size["width"]


def _written(part: Part, *, image_token: str) -> str:
    if isinstance(part, ImagePart):
        return image_token
    assert isinstance(part, TextPart), "the kit takes no videos"
    return part.text


KIT = Phi4MultimodalKit()
