"""The kit of LLaVA-OneVision: the whole image as one crop, and a grid of crops whose padding is cut off behind the tower."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from PIL import Image
from transformers import (
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    LlavaOnevisionProcessor,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.llava_onevision.modeling_llava_onevision import LlavaOnevisionModel, image_size_to_num_patches

from lmm_r1.data.messages import Message, images_of, videos_of
from lmm_r1.data.videos import Video
from lmm_r1.errors import UserError
from lmm_r1.lmm_kits.encoding import (
    any_of,
    check_image_marks,
    check_placeholders,
    check_typed_media,
    part_lists,
    within_pixel_bounds,
)
from lmm_r1.lmm_kits.features import FeaturePoint, last_layer, of_last_layer
from lmm_r1.lmm_kits.kit import EncodedPrompt, LmmKit, Media, TinyModelSpec
from lmm_r1.lmm_kits.video_frames import channels_first


def take_videos_of_any_length(model: LlavaOnevisionModel) -> None:
    """Let the model take frames (F, 3, side, side) with `image_sizes_videos`; without these it stays transformers' own.

    Transformers takes videos of one length alone, and runs the tower for images and once more for videos, in which
    ZeRO-3's ranks would wait for one another.
    """
    model.forward = MethodType(_forward, model)


def _forward(
    model: LlavaOnevisionModel,
    input_ids: torch.Tensor | None = None,
    *,
    pixel_values: torch.Tensor | None = None,
    image_sizes: torch.Tensor | None = None,
    batch_num_images: torch.Tensor | None = None,
    pixel_values_videos: torch.Tensor | None = None,
    image_sizes_videos: torch.Tensor | None = None,
    **others: Any,
) -> Any:
    """Run the model on ids (B, T), in which the placeholders of images and of videos are in the order of their tensors.

    Args:
        pixel_values: (I, crops, 3, side, side) of images that are all cut, with empty crops behind those of smaller ones.
        pixel_values_videos: (F, 3, side, side), the frames of all videos.
        image_sizes_videos: (V, 3): frames, height and width of each video.
    """
    if pixel_values_videos is None or image_sizes_videos is None:
        return LlavaOnevisionModel.forward(
            model,
            input_ids,
            pixel_values=pixel_values,
            image_sizes=image_sizes,
            batch_num_images=batch_num_images,
            pixel_values_videos=pixel_values_videos,
            **others,
        )
    # In the order of transformers' own forward, in which ZeRO-3's other ranks may be.
    embeds = model.get_input_embeddings()(input_ids)
    lengths = image_sizes_videos[:, 0].tolist()
    images, videos = _features(model, pixel_values, image_sizes, pixel_values_videos, lengths)
    for token, features in ((model.config.image_token_id, images), (model.config.video_token_id, videos)):
        if features is not None:
            embeds = embeds.masked_scatter((input_ids == token)[..., None], features.to(embeds.dtype))
    return LlavaOnevisionModel.forward(model, **{**others, "inputs_embeds": embeds})


def _features(
    model: LlavaOnevisionModel,
    pixel_values: torch.Tensor | None,
    image_sizes: torch.Tensor | None,
    frames: torch.Tensor,
    lengths: list[int],
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Return what stands in the places of all images, (N, H) or None, and of all videos, (M, H)."""
    config, crops = model.config, []
    if pixel_values is not None and image_sizes is not None:
        side = config.vision_config.image_size
        crops = [
            image[: image_size_to_num_patches(size, config.image_grid_pinpoints, side)]
            for image, size in zip(pixel_values, image_sizes, strict=True)
        ]
    # A single layer and strategy: `load_config` refuses others.
    hidden = model.vision_tower(torch.cat([*crops, frames]), output_hidden_states=True).hidden_states
    projected = model.multi_modal_projector(hidden[config.vision_feature_layer])
    *cut, seen = projected.split([*map(len, crops), len(frames)])
    images = None
    if cut:
        packed, _ = model.pack_image_features(
            cut, image_sizes, image_newline=model.image_newline, vision_aspect_ratio=config.vision_aspect_ratio
        )
        images = torch.cat(packed)
    newline = model.image_newline[None].to(seen)
    pooled = model.apply_pooling(seen).split(lengths)
    return images, torch.cat([part for video in pooled for part in (video.flatten(0, 1), newline)])


IMAGE_KEYS = ("pixel_values", "image_sizes", "batch_num_images")
# The class of `engine_model`, which vLLM knows by a name of its own: a server that takes chats goes on with vLLM's class.
ENGINE_ARCHITECTURE = "LmmR1LlavaOnevisionForConditionalGeneration"
# The most features of an image that vLLM counts on, in crops; longer ones are scaled down to so many.
ASPECT_RATIO = "anyres_max_9"
# The released chat template writes a space behind the role, but for the role that its generation prompt opens.
_ROLE = "message['role'] + ' '"
_OPENED_ROLE = "message['role'] + ('' if message['role'] == 'assistant' else ' ')"


class LlavaOnevisionKit(LmmKit):
    """Text, images, and videos, whose frames are scaled to one size and have a quarter of a crop's tokens each.

    Each image is cut into crops, however many a conversation has, as vLLM does: the tokens of one do not depend on what
    comes later. Transformers' chats cut the image of a conversation with a single one, and no others.
    """

    model_type = "llava_onevision"
    checkpoints = "LLaVA-OneVision (llava-hf)"
    config_class = LlavaOnevisionConfig
    model_class = LlavaOnevisionForConditionalGeneration
    processor_class = LlavaOnevisionProcessor
    takes_videos = True
    vision_prefixes = ("model.vision_tower.embeddings.", "model.vision_tower.encoder.")
    projector_prefixes = ("model.multi_modal_projector.", "model.image_newline")
    # The projector, which is small, makes three times as many numbers of them in the 7B model.
    feature_points = (FeaturePoint(owner="model.vision_tower", take=last_layer, give=of_last_layer),)
    # The projector reads the last layer's output, which these come after.
    untrained_prefixes = ("model.vision_tower.post_layernorm.", "model.vision_tower.head.")

    def load_config(self, path: str, *, trust_remote_code: bool) -> LlavaOnevisionConfig:
        """Load the config; raises UserError for features of the tower other than those of the releases."""
        config = super().load_config(path, trust_remote_code=trust_remote_code)
        features = (config.vision_feature_layer, config.vision_feature_select_strategy)
        if features != (-1, "full"):
            raise UserError(
                f"{path}: vision_feature_layer {features[0]} and vision_feature_select_strategy {features[1]} are not "
                "supported; the releases have -1 and full"
            )
        return config

    def adapt(self, model: PreTrainedModel) -> PreTrainedModel:
        take_videos_of_any_length(super().adapt(model).model)
        return model

    def load_processor(
        self, path: str, *, trust_remote_code: bool, chat_template: str | None = None
    ) -> LlavaOnevisionProcessor:
        """Load processor and tokenizer, with a chat template that opens a turn of the model as it opens one to generate.

        Raises:
            UserError: a part is lacking, or images may take more features than vLLM counts on.
        """
        processor = super().load_processor(path, trust_remote_code=trust_remote_code, chat_template=chat_template)
        if processor.vision_aspect_ratio != ASPECT_RATIO:
            raise UserError(
                f"{path}: vision_aspect_ratio is {processor.vision_aspect_ratio} in this checkpoint's processor, but vLLM "
                f"counts the tokens of an image as for {ASPECT_RATIO}, which the releases have; set it so, there and in "
                "config.json"
            )
        if isinstance(processor.chat_template, str):
            processor.chat_template = processor.chat_template.replace(_ROLE, _OPENED_ROLE)
        return processor

    def encode_messages(
        self,
        processor: LlavaOnevisionProcessor,
        messages: Sequence[Message],
        *,
        images: Sequence[Image.Image],
        add_generation_prompt: bool,
        videos: Sequence[Video] = (),
    ) -> EncodedPrompt:
        """Encode a conversation with its media; raises UserError when it holds what the processor cannot take.

        Pixel bounds of a video change nothing: all frames are scaled to one size.
        """
        most = _most_pixels(processor)
        resized = [
            within_pixel_bounds(image, min_pixels=part.min_pixels, max_pixels=part.max_pixels, most=most)
            for image, part in zip(images, images_of(messages), strict=True)
        ]
        text = self.chat_text(processor, messages, add_generation_prompt=add_generation_prompt)
        return _encoded(processor, text, images=resized, videos=videos)

    def encode_text(
        self, processor: LlavaOnevisionProcessor, text: str, *, images: Sequence[Image.Image], opens: bool
    ) -> EncodedPrompt:
        check_image_marks(text, mark=processor.image_token, media_tokens=(processor.video_token,), given=len(images))
        return _encoded(processor, text, images=images, videos=())

    def chat_text(
        self, processor: LlavaOnevisionProcessor, messages: Sequence[Message], *, add_generation_prompt: bool
    ) -> str:
        """Return the chat as text, in which the images of a message, and then its videos, stand before its words."""
        check_typed_media(messages, media_tokens=(processor.image_token, processor.video_token))
        text = processor.apply_chat_template(
            part_lists(messages), tokenize=False, add_generation_prompt=add_generation_prompt
        )
        check_placeholders(text.count(processor.image_token), given=len(images_of(messages)), kind="images")
        check_placeholders(text.count(processor.video_token), given=len(videos_of(messages)), kind="videos")
        return text

    def render_messages(
        self,
        processor: LlavaOnevisionProcessor,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        videos: Sequence[Video] = (),
    ) -> list[int]:
        text = self.chat_text(processor, messages, add_generation_prompt=add_generation_prompt)
        return processor.tokenizer(text, add_special_tokens=False)["input_ids"]

    def placeholder_ids(self, processor: LlavaOnevisionProcessor) -> frozenset[int]:
        return frozenset({processor.image_token_id, processor.video_token_id})

    def collapsed(self, processor: LlavaOnevisionProcessor, token_ids: Sequence[int]) -> list[int]:
        """Return ids with one placeholder per image and video; of several that were expanded side by side, one is left.

        A run that is shorter than any image or video is one of placeholders, each of one of them, that were not expanded.
        """
        shortest = {
            processor.image_token_id: processor.num_image_tokens,
            processor.video_token_id: _video_text(processor, frames=1).count(processor.video_token),
        }
        ids: list[int] = []
        for token, run in groupby(token_ids):
            length = len(list(run))
            ids += [token] * (1 if length >= shortest.get(token, length + 1) else length)
        return ids

    def pixel_limits(self, processor: LlavaOnevisionProcessor) -> tuple[int, int]:
        return 1, _most_pixels(processor)

    def media_texts(self, processor: LlavaOnevisionProcessor) -> re.Pattern[str]:
        return any_of((processor.image_token, processor.video_token))

    def media_token_ids(self, config: LlavaOnevisionConfig, tokenizer: PreTrainedTokenizerBase) -> set[int]:
        return {config.image_token_id, config.video_token_id}

    def engine_arguments(self, config: LlavaOnevisionConfig, *, max_images: int, max_videos: int) -> dict[str, Any]:
        limits = super().engine_arguments(config, max_images=max_images, max_videos=max_videos)
        return {**limits, "hf_overrides": {"architectures": [ENGINE_ARCHITECTURE]}}

    def merge_media(self, media: Sequence[Media]) -> Media:
        """Join the media of several prompts in row order, with empty crops where an image has fewer than the others."""
        crops = max((item["pixel_values"].shape[1] for item in media if "pixel_values" in item), default=0)
        padded = [
            (
                {**item, "pixel_values": _with_empty_crops(item["pixel_values"], crops)}
                if "pixel_values" in item
                else item
            )
            for item in media
        ]
        return super().merge_media(padded)

    def filler_media(self, config: LlavaOnevisionConfig) -> tuple[list[int], Media]:
        """Return the smallest image that is cut: one crop, which is the whole image once more, with its rows' ends."""
        vision = config.vision_config
        side, rows = vision.image_size, vision.image_size // vision.patch_size
        smallest = min(config.image_grid_pinpoints, key=lambda size: size[0] * size[1])
        assert list(smallest) == [side, side], "the smallest grid is one crop"
        media = {
            "pixel_values": torch.zeros(1, 2, vision.num_channels, side, side),
            "image_sizes": torch.tensor([[side, side]]),
            "batch_num_images": torch.tensor([1]),
        }
        return [config.image_token_id] * (2 * rows * rows + rows), media

    def build_tiny(self, spec: TinyModelSpec, tokenizer_corpus: Iterable[str], folder: str | Path) -> None:
        from lmm_r1.lmm_kits.llava_onevision.tiny_model import build_tiny

        build_tiny(spec, tokenizer_corpus, folder)


def _most_pixels(processor: LlavaOnevisionProcessor) -> int:
    """Pixels of the processor's largest grid of crops."""
    return max(height * width for height, width in processor.image_processor.image_grid_pinpoints)


def _with_empty_crops(images: torch.Tensor, crops: int) -> torch.Tensor:
    """Return images (I, C, 3, side, side) with so many crops each."""
    return torch.nn.functional.pad(images, (0, 0, 0, 0, 0, 0, 0, crops - images.shape[1]))


def _encoded(
    processor: LlavaOnevisionProcessor, text: str, *, images: Sequence[Image.Image], videos: Sequence[Video]
) -> EncodedPrompt:
    # Not the runs of `token_ids` collapsed: images stand side by side, and their placeholders are all alike.
    engine_token_ids = processor.tokenizer(text, add_special_tokens=False)["input_ids"]
    if not images and not videos:
        return EncodedPrompt.of_text(engine_token_ids)
    media: Media = {}
    if videos:
        # One by one: the processor takes videos of one length alone.
        frames = [_frames(processor, video) for video in videos]
        media["pixel_values_videos"] = torch.cat(frames)
        media["image_sizes_videos"] = torch.tensor([video.frames.shape[:3] for video in videos])
        marks = [_video_text(processor, frames=len(one)) for one in frames]
        [text], _ = processor.get_text_with_replacements([text], videos_replacements=marks)
    given = {"images": list(images)} if images else {}
    batch = processor(text=[text], **given, add_special_tokens=False, return_tensors="pt")
    media |= {key: batch[key] for key in IMAGE_KEYS if images}
    return EncodedPrompt(
        token_ids=batch["input_ids"][0].tolist(),
        engine_token_ids=engine_token_ids,
        images=list(images),
        media=media,
        videos=list(videos),
    )


def _frames(processor: LlavaOnevisionProcessor, video: Video) -> torch.Tensor:
    """Return the frames of a video as the tower takes them, (F, 3, side, side)."""
    made = processor.video_processor([channels_first(video)], do_sample_frames=False, return_tensors="pt")
    return made["pixel_values_videos"][0]


def _video_text(processor: LlavaOnevisionProcessor, *, frames: int) -> str:
    """Return what stands for a video in the text that is tokenized."""
    return processor.replace_video_token({"pixel_values_videos": [torch.empty(frames, 0)]}, 0)


KIT = LlavaOnevisionKit()
