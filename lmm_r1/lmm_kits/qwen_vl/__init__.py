"""What kits like those of Qwen-VL share: messages to ids and pixel patches, M-RoPE positions, videos, one run of the tower."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, ClassVar

import torch
from PIL import Image
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

from lmm_r1.data.messages import ImagePart, Message, VideoPart, images_of, videos_of
from lmm_r1.data.videos import Video
from lmm_r1.errors import UserError
from lmm_r1.lmm_kits.encoding import (
    any_of,
    chat_of,
    check_image_marks,
    check_placeholders,
    check_typed_media,
    text_positions,
)
from lmm_r1.lmm_kits.features import FeaturePoint, GridPoint, of_pooled, pooled
from lmm_r1.lmm_kits.kit import EncodedPrompt, LmmKit, Media
from lmm_r1.lmm_kits.qwen_vl.frames import bounded_image, bounded_image_size, bounded_video, image_limits
from lmm_r1.lmm_kits.video_frames import channels_first, video_metadata

TEXT, IMAGE, VIDEO = 0, 1, 2
"""Token types, as the models name them."""


@dataclass(frozen=True, kw_only=True)
class Grid:
    """An image or a video as the language model reads it, in merged patches."""

    steps: int
    rows: int
    columns: int
    interval: float
    """How far the time coordinate moves from one step to the next."""


def grids_of(media: Media, *, vision: PretrainedConfig) -> dict[int, list[Grid]]:
    """Return the grids of a batch's images and videos, in order, by token type.

    A step of a video counts 1, or where the processor says how long it lasts, as much as the vision tower's config says.
    """
    grids: dict[int, list[Grid]] = {}
    for kind, name in ((IMAGE, "image_grid_thw"), (VIDEO, "video_grid_thw")):
        shapes = media[name].tolist() if name in media else []
        intervals = [1.0] * len(shapes)
        if kind == VIDEO and "second_per_grid_ts" in media:
            intervals = [vision.tokens_per_second * seconds for seconds in media["second_per_grid_ts"].tolist()]
        grids[kind] = [
            Grid(
                steps=steps,
                rows=height // vision.spatial_merge_size,
                columns=width // vision.spatial_merge_size,
                interval=interval,
            )
            for (steps, height, width), interval in zip(shapes, intervals, strict=True)
        ]
    return grids


def mrope_positions(types: torch.Tensor, attention_mask: torch.Tensor, grids: dict[int, list[Grid]]) -> torch.Tensor:
    """Return positions (3, B, T) for token types (B, T); every row starts at 0, and padding gets 0.

    As the models were released and as vLLM computes them: text goes on behind the largest coordinate of what precedes
    it. `get_rope_index` of transformers 5.15 goes on behind the rows and columns alone, so that text after a long video
    shares its positions, and cuts seconds per step to a whole number
    (https://github.com/huggingface/transformers/pull/48669).
    """
    positions = torch.zeros(3, *types.shape, dtype=torch.long)
    given = {kind: iter(items) for kind, items in grids.items()}
    for row, (kinds, mask) in enumerate(zip(types.cpu(), attention_mask.bool().cpu(), strict=True)):
        blocks = list(_blocks(kinds[mask].tolist(), given))
        if blocks:
            positions[:, row, mask] = torch.cat(blocks, dim=1)
    return positions.to(types.device)


def _blocks(kinds: Sequence[int], given: dict[int, Iterator[Grid]]) -> Iterator[torch.Tensor]:
    """Yield the positions (3, n) of each run of tokens of one type."""
    start, left = 0, 0
    grid: Grid | None = None
    for kind, run in groupby(kinds):
        length = sum(1 for _ in run)
        if kind == TEXT:
            block = torch.arange(length).expand(3, -1)
        else:
            if grid is None or not left:
                grid = next(given[kind])
                left = grid.steps
            # A video may come as one run, or with text between its steps, each of which then starts a time of its own.
            steps = length // (grid.rows * grid.columns)
            left -= steps
            times = torch.tensor([int(step * grid.interval) for step in range(steps)])
            block = torch.stack(
                torch.meshgrid(times, torch.arange(grid.rows), torch.arange(grid.columns), indexing="ij")
            ).flatten(1)
        yield block + start
        start += int(block.max()) + 1


MEDIA_TOKENS = (
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
MEDIA_KEYS = ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw", "second_per_grid_ts")


# Around what is spoken of in an image, and where it is.
BOX_TOKENS = (
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
)


class QwenVlKit(LmmKit):
    """A kit of the family states its classes, the names of its weights where they differ, and its tiny vision tower."""

    takes_videos = True
    engine_wants_times = True
    takes_flash_attention = True
    spoken_tokens: ClassVar[tuple[str, ...]] = BOX_TOKENS
    media_tokens: ClassVar[tuple[str, ...]] = MEDIA_TOKENS
    """What stands before and behind an image's placeholders, and all other tokens of images and videos."""
    vision_prefixes: ClassVar[tuple[str, ...]] = ("model.visual.blocks.", "model.visual.patch_embed.")
    projector_prefixes: ClassVar[tuple[str, ...]] = ("model.visual.merger.",)
    feature_points: ClassVar[tuple[FeaturePoint, ...]] = (
        GridPoint(owner="model.visual", projects=True, take=pooled, give=of_pooled),
    )

    def encode_messages(
        self,
        processor: ProcessorMixin,
        messages: Sequence[Message],
        *,
        images: Sequence[Image.Image],
        add_generation_prompt: bool,
        videos: Sequence[Video] = (),
    ) -> EncodedPrompt:
        """Encode a conversation with its media; raises UserError when it holds what the processor cannot take."""
        frames = [
            self.bounded_video(processor, video, part) for video, part in zip(videos, videos_of(messages), strict=True)
        ]
        resized = [
            bounded_image(processor, image, part, limits=self.pixel_limits(processor))
            for image, part in zip(images, images_of(messages), strict=True)
        ]
        text = self.chat_text(processor, messages, add_generation_prompt=add_generation_prompt)
        return _encoded(processor, text, images=resized, videos=frames)

    def bounded_video(self, processor: ProcessorMixin, video: Video, part: VideoPart) -> Video:
        """Return the video within the pixel bounds of its part, as both sides are to cut it into patches."""
        return bounded_video(
            processor, video, min_pixels=part.min_pixels, max_pixels=part.max_pixels, frames_together=1
        )

    def render_messages(
        self,
        processor: ProcessorMixin,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        videos: Sequence[Video] = (),
    ) -> list[int]:
        """Return the ids of a conversation with one placeholder per image or video, without reading any."""
        text = self.chat_text(processor, messages, add_generation_prompt=add_generation_prompt)
        return processor.tokenizer(text, add_special_tokens=False)["input_ids"]

    def chat_text(self, processor: ProcessorMixin, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        check_typed_media(messages, media_tokens=self.media_tokens)
        text = processor.apply_chat_template(
            chat_of(messages), tokenize=False, add_generation_prompt=add_generation_prompt
        )
        check_marks(processor, text, messages)
        return text

    def encode_text(
        self, processor: ProcessorMixin, text: str, *, images: Sequence[Image.Image], opens: bool
    ) -> EncodedPrompt:
        start, end, *_ = self.media_tokens
        mark = f"{start}{processor.image_token}{end}"
        check_image_marks(text, mark=mark, media_tokens=self.media_tokens, given=len(images))
        return _encoded(processor, text, images=images, videos=())

    def pixel_limits(self, processor: ProcessorMixin) -> tuple[int, int]:
        return image_limits(processor)

    def check_size(self, processor: ProcessorMixin, part: ImagePart | VideoPart, *, width: int, height: int) -> None:
        bounded = part.min_pixels is not None or part.max_pixels is not None
        if isinstance(part, ImagePart):
            limits = self.pixel_limits(processor)
            width, height = bounded_image_size(processor, part, width=width, height=height, limits=limits)
        elif bounded:
            # Within bounds the shorter side of a frame is a patch at least, which no processor refuses.
            return
        try:
            # Videos are refused by the same ratio of sides.
            processor.image_processor.get_number_of_image_patches(height, width)
        except ValueError as error:
            raise _refused([f"{width}x{height}"], error) from error

    def placeholder_ids(self, processor: ProcessorMixin) -> frozenset[int]:
        return frozenset({processor.image_token_id, processor.video_token_id})

    def media_texts(self, processor: ProcessorMixin) -> re.Pattern[str]:
        return any_of(self.media_tokens)

    def image_ends(self, config: PretrainedConfig) -> tuple[int, int]:
        """Return the ids that stand before and behind an image's placeholders."""
        return config.vision_start_token_id, config.vision_end_token_id

    def media_token_ids(self, config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> set[int]:
        media = [tokenizer.convert_tokens_to_ids(token) for token in self.media_tokens]
        return {
            config.image_token_id,
            config.video_token_id,
            *self.image_ends(config),
            *(token for token in media if token is not None and token != tokenizer.unk_token_id),
        }

    def token_types(self, config: PretrainedConfig, token_ids: torch.Tensor) -> torch.Tensor:
        """Return for each token (B, T) whether it is text, an image's placeholder or a video's."""
        types = torch.zeros_like(token_ids, dtype=torch.int32)
        types[token_ids == config.image_token_id] = IMAGE
        types[token_ids == config.video_token_id] = VIDEO
        return types

    def forward_inputs(
        self, config: PretrainedConfig, sequences: torch.Tensor, attention_mask: torch.Tensor, media: Media | None
    ) -> dict[str, torch.Tensor]:
        """Return M-RoPE positions (3, B, T) and the media tensors for a padded batch (B, T).

        The positions are always given: a model that infers them keeps `rope_deltas` of an earlier batch.
        """
        if media is None:
            positions = text_positions(attention_mask)
            return {"position_ids": positions.expand(3, *positions.shape)}
        types = self.token_types(config, sequences)
        grids = grids_of(media, vision=config.vision_config)
        features = {key: value for key, value in media.items() if key != "second_per_grid_ts"}
        return {
            "position_ids": mrope_positions(types, attention_mask, grids),
            "mm_token_type_ids": types,
            **features,
        }

    def grids_as_images(self, grids: torch.Tensor) -> torch.Tensor:
        """Return the grids of videos (V, 3) as the tower takes them among those of images."""
        return grids

    def in_one_tower_run(self, config: PretrainedConfig, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the forward's arguments with videos among the images, in the order of their tokens in the ids (B, T).

        The model would run its tower for each kind. The tower makes the same of both, and the embeddings of all
        placeholders are replaced, so that a video's may be written as an image's.
        """
        if not ("pixel_values" in inputs and "pixel_values_videos" in inputs):
            return inputs
        ids, merged = inputs["input_ids"], config.vision_config.spatial_merge_size**2
        types = self.token_types(config, ids).flatten()
        shapes = {IMAGE: inputs["image_grid_thw"], VIDEO: self.grids_as_images(inputs["video_grid_thw"])}
        grids = torch.cat(list(shapes.values()))
        patches = torch.cat([inputs["pixel_values"], inputs["pixel_values_videos"]]).split(grids.prod(dim=1).tolist())
        first = []
        for kind, of_kind in shapes.items():
            lengths = of_kind.prod(dim=1) // merged
            first.append((types == kind).nonzero().flatten()[lengths.cumsum(0) - lengths])
        order = torch.cat(first).argsort()
        others = {
            name: value for name, value in inputs.items() if name not in ("pixel_values_videos", "video_grid_thw")
        }
        return {
            **others,
            "input_ids": ids.masked_fill(ids == config.video_token_id, config.image_token_id),
            "pixel_values": torch.cat([patches[place] for place in order.tolist()]),
            "image_grid_thw": grids[order],
        }

    def windowed_tower_of(self, model: PreTrainedModel) -> PreTrainedModel:
        return model.model.visual

    def filler_media(self, config: PretrainedConfig) -> tuple[list[int], Media]:
        """Return the smallest legal image sample: one merged patch of zeros between its two markers."""
        return self.blank_image(config, pixels=1)

    def blank_image(self, config: PretrainedConfig, *, pixels: int) -> tuple[list[int], Media]:
        vision = config.vision_config
        merged = max(1, round(pixels**0.5 / (vision.patch_size * vision.spatial_merge_size)))
        side = merged * vision.spatial_merge_size
        width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        media = {"pixel_values": torch.zeros(side**2, width), "image_grid_thw": torch.tensor([[1, side, side]])}
        before, behind = self.image_ends(config)
        return [before, *[config.image_token_id] * merged**2, behind], media


def _encoded(
    processor: ProcessorMixin, text: str, *, images: Sequence[Image.Image], videos: Sequence[Video]
) -> EncodedPrompt:
    engine_token_ids = processor.tokenizer(text, add_special_tokens=False)["input_ids"]
    if not images and not videos:
        return EncodedPrompt.of_text(engine_token_ids)
    batch = _call(processor, text, images=images, videos=videos)
    return EncodedPrompt(
        token_ids=batch["input_ids"][0].tolist(),
        engine_token_ids=engine_token_ids,
        images=list(images),
        media={key: batch[key] for key in MEDIA_KEYS if key in batch},
        videos=list(videos),
    )


def _call(
    processor: ProcessorMixin, text: str, *, images: Sequence[Image.Image], videos: Sequence[Video]
) -> Mapping[str, Any]:
    media: dict[str, Any] = {"images": list(images)} if images else {}
    if videos:
        media["videos"] = [channels_first(video) for video in videos]
        media["video_metadata"] = [video_metadata(video) for video in videos]
        media["do_sample_frames"] = False
    try:
        return processor(text=[text], **media, add_special_tokens=False, return_tensors="pt")
    except ValueError as error:
        sizes = [f"{image.width}x{image.height}" for image in images]
        sizes += ["{0} frames of {2}x{1}".format(*video.frames.shape) for video in videos]
        raise _refused(sizes, error) from error


def _refused(sizes: Sequence[str], error: ValueError) -> UserError:
    return UserError(f"the processor refuses the images or videos ({', '.join(sizes)}): {error}; take the row out")


def check_marks(processor: ProcessorMixin, text: str, messages: Sequence[Message]) -> None:
    """Raise UserError where a rendered chat has other than one placeholder for each image and each video."""
    for token, parts, kind in (
        (processor.image_token, images_of(messages), "images"),
        (processor.video_token, videos_of(messages), "videos"),
    ):
        check_placeholders(text.count(token), given=len(parts), kind=kind)
