"""What Hugging Face's own processors and models make of conversations with videos, whose frames are sampled already."""

import re
from typing import Any

import numpy as np
import pytest
import torch

from lmm_r1.data.images import Video, load_video
from lmm_r1.data.messages import Message, TextPart, VideoPart, images_of, videos_of

# Their processor refuses a lone frame, which the kit shows it twice.
GLM = ("Glm4vProcessor", "Glm46VProcessor")
IN_PAIRS = ("Qwen3VLProcessor", *GLM)
# Their processor takes no videos of different lengths.
APART = ("InternVLProcessor",)
TEXT_KEYS = {"input_ids", "attention_mask", "mm_token_type_ids"}


def name_of(thing: Any) -> str:
    return type(thing).__name__


def reference(processor: Any, messages: list[Message]) -> dict[str, torch.Tensor]:
    """What the processor makes of the conversation.

    Where the processor takes one thing at a time, the text has in each mark's place what it writes for that thing alone.
    """
    chat = [{"role": turn.role, "content": [_part(part) for part in turn.parts]} for turn in messages]
    if name_of(processor) in GLM:
        # Its template takes a list of parts from the user alone.
        chat = [turn if turn["role"] == "user" else {**turn, "content": turn["content"][0]["text"]} for turn in chat]
    text = processor.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    images = [part.source for part in images_of(messages)]
    videos = [load_video(part, location="test") for part in videos_of(messages)]
    if name_of(processor) not in APART or (len(images), len(videos)) == (0, 1):
        return _processed(processor, text, images=images, videos=videos)
    return _one_by_one(processor, text, images=images, videos=videos)


def _part(part: Any) -> dict[str, str]:
    if isinstance(part, TextPart):
        return {"type": "text", "text": part.text}
    return {"type": "video" if isinstance(part, VideoPart) else "image"}


def _processed(processor: Any, text: str, *, images: list[Any], videos: list[Video]) -> dict[str, torch.Tensor]:
    frames = [video.frames for video in videos]
    if name_of(processor) in IN_PAIRS:
        frames = [np.repeat(each, 2, axis=0) if len(each) == 1 else each for each in frames]
    given: dict[str, Any] = {"images": images} if images else {}
    if videos:
        given["videos"] = [list(each) for each in frames]
        given["do_sample_frames"] = False
        given["video_metadata"] = [
            {
                "fps": video.fps,
                "total_num_frames": len(each),
                "duration": len(each) / video.fps,
                "frames_indices": list(range(len(each))),
            }
            for video, each in zip(videos, frames, strict=True)
        ]
    # A start token stands in the text already, where there is one.
    return dict(processor(text=[text], **given, add_special_tokens=False, return_tensors="pt"))


def _one_by_one(processor: Any, text: str, *, images: list[Any], videos: list[Video]) -> dict[str, torch.Tensor]:
    tokenizer, media = processor.tokenizer, []
    left = {processor.image_token: list(images), processor.video_token: list(videos)}

    def written(mark: re.Match[str]) -> str:
        item = left[mark.group()].pop(0)
        given = {"images": [], "videos": [item]} if isinstance(item, Video) else {"images": [item], "videos": []}
        made = _processed(processor, mark.group(), **given)
        media.append(made)
        return tokenizer.decode(made["input_ids"][0])

    expanded = re.sub("|".join(map(re.escape, left)), written, text)
    ids = tokenizer([expanded], add_special_tokens=False, return_tensors="pt")
    assert not any(left.values())
    names = {name for item in media for name in item} - TEXT_KEYS
    return {**ids, **{name: torch.cat([item[name] for item in media if name in item]) for name in names}}


def stock_inputs(model: Any, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What the stock model takes in the place of such a batch of one: its own embeddings and positions where it takes no more."""
    kind, mixed = model.config.model_type, {"pixel_values", "pixel_values_videos"} <= given.keys()
    if kind in ("glm4v", "glm4v_moe") and mixed:
        return _of_glm(model, given)
    return given


def _of_glm(model: Any, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The placeholders of images and of videos are alike: the model wants as many as the features of either, and refuses both."""
    with pytest.raises(ValueError, match="do not match"):
        model(**given)
    embeds, types = model.get_input_embeddings()(given["input_ids"]), given["mm_token_type_ids"]
    images = model.get_image_features(given["pixel_values"], given["image_grid_thw"]).pooler_output
    videos = model.get_video_features(given["pixel_values_videos"], given["video_grid_thw"]).pooler_output
    for kind, features in ((1, images), (2, videos)):
        embeds = embeds.masked_scatter((types == kind)[..., None], torch.cat(features))
    names = ("input_ids", "mm_token_type_ids", "image_grid_thw", "video_grid_thw", "attention_mask")
    positions, _ = model.model.get_rope_index(**{name: given[name] for name in names})
    return {"inputs_embeds": embeds, "position_ids": positions, "attention_mask": given["attention_mask"]}
