"""The kits of Qwen2-VL and Qwen2.5-VL, and the base of kits like theirs.

The base turns messages into ids and pixel patches, makes M-RoPE positions, takes videos, and runs the tower once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import ClassVar

import torch
from transformers import (
    PretrainedConfig,
    PreTrainedTokenizerBase,
    ProcessorMixin,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
)

from lmm_r1.data.images import Video
from lmm_r1.data.messages import VideoPart
from lmm_r1.lmm_kits.encoding import bounded_video, text_positions
from lmm_r1.lmm_kits.features import FeaturePoint, GridPoint
from lmm_r1.lmm_kits.kit import EncodedPrompt, LmmKit, Media
from lmm_r1.lmm_kits.tiny_model import VISION_LAYERS, TinyModelSpec, TinyTokens, chatml, heads_of, text_settings

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

    A step of a video counts 1, or if the processor returns its duration, as much as the vision tower's config says.
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

    As in the original models and in vLLM, text continues after the largest coordinate of everything before it.
    `get_rope_index` of transformers 5.15 continues after the rows and columns only, so that text after a long video shares
    its positions, and cuts seconds per step to a whole number (https://github.com/huggingface/transformers/pull/48669).
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
            # A video is one run, or has text between its steps, each of which then starts a time of its own.
            steps = length // (grid.rows * grid.columns)
            left -= steps
            times = torch.tensor([int(step * grid.interval) for step in range(steps)])
            block = torch.stack(
                torch.meshgrid(times, torch.arange(grid.rows), torch.arange(grid.columns), indexing="ij")
            ).flatten(1)
        yield block + start
        start += int(block.max()) + 1


MEDIA_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>")
# Around an object of an image, and around its place.
BOX_TOKENS = tuple(f"<|{kind}_{end}|>" for kind in ("object_ref", "box", "quad") for end in ("start", "end"))
MARKS = {kind: f"<|vision_start|><|{kind}_pad|><|vision_end|>" for kind in ("image", "video")}
"""What the chat template writes for media."""
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *BOX_TOKENS, *MEDIA_TOKENS)
# As in the released checkpoints, for videos and images alike; with the class's own default, small frames are scaled up.
VIDEO_PIXELS = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}
# Half of the head dimension, split over time, height and width in the released models' proportions. The width gets the
# slowest rotations: with so few of them and the usual base of 10,000 they would turn by less than 0.004 per column, and
# attention could not distinguish the columns of an image.
ROPE = {"rope_type": "default", "rope_theta": 10.0, "mrope_section": [4, 6, 6]}


class QwenVlKit(LmmKit):
    """A kit of the family sets its classes, the names of its weights if they differ, and its tiny vision tower."""

    takes_videos = True
    engine_wants_times = True
    takes_flash_attention = True
    spoken_tokens: ClassVar[tuple[str, ...]] = BOX_TOKENS
    media_tokens: ClassVar[tuple[str, ...]] = MEDIA_TOKENS
    """The tokens before and after an image's placeholders, then all other tokens of images and videos."""
    media_keys = ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw", "second_per_grid_ts")
    tiny_tokens: ClassVar[TinyTokens] = TinyTokens(
        special=SPECIAL_TOKENS, chat_template=chatml(MARKS, default_system=True)
    )
    vision_prefixes: ClassVar[tuple[str, ...]] = ("model.visual.blocks.", "model.visual.patch_embed.")
    projector_prefixes: ClassVar[tuple[str, ...]] = ("model.visual.merger.",)
    windowed_tower = "model.visual"
    feature_points: ClassVar[tuple[FeaturePoint, ...]] = (
        GridPoint(owner="model.visual", projects=True, reads="pooler_output"),
    )

    def bounded_video(self, processor: ProcessorMixin, video: Video, part: VideoPart) -> Video:
        return bounded_video(processor, video, part)

    def image_mark(self, processor: ProcessorMixin) -> str:
        start, end, *_ = self.media_tokens
        return f"{start}{processor.image_token}{end}"

    def pixel_limits(self, processor: ProcessorMixin) -> tuple[int, int]:
        size = processor.image_processor.size
        return size["shortest_edge"], size["longest_edge"]

    def side_factor(self, processor: ProcessorMixin) -> int:
        """Return the pixels on a side of a merged patch."""
        return processor.image_processor.patch_size * processor.image_processor.merge_size

    def tokens_of_size(self, processor: ProcessorMixin, width: int, height: int) -> int:
        settings = processor.image_processor
        return settings.get_number_of_image_patches(height, width) // settings.merge_size**2

    def image_ends(self, config: PretrainedConfig) -> tuple[int, int]:
        """Return the ids before and after an image's placeholders."""
        return config.vision_start_token_id, config.vision_end_token_id

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

        The result always has positions: a model that infers them keeps `rope_deltas` of an earlier batch.
        """
        if media is None:
            positions = text_positions(attention_mask)
            return {"position_ids": positions.expand(3, *positions.shape)}
        types = self.token_types(config, sequences)
        grids = grids_of(media, vision=config.vision_config)
        features = {key: value for key, value in media.items() if key != "second_per_grid_ts"}
        return {"position_ids": mrope_positions(types, attention_mask, grids), "mm_token_type_ids": types, **features}

    def grids_as_images(self, grids: torch.Tensor) -> torch.Tensor:
        """Return the grids of videos (V, 3) in the form in which the tower takes them together with images."""
        return grids

    def in_one_tower_run(self, config: PretrainedConfig, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the forward's arguments with videos among the images, in the order of their tokens in the ids (B, T).

        The model would run its tower once for each kind. The tower treats both alike, and the embeddings of all
        placeholders are replaced, so a video's placeholders can be written as an image's.
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

    def filler_media(self, config: PretrainedConfig) -> tuple[list[int], Media]:
        """Return the smallest legal image sample: one merged patch of zeros between its two markers."""
        return self.blank_image(config, pixels=1)

    def blank_image(self, config: PretrainedConfig, *, pixels: int) -> tuple[list[int], Media]:
        vision = config.vision_config
        merged = max(1, round(pixels**0.5 / (vision.patch_size * vision.spatial_merge_size)))
        side = merged * vision.spatial_merge_size
        width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        media = {"pixel_values": torch.zeros(side**2, width), "image_grid_thw": torch.tensor([[1, side, side]])}
        before, after = self.image_ends(config)
        return [before, *[config.image_token_id] * merged**2, after], media

    def tiny_config(self, spec: TinyModelSpec, tokenizer: PreTrainedTokenizerBase) -> PretrainedConfig:
        vision = {
            "depth": VISION_LAYERS,
            "hidden_size": spec.hidden_size,
            "num_heads": heads_of(spec),
            "initializer_range": spec.hidden_size**-0.5,
        }
        return self.config_class(
            text_config={**text_settings(spec, tokenizer), "rope_parameters": dict(ROPE), **self.tiny_text(spec)},
            vision_config={**vision, **self.tiny_vision(spec)},
            tie_word_embeddings=spec.tie_embeddings,
            **self.tiny_token_ids(tokenizer),
        )

    def tiny_vision(self, spec: TinyModelSpec) -> dict[str, object]:
        """Return what the tiny tower's config has in addition to the family's settings."""
        return {}

    def tiny_text(self, spec: TinyModelSpec) -> dict[str, object]:
        """Return what the tiny language model's config has in addition to the family's settings."""
        return {}

    def tiny_token_ids(self, tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
        """Return the ids of media tokens by their names in a config."""
        names = ("vision_start", "vision_end", "image", "video")
        tokens = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
        ids = tokenizer.convert_tokens_to_ids(list(tokens))
        return {f"{name}_token_id": token for name, token in zip(names, ids, strict=True)}

    def tiny_parts(self) -> dict[str, object]:
        return {
            "image_processor": Qwen2VLImageProcessor(),
            "video_processor": Qwen2VLVideoProcessor(size=dict(VIDEO_PIXELS)),
        }


class Qwen2VlKit(QwenVlKit):
    """A step of a video always counts 1 in the positions, because its processor does not return how long a step lasts."""

    model_type = "qwen2_vl"
    checkpoints = "Qwen2-VL"
    config_class = Qwen2VLConfig
    model_class = Qwen2VLForConditionalGeneration
    processor_class = Qwen2VLProcessor
    writes_thousandths = True

    def tiny_vision(self, spec: TinyModelSpec) -> dict[str, object]:
        # The tower's own width is `embed_dim`; `hidden_size` is the language model's.
        return {"embed_dim": spec.hidden_size, "mlp_ratio": 2}


class Qwen25VlKit(QwenVlKit):
    """A step of a video counts as long as it lasts in the positions; in vLLM a class of ours does so (`engine_model`)."""

    model_type = "qwen2_5_vl"
    checkpoints = "Qwen2.5-VL"
    config_class = Qwen2_5_VLConfig
    model_class = Qwen2_5_VLForConditionalGeneration
    processor_class = Qwen2_5_VLProcessor
    video_engine_architecture = "LmmR1Qwen2_5_VLForConditionalGeneration"

    def image_scales(
        self, processor: Qwen2_5_VLProcessor, encoded: EncodedPrompt, *, sizes: Sequence[tuple[int, int]]
    ) -> tuple[tuple[float, float], ...]:
        """Return the stored sizes divided by the resized ones: coordinates are pixels of the image that the tower gets."""
        if not sizes:
            return ()
        assert encoded.media is not None, "the prompt has images"
        side, grids = processor.image_processor.patch_size, encoded.media["image_grid_thw"].tolist()
        return tuple(
            (width / (columns * side), height / (rows * side))
            for (width, height), (_, rows, columns) in zip(sizes, grids, strict=True)
        )

    def tiny_vision(self, spec: TinyModelSpec) -> dict[str, object]:
        return {
            "intermediate_size": 2 * spec.hidden_size,
            "out_hidden_size": spec.hidden_size,
            "fullatt_block_indexes": [VISION_LAYERS - 1],
            "tokens_per_second": 2,
        }
