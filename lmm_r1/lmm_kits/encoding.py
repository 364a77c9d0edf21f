"""What kits share in turning messages into ids and media: processors, chats, placeholders, pixel bounds, video frames."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image

from lmm_r1.data.messages import ImagePart, Message, TextPart, VideoPart, to_chat
from lmm_r1.errors import UserError

if TYPE_CHECKING:
    import numpy as np
    import torch
    from transformers import PretrainedConfig, PreTrainedTokenizerBase, ProcessorMixin

    from lmm_r1.data.images import Video

FRAMES_PER_STEP = 2
"""Frames that a processor which takes frames in pairs joins into one step of time."""


def text_positions(attention_mask: torch.Tensor) -> torch.Tensor:
    """Return positions that count the attended tokens of each row from 0; (B, T) from a (B, T) mask, any padding side."""
    return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)


def ids_beyond_tokenizer(config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the ids of a padded vocabulary that the tokenizer does not know."""
    return tuple(range(len(tokenizer), config.get_text_config().vocab_size))


def known_ids(tokenizer: PreTrainedTokenizerBase, texts: Iterable[str]) -> set[int]:
    """Return the ids of the texts that are tokens of the tokenizer."""
    ids = (tokenizer.convert_tokens_to_ids(text) for text in texts)
    return {token for token in ids if token is not None and token != tokenizer.unk_token_id}


def collapse_runs(token_ids: Sequence[int], *, placeholders: frozenset[int]) -> list[int]:
    """Keep one of every run of equal placeholders: [1, 9, 9, 9, 2] -> [1, 9, 2] for placeholder 9."""
    return [
        token
        for index, token in enumerate(token_ids)
        if token not in placeholders or index == 0 or token_ids[index - 1] != token
    ]


def any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern that matches any of the texts, the longest one first; without texts it matches nothing."""
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) if longest_first else r"(?!)")


def adds_special_tokens(tokenizer: PreTrainedTokenizerBase, *, text: str) -> bool:
    """Return whether the tokenizer must add its start token to a rendered chat, because the template did not write it."""
    return tokenizer.bos_token is None or not text.startswith(tokenizer.bos_token)


def part_lists(messages: Sequence[Message]) -> list[dict[str, object]]:
    """Return the turns for a chat template with every content as a list of parts, for templates that skip strings."""
    return [
        {**turn, "content": [{"type": "text", "text": turn["content"]}]} if isinstance(turn["content"], str) else turn
        for turn in map(dict, to_chat(messages))
    ]


def joined_texts(messages: Sequence[Message], *, separator: str, role: str | None = None) -> list[Mapping[str, Any]]:
    """Return the turns for a chat template, with text parts joined into one string; turns with media stay as they are.

    Args:
        role: whose texts are joined; everybody's by default.
    """

    def joined(turn: Mapping[str, Any]) -> Mapping[str, Any]:
        content = turn["content"]
        if isinstance(content, str) or any(part["type"] != "text" for part in content):
            return turn
        return {**turn, "content": separator.join(part["text"] for part in content)}

    return [joined(turn) if role in (None, turn["role"]) else turn for turn in to_chat(messages)]


def check_typed_media(messages: Sequence[Message], *, media_texts: re.Pattern[str]) -> None:
    """Raise UserError if a text holds a media token, which would refer to an image that does not exist."""
    texts = (part.text for message in messages for part in message.parts if isinstance(part, TextPart))
    if typed := next(filter(None, map(media_texts.search, texts)), None):
        raise UserError(f"the text of a message holds the media token {typed[0]}; take it out of the row")


def check_placeholders(written: int, *, given: int, kind: str) -> None:
    """Raise UserError unless a rendered chat has one placeholder per image, or per video as `kind` says."""
    if written != given:
        raise UserError(
            f"the checkpoint's chat template writes {written} placeholders for the {given} {kind} of a row"
        )


def check_image_marks(text: str, *, mark: str, media_tokens: Sequence[str], given: int) -> None:
    """Raise UserError unless a text with the chat template's marks has one mark per image.

    Args:
        mark: what the template writes for an image.
        media_tokens: tokens that may appear only inside a mark.
    """
    written, rest = text.count(mark), text.replace(mark, "")
    if typed := next((token for token in media_tokens if token in rest), None):
        raise UserError(
            f"the text holds the media token {typed} where none belongs; this model's mark of an image is {mark}"
        )
    if written != given:
        raise UserError(f"the text holds {written} marks {mark} for {given} images; write one for each")


def check_chat(processor: Any, *, tokenizer: PreTrainedTokenizerBase, path: str) -> None:
    """Raise UserError if a checkpoint has no vocabulary or no usable chat template.

    Transformers reports neither: it makes an empty tokenizer, and it reads a template only when the template is used.
    """
    if len(tokenizer) <= len(tokenizer.all_special_ids):
        raise UserError(f"{path}: no tokenizer in this checkpoint; copy the original model's tokenizer files into it")
    if processor.chat_template is None:
        raise UserError(
            f"{path}: no chat template in this checkpoint; copy the original model's chat_template.jinja (or the "
            "tokenizer_config.json or chat_template.json that holds it) into it"
        )
    try:
        processor.apply_chat_template([{"role": "user", "content": "?"}], tokenize=False)
    except Exception as error:  # templates raise what they like
        raise UserError(f"{path}: the chat template of this checkpoint is broken ({error}); correct it") from error


def check_tokens(tokenizer: PreTrainedTokenizerBase, tokens: Iterable[str], *, path: str) -> None:
    """Raise UserError if the checkpoint's tokenizer lacks one of the tokens."""
    lacking = set(tokens) - tokenizer.get_vocab().keys()
    if lacking:
        raise UserError(
            f"{path}: the tokenizer of this checkpoint has no {' and no '.join(sorted(lacking))}; copy the original "
            "model's tokenizer files into it"
        )


@contextmanager
def placed(location: str) -> Iterator[None]:
    """Prefix what a kit or a chat template refuses with the location of the row."""
    import jinja2

    try:
        yield
    except (jinja2.TemplateError, TypeError) as error:
        raise UserError(
            f"{location}: the checkpoint's chat template refuses the conversation ({error}); write the turns as the template "
            "takes them, or take the row out"
        ) from error
    except UserError as error:
        raise UserError(f"{location}: {error}") from error


def load_image_processor(
    path: str, *, processor_classes: tuple[type[ProcessorMixin], ...], chat_template: str | None = None
) -> Any:
    """Load the processor of a model with images; raises UserError if a part of it or the chat template is missing.

    Args:
        processor_classes: the classes of which it must be one.
        chat_template: replaces the checkpoint's own.
    """
    from transformers import AutoProcessor

    # Either file can hold the image processor's settings; transformers 5 writes the first.
    names = ("processor_config.json", "preprocessor_config.json")
    wanted = f"copy {' or '.join(names)}, the tokenizer files and the chat template of the original model into it"
    folder = Path(path)
    if folder.is_dir() and not any((folder / name).is_file() for name in names):
        raise UserError(f"{path}: no image processor in this checkpoint; {wanted}")
    try:
        processor = AutoProcessor.from_pretrained(path)
    except ImportError as error:
        raise UserError(f"{path}: {error}") from error
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path}: the image processor or the tokenizer of this checkpoint cannot be loaded ({error}); {wanted}"
        ) from error
    if not isinstance(processor, processor_classes):
        raise UserError(f"{path}: this checkpoint has a tokenizer but no image processor; {wanted}")
    if chat_template is not None:
        processor.chat_template = processor.tokenizer.chat_template = chat_template
    # Some processor classes do not load a chat template; the tokenizer reads its own from the same file.
    if processor.chat_template is None:
        processor.chat_template = processor.tokenizer.chat_template
    check_chat(processor, tokenizer=processor.tokenizer, path=path)
    return processor


def bounded_size(*, height: int, width: int, factor: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """Return (height, width) as multiples of `factor` with an area inside the bounds and nearly the same aspect ratio.

    The area takes precedence over the aspect ratio, and the upper bound over the lower; no side is shorter than `factor`.
    """
    rows, columns = (max(factor, round(side / factor) * factor) for side in (height, width))
    if rows * columns > max_pixels:
        scale = math.sqrt(max_pixels / (height * width))
        rows, columns = (max(factor, math.floor(side * scale / factor) * factor) for side in (height, width))
    elif rows * columns < min_pixels:
        scale = math.sqrt(min_pixels / (height * width))
        rows, columns = (math.ceil(side * scale / factor) * factor for side in (height, width))
    # If one side has its minimum, or both were rounded up, shorten the longer one.
    if rows * columns > max_pixels:
        shorter = min(rows, columns)
        longer = max(factor, max_pixels // shorter // factor * factor)
        rows, columns = (longer, shorter) if rows > columns else (shorter, longer)
    return rows, columns


def resized(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    """Return an image of this width and height, which both training and rollouts get; the same image if it has them."""
    return image if image.size == size else image.resize(size, Image.Resampling.BICUBIC)


def bounded_image_size(
    part: ImagePart | VideoPart, *, width: int, height: int, limits: tuple[int, int], factor: int = 1
) -> tuple[int, int]:
    """Return the width and height of an image of this size within its part's pixel bounds, as far as `limits` allow.

    Args:
        limits: the fewest and the most pixels that the processor scales an image to.
        factor: sides become multiples of it.
    """
    if part.min_pixels is None and part.max_pixels is None:
        return width, height
    lowest, highest = limits
    highest = min(highest, part.max_pixels or highest)
    lowest = min(max(lowest, part.min_pixels or lowest), highest)
    rows, columns = bounded_size(height=height, width=width, factor=factor, min_pixels=lowest, max_pixels=highest)
    return columns, rows


def bounded_video(processor: ProcessorMixin, video: Video, part: VideoPart, *, frames_together: int = 1) -> Video:
    """Resize a video's frames to its part's pixel bounds, as far as the processor's own bounds allow.

    Args:
        frames_together: how many frames share the pixels that the processor's bounds limit.
    """
    import numpy as np

    if part.min_pixels is None and part.max_pixels is None:
        return video
    video_processor = processor.video_processor
    lowest = -(-video_processor.size["shortest_edge"] // frames_together)
    highest = max(lowest, video_processor.size["longest_edge"] // frames_together)
    upper = min(max(lowest, part.max_pixels or highest), highest)
    height, width = bounded_size(
        height=video.frames.shape[1],
        width=video.frames.shape[2],
        factor=video_processor.patch_size * video_processor.merge_size,
        min_pixels=min(max(lowest, part.min_pixels or lowest), upper),
        max_pixels=upper,
    )
    frames = [
        np.asarray(Image.fromarray(frame).resize((width, height), Image.Resampling.BICUBIC)) for frame in video.frames
    ]
    return replace(video, frames=np.stack(frames))


def bounded_steps(processor: ProcessorMixin, video: Video, part: VideoPart) -> Video:
    """Resize a video to its part's pixel bounds, for a processor that takes frames in pairs and bounds all of them together.

    Such a processor refuses a single frame, so a single frame is repeated.
    """
    import numpy as np

    if len(video.frames) < FRAMES_PER_STEP:
        video = replace(video, frames=np.repeat(video.frames, FRAMES_PER_STEP, axis=0))
    # The processor rounds the number of frames to whole steps.
    frames_together = round(len(video.frames) / FRAMES_PER_STEP) * FRAMES_PER_STEP
    return bounded_video(processor, video, part, frames_together=frames_together)


def channels_first(video: Video) -> np.ndarray:
    """Return frames (N, 3, H, W), because processors mistake frames (N, H, W, 3) of height 1 or 3 for that layout."""
    import numpy as np

    return np.ascontiguousarray(video.frames.transpose(0, 3, 1, 2))


def video_metadata(video: Video) -> dict[str, object]:
    """Return the metadata by which a processor takes all frames as they are."""
    import numpy as np

    number = len(video.frames)
    return {
        "fps": video.fps,
        "total_num_frames": number,
        "duration": number / video.fps,
        # An array, because a processor appends to a list.
        "frames_indices": np.arange(number),
    }


def images_refused(sizes: Iterable[tuple[int, int]], error: ValueError) -> UserError:
    """Return the error for a row whose images or videos, given by width and height, a processor refuses."""
    listed = ", ".join(f"{width}x{height}" for width, height in sizes)
    return UserError(f"the processor refuses the images or videos ({listed}): {error}; take the row out")
