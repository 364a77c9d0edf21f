"""The kit of InternVL in transformers' format: an image is cut into tiles, and a video's frames are tiles with their numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import (
    GotOcr2ImageProcessor,
    InternVLConfig,
    InternVLForConditionalGeneration,
    InternVLProcessor,
    InternVLVideoProcessor,
    PreTrainedTokenizerBase,
)

from lmm_r1.errors import UserError
from lmm_r1.lmm_kits.assembly import Assembly
from lmm_r1.lmm_kits.encoding import channels_first
from lmm_r1.lmm_kits.features import FeaturePoint
from lmm_r1.lmm_kits.kit import EncodedPrompt, LmmKit, Media, RawMedia
from lmm_r1.lmm_kits.tiny_model import TinyModelSpec, TinyTokens, chatml, text_settings, tower_settings

BOX_TOKENS = ("<quad>", "</quad>", "<ref>", "</ref>", "<box>", "</box>")
MEDIA_TOKENS = ("<img>", "</img>", "<IMG_CONTEXT>", "<video>")
MARKS = {"image": "<IMG_CONTEXT>\n", "video": "<video>\n"}
TINY_TOKENS = TinyTokens(
    special=("<|endoftext|>", "<|im_start|>", "<|im_end|>", *MEDIA_TOKENS[:3], *BOX_TOKENS, MEDIA_TOKENS[3]),
    names=dict(
        zip(("start_image_token", "end_image_token", "context_image_token", "video_token"), MEDIA_TOKENS, strict=True)
    ),
    # No default system turn.
    chat_template=chatml(MARKS),
)
# 4 x 4 patches in a tile, of which each 2 x 2 become one placeholder; 32 x 32 and 256 placeholders in the releases.
TILE_SIDE, PATCH_SIZE, TILE_TOKENS = 56, 14, 4
MAX_TILES = 4  # 12 in the releases.
MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
# vLLM's names of the releases' language models, by their `model_type`.
LANGUAGE_MODELS = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def processor_parts(*, side: int, tiles: int, tokens: int) -> dict[str, object]:
    settings: dict[str, object] = {"size": {"height": side, "width": side}, "image_mean": MEAN, "image_std": STD}
    return {
        "image_processor": GotOcr2ImageProcessor(max_patches=tiles, **settings),
        "video_processor": InternVLVideoProcessor(**settings),
        "image_seq_length": tokens,
    }


class InternVlKit(LmmKit):
    """Text, images and videos; vLLM runs it with a class of its own (`engine_model`).

    A frame is one tile after its number as text, with an image's placeholders. For vLLM, the video token replaces
    everything from the first frame's placeholders on. Pixel bounds change nothing: an image's shape alone determines into
    how many tiles of one size it is scaled.
    """

    model_type = "internvl"
    checkpoints = "InternVL2.5, InternVL3, InternVL3.5 (-hf)"
    config_class = InternVLConfig
    model_class = InternVLForConditionalGeneration
    processor_class = InternVLProcessor
    takes_videos = True
    tokenizer_adds_start = True
    takes_flash_attention = True
    spoken_tokens = BOX_TOKENS
    writes_thousandths = True
    # vLLM reads the last layer's patches whatever the config says.
    vision_features = (-1, "default")
    media_tokens = MEDIA_TOKENS
    engine_architecture = "LmmR1InternVLForConditionalGeneration"
    vision_prefixes = ("model.vision_tower.",)
    projector_prefixes = ("model.multi_modal_projector.",)
    feature_points = (
        FeaturePoint(owner="model", method="get_image_features", projects=True, reads="pooler_output"),
        FeaturePoint(owner="model.vision_tower", reads="last_hidden_state"),
    )
    # For training the tower with masked patches, which is not done here; the releases have none.
    untrained_prefixes = ("model.vision_tower.embeddings.mask_token",)
    tiny_tokens = TINY_TOKENS
    assembly = Assembly(
        language_models=tuple(LANGUAGE_MODELS),
        tokens=MEDIA_TOKENS,
        marks=MARKS,
        scales=(2,),
        settings=lambda *, scale, tokens: {"downsample_ratio": 1 / scale, "image_seq_length": tokens},
        parts=processor_parts,
        # DINOv2 normalises its features, and without mean pooling so does this tower.
        tower={"attention_bias": True, "use_mean_pooling": False},
        renamed=(
            (r"attention\.attention\.([qkv])\w+", r"attention.\1_proj"),
            (r"attention\.output\.dense", "attention.projection_layer"),
            (r"layer_scale(\d)\.lambda1", r"lambda_\1"),
            ("norm1", "layernorm_before"),
            ("norm2", "layernorm_after"),
        ),
    )

    def load_config(self, path: str, *, trust_remote_code: bool) -> InternVLConfig:
        """Load the config; raises UserError for a language model that was not tested."""
        config = super().load_config(path, trust_remote_code=trust_remote_code)
        language_model = config.text_config.model_type
        if language_model not in LANGUAGE_MODELS:
            raise UserError(
                f"{path}: InternVL with the language model {language_model} is not supported; with these it is: "
                f"{', '.join(sorted(LANGUAGE_MODELS))}"
            )
        return config

    def prepare_processor(self, processor: InternVLProcessor, path: str) -> None:
        """Scale frames of videos to the size of a tile, as in vLLM."""
        processor.video_processor.size = processor.image_processor.size

    def encode_chat(
        self, processor: InternVLProcessor, text: str, raw: RawMedia, *, opens: bool = True
    ) -> EncodedPrompt:
        if not raw.images and not raw.videos:
            return super().encode_chat(processor, text, raw, opens=opens)
        # One by one: the processor takes only videos of equal length.
        tiles = {
            "image": [_pixels(processor, processor.image_token, images=[image]) for image in raw.images],
            "video": [
                _pixels(processor, processor.video_token, videos=[channels_first(video)]) for video in raw.videos
            ],
        }
        [expanded], _ = processor.get_text_with_replacements(
            [text],
            [processor.replace_image_token({"num_patches": [len(one)]}, 0) for one in tiles["image"]],
            [processor.replace_video_token({"pixel_values_videos": [one]}, 0) for one in tiles["video"]],
        )
        left = {kind: iter(of_kind) for kind, of_kind in tiles.items()}
        in_order = [next(left[str(mark.lastgroup)]) for mark in processor.multimodal_pattern.finditer(text)]
        return raw.encoded(
            token_ids=self.text_ids(processor, expanded, opens=opens),
            engine_token_ids=self.engine_ids(processor, text, opens=opens),
            media={"pixel_values": torch.cat(in_order)},
        )

    def engine_ids(self, processor: InternVLProcessor, text: str, *, opens: bool = True) -> list[int]:
        """Return ids with the markers around each image, and around a video's first frame after its number."""
        start, end = processor.start_image_token, processor.end_image_token
        images, videos_ = (text.count(token) for token in (processor.image_token, processor.video_token))
        [written], _ = processor.get_text_with_replacements(
            [text],
            [f"{start}{processor.image_token}{end}"] * images,
            [f"Frame1: {start}{processor.video_token}{end}"] * videos_,
        )
        return self.text_ids(processor, written, opens=opens)

    def placeholder_ids(self, processor: InternVLProcessor) -> frozenset[int]:
        return frozenset({processor.image_token_id, processor.tokenizer.video_token_id})

    def filler_media(self, config: InternVLConfig) -> tuple[list[int], Media]:
        """Return a black tile with its placeholders; all tiles have one size."""
        vision = config.vision_config
        (height, width), (rows, columns) = vision.image_size, vision.patch_size
        patches = (height // rows) * (width // columns)
        placeholders = int(patches * config.downsample_ratio**2)
        media = {"pixel_values": torch.zeros(1, vision.num_channels, height, width)}
        return [config.image_token_id] * placeholders, media

    def engine_arguments(
        self, config: InternVLConfig, *, max_images: int, max_videos: int
    ) -> dict[str, dict[str, Any]]:
        """Return vLLM's limits, the class of `engine_model`, and the name of the language model, which vLLM looks up."""
        arguments = super().engine_arguments(config, max_images=max_images, max_videos=max_videos)
        arguments["hf_overrides"]["text_config"] = {"architectures": [LANGUAGE_MODELS[config.text_config.model_type]]}
        return arguments

    def tiny_config(self, spec: TinyModelSpec, tokenizer: PreTrainedTokenizerBase) -> InternVLConfig:
        return InternVLConfig(
            text_config={**text_settings(spec, tokenizer), "model_type": "qwen2"},
            vision_config={
                **tower_settings(spec, image_size=TILE_SIDE, patch_size=PATCH_SIZE),
                "attention_bias": True,
                "image_size": [TILE_SIDE, TILE_SIDE],
                "patch_size": [PATCH_SIZE, PATCH_SIZE],
            },
            image_token_id=tokenizer.context_image_token_id,
            image_seq_length=TILE_TOKENS,
            tie_word_embeddings=spec.tie_embeddings,
        )

    def tiny_parts(self) -> dict[str, object]:
        return processor_parts(side=TILE_SIDE, tiles=MAX_TILES, tokens=TILE_TOKENS)


def _pixels(processor: InternVLProcessor, mark: str, **media: Sequence[Any]) -> torch.Tensor:
    """Return an image's or a video's tiles, (N, 3, side, side)."""
    return processor(text=[mark], **media, do_sample_frames=False, return_tensors="pt")["pixel_values"]
