"""How LLaVA-OneVision's model takes images and videos of any lengths together, in one run of its vision tower."""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from transformers.models.llava_onevision.modeling_llava_onevision import LlavaOnevisionModel, image_size_to_num_patches


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
