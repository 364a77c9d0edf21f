"""The kit of LLaVA-OneVision: the whole image as one crop, and a grid of crops whose padding is cut off after the tower."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from types import MethodType
from typing import Any

import torch
from transformers import (
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    LlavaOnevisionImageProcessor,
    LlavaOnevisionProcessor,
    LlavaOnevisionVideoProcessor,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.llava_onevision.modeling_llava_onevision import LlavaOnevisionModel, image_size_to_num_patches

from lmm_r1.data.images import Video
from lmm_r1.data.messages import Message
from lmm_r1.errors import UserError
from lmm_r1.lmm_kits.encoding import channels_first, part_lists
from lmm_r1.lmm_kits.features import FeaturePoint
from lmm_r1.lmm_kits.kit import EncodedPrompt, LmmKit, Media, RawMedia
from lmm_r1.lmm_kits.tiny_model import TinyModelSpec, TinyTokens, text_settings, tower_settings

TINY_TOKENS = TinyTokens(
    special=("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<image>", "<video>"),
    # A space after the role except in the generation prompt, images before the words of a message, each text on a line of
    # its own, and nothing between two turns.
    chat_template="""\
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + ' ' -}}
{%- for part in message['content'] | selectattr('type', 'equalto', 'image') -%}{{- '<image>' -}}{%- endfor -%}
{%- for part in message['content'] | selectattr('type', 'equalto', 'video') -%}{{- '<video>' -}}{%- endfor -%}
{%- for part in message['content'] | selectattr('type', 'equalto', 'text') -%}{{- '\\n' + part['text'] -}}{%- endfor -%}
{{- '<|im_end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
""",
)
# 4 x 4 patches per crop, and up to 4 x 4 crops, of which more than nine are scaled down; 27 x 27 and 6 x 6 in the releases.
CROP, PATCH_SIZE, CROPS = 56, 14, 4
GRIDS = [[rows * CROP, columns * CROP] for rows in range(1, CROPS + 1) for columns in range(1, CROPS + 1)]


def _forward(
    model: LlavaOnevisionModel,
    input_ids: torch.Tensor | None = None,
    *,
    pixel_values_videos: torch.Tensor | None = None,
    image_sizes_videos: torch.Tensor | None = None,
    **others: Any,
) -> Any:
    """Run the model on ids (B, T), whose placeholders of images and of videos have the order of their tensors.

    Args:
        pixel_values_videos: (F, 3, side, side), the frames of all videos.
        image_sizes_videos: (V, 3): frames, height and width of each video.
        others: may have the `pixel_values` (I, crops, 3, side, side) of images that are all cut, with empty crops after
            those of smaller ones.
    """
    if pixel_values_videos is None or image_sizes_videos is None:
        return LlavaOnevisionModel.forward(model, input_ids, pixel_values_videos=pixel_values_videos, **others)
    pixels, sizes, _ = (others.pop(name, None) for name in LlavaOnevisionKit.media_keys)
    # In the order of transformers' own forward, which ZeRO-3's other ranks may be running.
    embeds = model.get_input_embeddings()(input_ids)
    images, videos = _features(model, pixels, sizes, pixel_values_videos, image_sizes_videos[:, 0].tolist())
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
    """Return the embeddings of all images, (N, H) or None, and of all videos, (M, H)."""
    config, crops = model.config, []
    if pixel_values is not None and image_sizes is not None:
        side = config.vision_config.image_size
        crops = [
            image[: image_size_to_num_patches(size, config.image_grid_pinpoints, side)]
            for image, size in zip(pixel_values, image_sizes, strict=True)
        ]
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


# The most crops per image that vLLM expects; the features of more crops are scaled down to this many.
ASPECT_RATIO = "anyres_max_9"
# The released chat template writes a space after the role, except after the role of its generation prompt.
_ROLE = "message['role'] + ' '"
_OPENED_ROLE = "message['role'] + ('' if message['role'] == 'assistant' else ' ')"


class LlavaOnevisionKit(LmmKit):
    """Text, images, and videos, whose frames are scaled to one size and have a quarter of a crop's tokens each.

    Every image is cut into crops, as in vLLM, so that its tokens do not depend on later images. Transformers' chats cut an
    image only if it is the single one of a conversation.
    """

    model_type = "llava_onevision"
    checkpoints = "LLaVA-OneVision (llava-hf)"
    config_class = LlavaOnevisionConfig
    model_class = LlavaOnevisionForConditionalGeneration
    processor_class = LlavaOnevisionProcessor
    takes_videos = True
    media_tokens = ("<image>", "<video>")
    vision_features = (-1, "full")
    media_keys = ("pixel_values", "image_sizes", "batch_num_images")
    padded_media = {"pixel_values": 0}
    # A name of its own: a server that takes chats keeps vLLM's class.
    engine_architecture = "LmmR1LlavaOnevisionForConditionalGeneration"
    vision_prefixes = ("model.vision_tower.embeddings.", "model.vision_tower.encoder.")
    projector_prefixes = ("model.multi_modal_projector.", "model.image_newline")
    # Features before the projector, which is small: after it they are three times as large in the 7B model.
    feature_points = (FeaturePoint(owner="model.vision_tower", reads="hidden_states"),)
    # The projector reads the last layer's output, before these.
    untrained_prefixes = ("model.vision_tower.post_layernorm.", "model.vision_tower.head.")
    tiny_tokens = TINY_TOKENS
    tiny_tower_as_released = True

    def adapt(self, model: PreTrainedModel) -> PreTrainedModel:
        """Let the loaded model take frames (F, 3, side, side) with `image_sizes_videos`.

        Transformers takes only videos of equal length, and runs the tower once for images and once for videos, so that
        ZeRO-3's ranks could wait for each other.
        """
        inner = super().adapt(model).model
        inner.forward = MethodType(_forward, inner)
        return model

    def prepare_processor(self, processor: LlavaOnevisionProcessor, path: str) -> None:
        """Change the chat template so that a model's turn begins as one to generate.

        Raises UserError if images may take more features than vLLM expects.
        """
        if processor.vision_aspect_ratio != ASPECT_RATIO:
            raise UserError(
                f"{path}: vision_aspect_ratio is {processor.vision_aspect_ratio} in this checkpoint's processor, but vLLM "
                f"counts the tokens of an image as for {ASPECT_RATIO}, which the releases have; set it so, there and in "
                "config.json"
            )
        if isinstance(processor.chat_template, str):
            processor.chat_template = processor.chat_template.replace(_ROLE, _OPENED_ROLE)

    def template_turns(self, messages: Sequence[Message]) -> Sequence[Mapping[str, Any]]:
        # The template writes the images of a message, and then its videos, before its words.
        return part_lists(messages)

    def encode_chat(
        self, processor: LlavaOnevisionProcessor, text: str, raw: RawMedia, *, opens: bool = True
    ) -> EncodedPrompt:
        # Collapsing the runs of `token_ids` would not do: images can be adjacent, with equal placeholders.
        engine_token_ids = self.text_ids(processor, text)
        if not raw.images and not raw.videos:
            return EncodedPrompt.of_text(engine_token_ids)
        media: Media = {}
        if raw.videos:
            # One by one: the processor takes only videos of equal length.
            frames = [_frames(processor, video) for video in raw.videos]
            media["pixel_values_videos"] = torch.cat(frames)
            media["image_sizes_videos"] = torch.tensor([video.frames.shape[:3] for video in raw.videos])
            marks = [_video_text(processor, frames=len(one)) for one in frames]
            [text], _ = processor.get_text_with_replacements([text], videos_replacements=marks)
        given = {"images": list(raw.images)} if raw.images else {}
        batch = processor(text=[text], **given, add_special_tokens=False, return_tensors="pt")
        media |= {key: batch[key] for key in self.media_keys if raw.images}
        return raw.encoded(token_ids=batch["input_ids"][0].tolist(), engine_token_ids=engine_token_ids, media=media)

    def collapsed(self, processor: LlavaOnevisionProcessor, token_ids: Sequence[int]) -> list[int]:
        """Return ids with one placeholder per image and video; several adjacent expanded ones become one.

        A run that is shorter than any image or video consists of placeholders that were not expanded, one for each.
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
        """Return 1 and the pixels of the processor's largest grid of crops."""
        grids = processor.image_processor.image_grid_pinpoints
        return 1, max(height * width for height, width in grids)

    def tokens_of_size(self, processor: LlavaOnevisionProcessor, width: int, height: int) -> int:
        return processor._get_num_multimodal_tokens(image_sizes=[(height, width)])["num_image_tokens"][0]

    def filler_media(self, config: LlavaOnevisionConfig) -> tuple[list[int], Media]:
        """Return the smallest image that is cut: the whole image and one crop of all of it, with the ends of its rows."""
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

    def tiny_config(self, spec: TinyModelSpec, tokenizer: PreTrainedTokenizerBase) -> LlavaOnevisionConfig:
        image, video = tokenizer.convert_tokens_to_ids(["<image>", "<video>"])
        return LlavaOnevisionConfig(
            text_config={
                **text_settings(spec, tokenizer),
                "model_type": "qwen2",
                "architectures": ["Qwen2ForCausalLM"],
            },
            vision_config={
                **tower_settings(spec, image_size=CROP, patch_size=PATCH_SIZE),
                "model_type": "siglip_vision_model",
                "vision_use_head": False,
            },
            image_grid_pinpoints=GRIDS,
            image_token_index=image,
            video_token_index=video,
            initializer_range=spec.hidden_size**-0.5,
            tie_word_embeddings=spec.tie_embeddings,
        )

    def tiny_parts(self) -> dict[str, object]:
        settings: dict[str, object] = {
            "size": {"height": CROP, "width": CROP},
            "image_mean": [0.5] * 3,
            "image_std": [0.5] * 3,
        }
        return {
            "image_processor": LlavaOnevisionImageProcessor(image_grid_pinpoints=GRIDS, **settings),
            "video_processor": LlavaOnevisionVideoProcessor(**settings),
            "num_image_tokens": (CROP // PATCH_SIZE) ** 2,
            "vision_feature_select_strategy": "full",
        }


def _frames(processor: LlavaOnevisionProcessor, video: Video) -> torch.Tensor:
    """Return the frames of a video as the tower takes them, (F, 3, side, side)."""
    made = processor.video_processor([channels_first(video)], do_sample_frames=False, return_tensors="pt")
    return made["pixel_values_videos"][0]


def _video_text(processor: LlavaOnevisionProcessor, *, frames: int) -> str:
    """Return the text of a video's placeholders."""
    return processor.replace_video_token({"pixel_values_videos": [torch.empty(frames, 0)]}, 0)
