"""What the kits of Idefics 3's architecture share: images that are cut into tiles, each with a mark of its place."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import zip_longest
from types import MethodType
from typing import Any, ClassVar

import torch
from PIL import Image
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin
from transformers.modeling_outputs import BaseModelOutputWithPooling

from lmm_r1.data.messages import Message, images_of
from lmm_r1.data.videos import Video
from lmm_r1.errors import UserError
from lmm_r1.lmm_kits.encoding import (
    any_of,
    check_image_marks,
    check_placeholders,
    check_typed_media,
    part_lists,
)
from lmm_r1.lmm_kits.features import (
    FeaturePoint,
    exact_patch_positions,
    last_hidden,
    of_last_hidden,
    of_pooled,
    pooled,
)
from lmm_r1.lmm_kits.kit import EncodedPrompt, LmmKit, Media

IMAGE, AROUND_IMAGE, WHOLE_IMAGE = "<image>", "<fake_token_around_image>", "<global-img>"
END_OF_TURN = "<end_of_utterance>"
# As it is written where one tile is all: beside its marks a text is tokenized as beside those of any other.
SMALLEST_IMAGE = f"{AROUND_IMAGE}{WHOLE_IMAGE}{IMAGE}{AROUND_IMAGE}"
MEDIA_KEYS = ("pixel_values", "pixel_attention_mask")
_TILE = re.compile(r"<row_\d+_col_\d+>")


class IdeficsKit(LmmKit):
    """A kit of the family states its classes, and the class of vLLM's that runs it.

    An image is a grid of tiles, row by row, and then the whole of it as one more tile. Before each tile stands where it
    lies, and behind the last one what also begins each: `collapsed` takes all that for the image.
    """

    vision_prefixes = ("model.vision_model.",)
    projector_prefixes = ("model.connector.",)
    feature_points = (
        FeaturePoint(
            owner="model",
            method="get_image_features",
            projects=True,
            unread=("pixel_attention_mask",),
            items_in=1,
            take=pooled,
            give=of_pooled,
        ),
        FeaturePoint(owner="model.vision_model", take=last_hidden, give=of_last_hidden),
    )
    language_prefixes = ("model.text_model.", "lm_head.")
    engine_architecture: ClassVar[str]
    """The name under which `engine_plugin` has the class of `engine_model`: a server that takes chats keeps vLLM's own."""

    def adapt(self, model: PreTrainedModel) -> PreTrainedModel:
        """Turn the cache off, make patch positions exact in any dtype, and let the tower see every tile."""
        super().adapt(model)
        exact_patch_positions(model.model.vision_model.embeddings)
        model.model.get_image_features = MethodType(_features_of_all_tiles, model.model)
        return model

    def load_processor(
        self, path: str, *, trust_remote_code: bool, chat_template: str | None = None
    ) -> ProcessorMixin:
        """Load processor and tokenizer, whose end token is what ends a turn in the chat template.

        Raises:
            UserError: a part, a token or a package is lacking, or images are not brought to the tower's one size.
        """
        try:
            processor = super().load_processor(path, trust_remote_code=trust_remote_code, chat_template=chat_template)
        except ImportError as error:
            raise UserError(f"{path}: {error}") from error
        tokenizer = processor.tokenizer
        lacking = {IMAGE, AROUND_IMAGE, WHOLE_IMAGE} - tokenizer.get_vocab().keys()
        if lacking:
            raise UserError(
                f"{path}: the tokenizer of this checkpoint has no {' and no '.join(sorted(lacking))}; copy the original "
                "model's tokenizer files into it"
            )
        if not (processor.image_processor.do_resize and processor.image_processor.do_pad):
            raise UserError(
                f"{path}: do_resize or do_pad is false in this checkpoint's image processor, but all tiles must have the "
                "vision tower's one size; set both to true"
            )
        if END_OF_TURN in str(processor.chat_template) and END_OF_TURN in tokenizer.get_vocab():
            tokenizer.eos_token = END_OF_TURN
        return processor

    def encode_messages(
        self,
        processor: ProcessorMixin,
        messages: Sequence[Message],
        *,
        images: Sequence[Image.Image],
        add_generation_prompt: bool,
        videos: Sequence[Video] = (),
    ) -> EncodedPrompt:
        """Encode a conversation with its images; raises UserError when it holds what the processor cannot take.

        Pixel bounds of an image change nothing: the processor scales the longer side of every image, small or large, to
        one length before it cuts it into tiles.
        """
        text = self.chat_text(processor, messages, add_generation_prompt=add_generation_prompt)
        return self._encoded(processor, text, images=images, videos=videos)

    def encode_text(
        self, processor: ProcessorMixin, text: str, *, images: Sequence[Image.Image], opens: bool
    ) -> EncodedPrompt:
        others = [token for token in self.media_marks(processor.tokenizer) if token != IMAGE]
        check_image_marks(text, mark=IMAGE, media_tokens=others, given=len(images))
        return self._encoded(processor, text, images=images, videos=())

    def _encoded(
        self, processor: ProcessorMixin, text: str, *, images: Sequence[Image.Image], videos: Sequence[Video]
    ) -> EncodedPrompt:
        # The template writes the start token itself.
        if not images:
            return EncodedPrompt.of_text(processor.tokenizer(text, add_special_tokens=False)["input_ids"])
        batch = processor(text=[text], images=list(images), add_special_tokens=False, return_tensors="pt")
        token_ids = batch["input_ids"][0].tolist()
        return EncodedPrompt(
            token_ids=token_ids,
            engine_token_ids=self.collapsed(processor, token_ids),
            images=list(images),
            media={key: batch[key] for key in MEDIA_KEYS},
        )

    def chat_text(self, processor: ProcessorMixin, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        check_typed_media(messages, media_tokens=self.media_marks(processor.tokenizer))
        # SmolVLM's processor would hand the template settings of videos, and warn each time that they belong elsewhere.
        text = processor.tokenizer.apply_chat_template(
            part_lists(messages),
            chat_template=self.template_for(processor, messages),
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
        )
        check_placeholders(text.count(IMAGE), given=len(images_of(messages)), kind="images")
        return text

    def template_for(self, processor: ProcessorMixin, messages: Sequence[Message]) -> str:
        """Return the chat template that writes these messages."""
        return processor.chat_template

    def media_marks(self, tokenizer: PreTrainedTokenizerBase) -> list[str]:
        """Return all that stands for media in a text and in its tokens; of the marks of tiles, those that are tokens."""
        return [IMAGE, AROUND_IMAGE, WHOLE_IMAGE, *sorted(filter(_TILE.fullmatch, tokenizer.get_added_vocab()))]

    def render_messages(
        self,
        processor: ProcessorMixin,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        videos: Sequence[Video] = (),
    ) -> list[int]:
        text = self.chat_text(processor, messages, add_generation_prompt=add_generation_prompt)
        return self.engine_ids(processor, text, videos=videos)

    def engine_ids(self, processor: ProcessorMixin, text: str, *, videos: Sequence[Video]) -> list[int]:
        """Return the ids of a rendered chat with one placeholder per image or video."""
        ids = processor.tokenizer(text.replace(IMAGE, SMALLEST_IMAGE), add_special_tokens=False)["input_ids"]
        return self.collapsed(processor, ids)

    def collapsed(self, processor: ProcessorMixin, token_ids: Sequence[int]) -> list[int]:
        """Return ids with one placeholder for all tiles of an image, the marks of their places and the line breaks.

        Behind the mark that opens an image no placeholder stands: such a pair stays, being a video as vLLM takes it.
        """
        image, around, whole = processor.tokenizer.convert_tokens_to_ids([IMAGE, AROUND_IMAGE, WHOLE_IMAGE])
        ids, inside, closes = [], False, False
        for token, following in zip_longest(token_ids, token_ids[1:]):
            if not inside and token == around and following == image:
                ids.append(token)
            elif not inside:
                ids.append(image if token == around else token)
                inside, closes = token == around, False
            elif token == whole:
                closes = True
            elif token == around and closes:
                inside = False
        return ids

    def placeholder_ids(self, processor: ProcessorMixin) -> frozenset[int]:
        return frozenset({processor.tokenizer.convert_tokens_to_ids(IMAGE)})

    def media_texts(self, processor: ProcessorMixin) -> re.Pattern[str]:
        return any_of(self.media_marks(processor.tokenizer))

    def media_token_ids(self, config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> set[int]:
        return {config.image_token_id, *tokenizer.convert_tokens_to_ids(self.media_marks(tokenizer))}

    def engine_arguments(self, config: PretrainedConfig, *, max_images: int, max_videos: int) -> dict[str, Any]:
        limits = super().engine_arguments(config, max_images=max_images, max_videos=max_videos)
        return {**limits, "hf_overrides": {"architectures": [self.engine_architecture]}}

    def merge_media(self, media: Sequence[Media]) -> Media:
        """Join the tiles of several prompts, (1, tiles, ...) each, along their second dimension, in the order of their tokens."""
        return {key: torch.cat([item[key] for item in media], dim=1) for key in MEDIA_KEYS}

    def filler_media(self, config: PretrainedConfig) -> tuple[list[int], Media]:
        """Return a single tile with its placeholders; it is white, as transformers would take one of zeros for padding."""
        vision = config.vision_config
        side = vision.image_size
        media = {
            "pixel_values": torch.ones(1, 1, vision.num_channels, side, side),
            "pixel_attention_mask": torch.ones(1, 1, side, side),
        }
        patches = (side // vision.patch_size) ** 2
        return [config.image_token_id] * (patches // config.scale_factor**2), media

    def language_model_of(self, model: PreTrainedModel) -> torch.nn.Module:
        return model.model.text_model


def _features_of_all_tiles(
    model: PreTrainedModel, pixel_values: torch.Tensor, pixel_attention_mask: torch.Tensor | None = None, **_: Any
) -> BaseModelOutputWithPooling:
    """Return the features (tiles, tokens, H) of all tiles (1, tiles, 3, side, side).

    Transformers' own leaves tiles of zeros out, which it pads batches with, and for that a GPU waits for all that is
    computed before; the kit pads none. All tiles are whole, so that the mask of their pixels hides nothing.
    """
    hidden = model.vision_model(pixel_values=pixel_values.flatten(0, 1).to(model.dtype)).last_hidden_state
    return BaseModelOutputWithPooling(last_hidden_state=hidden, pooler_output=model.connector(hidden))
