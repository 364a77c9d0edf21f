"""What kits share in turning messages into ids and media: loading a processor, checking a chat, placeholders, bounds."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmm_r1.errors import UserError

if TYPE_CHECKING:
    import torch
    from PIL import Image
    from transformers import PretrainedConfig, PreTrainedTokenizerBase, ProcessorMixin

    from lmm_r1.data.messages import Message


def text_positions(attention_mask: torch.Tensor) -> torch.Tensor:
    """Return positions that count the attended tokens of each row from 0; (B, T) from a (B, T) mask, any padding side."""
    return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)


def ids_beyond_tokenizer(config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the ids of a padded vocabulary that the tokenizer does not know."""
    return tuple(range(len(tokenizer), config.get_text_config().vocab_size))


def collapse_runs(token_ids: Sequence[int], *, placeholders: frozenset[int]) -> list[int]:
    """Keep one of every run of equal placeholders: [1, 9, 9, 9, 2] -> [1, 9, 2] for placeholder 9."""
    return [
        token
        for index, token in enumerate(token_ids)
        if token not in placeholders or index == 0 or token_ids[index - 1] != token
    ]


def bounded_size(*, height: int, width: int, factor: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """Return (height, width) as multiples of `factor` with an area inside the bounds and nearly the same aspect ratio.

    The area wins over the aspect ratio, and the upper bound over the lower; sides never fall below `factor`.
    """
    rows, columns = (max(factor, round(side / factor) * factor) for side in (height, width))
    if rows * columns > max_pixels:
        scale = math.sqrt(max_pixels / (height * width))
        rows, columns = (max(factor, math.floor(side * scale / factor) * factor) for side in (height, width))
    elif rows * columns < min_pixels:
        scale = math.sqrt(min_pixels / (height * width))
        rows, columns = (math.ceil(side * scale / factor) * factor for side in (height, width))
    # Where one side stands at its smallest, or both were rounded up, the longer one gives way.
    if rows * columns > max_pixels:
        shorter = min(rows, columns)
        longer = max(factor, max_pixels // shorter // factor * factor)
        rows, columns = (longer, shorter) if rows > columns else (shorter, longer)
    return rows, columns


def within_pixel_bounds(
    image: Image.Image, *, min_pixels: int | None, max_pixels: int | None, most: int
) -> Image.Image:
    """Resize an image to its own pixel bounds, for a processor that scales it up to whole crops.

    Fewer pixels mean fewer crops, down to one; more than the processor's largest number of crops holds, `most`, are no use.
    """
    from PIL import Image as pillow

    if min_pixels is None and max_pixels is None:
        return image
    size = within_bounds(
        width=image.width, height=image.height, min_pixels=min_pixels, max_pixels=max_pixels, most=most
    )
    return image.resize(size, pillow.Resampling.BICUBIC)


def within_bounds(
    *, width: int, height: int, min_pixels: int | None, max_pixels: int | None, most: int
) -> tuple[int, int]:
    """Return the width and height to which `within_pixel_bounds` resizes an image of this size."""
    if min_pixels is None and max_pixels is None:
        return width, height
    highest = min(most, max_pixels or most)
    rows, columns = bounded_size(
        height=height, width=width, factor=1, min_pixels=min(min_pixels or 1, highest), max_pixels=highest
    )
    return columns, rows


def images_refused(sizes: Iterable[tuple[int, int]], error: ValueError) -> UserError:
    """Return the error of a row whose images, of these widths and heights, an image processor does not take."""
    told = ", ".join(f"{width}x{height}" for width, height in sizes)
    return UserError(f"the image processor refuses the images ({told}): {error}; take the row out")


def load_image_processor(
    path: str,
    *,
    processor_class: type[ProcessorMixin] | tuple[type[ProcessorMixin], ...],
    chat_template: str | None = None,
) -> Any:
    """Load the processor of a model with images; raises UserError where a part of it or the chat template is missing.

    Args:
        processor_class: what it is, or several that it may be.
        chat_template: takes the place of the checkpoint's own.
    """
    from transformers import AutoProcessor

    # Either name holds the image processor's settings; transformers 5 writes the first.
    names = ("processor_config.json", "preprocessor_config.json")
    wanted = f"copy {' or '.join(names)}, the tokenizer files and the chat template of the original model into it"
    folder = Path(path)
    if folder.is_dir() and not any((folder / name).is_file() for name in names):
        raise UserError(f"{path}: no image processor in this checkpoint; {wanted}")
    try:
        processor = AutoProcessor.from_pretrained(path)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path}: the image processor or the tokenizer of this checkpoint cannot be loaded ({error}); {wanted}"
        ) from error
    if not isinstance(processor, processor_class):
        raise UserError(f"{path}: this checkpoint has a tokenizer but no image processor; {wanted}")
    if chat_template is not None:
        processor.chat_template = processor.tokenizer.chat_template = chat_template
    # Some processor classes take no chat template when they are loaded; the same file gives the tokenizer its own.
    if processor.chat_template is None:
        processor.chat_template = processor.tokenizer.chat_template
    check_chat(processor, tokenizer=processor.tokenizer, path=path)
    return processor


def adds_special_tokens(tokenizer: PreTrainedTokenizerBase, *, text: str) -> bool:
    """Return whether the tokenizer is to add its start token to a rendered chat: not where the template wrote it."""
    return tokenizer.bos_token is None or not text.startswith(tokenizer.bos_token)


def chat_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return the ids of a rendered chat, which begin with one start token where the tokenizer has any."""
    return tokenizer(text, add_special_tokens=adds_special_tokens(tokenizer, text=text))["input_ids"]


def any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Return an expression that matches each of the texts, the longest where several begin alike; nothing for none."""
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) if longest_first else r"(?!)")


def check_typed_media(messages: Sequence[Message], *, media_tokens: Sequence[str]) -> None:
    """Raise UserError where a text holds a media token: it would stand for an image that is not there."""
    from lmm_r1.data.messages import TextPart

    texts = [part.text for message in messages for part in message.parts if isinstance(part, TextPart)]
    typed = [token for token in media_tokens for text in texts if token in text]
    if typed:
        raise UserError(f"the text of a message holds the media token {typed[0]}; take it out of the row")


def check_placeholders(written: int, *, given: int, kind: str) -> None:
    """Raise UserError where a rendered chat has other than one placeholder per image, or per video as `kind` says."""
    if written != given:
        raise UserError(
            f"the checkpoint's chat template writes {written} placeholders for the {given} {kind} of a row"
        )


def check_image_marks(text: str, *, mark: str, media_tokens: Sequence[str], given: int) -> None:
    """Raise UserError where a text that holds the chat template's marks has other than one mark per image.

    Args:
        mark: what the template writes for an image.
        media_tokens: those that may stand nowhere else.
    """
    written, rest = text.count(mark), text.replace(mark, "")
    if typed := next((token for token in media_tokens if token in rest), None):
        raise UserError(
            f"the text holds the media token {typed} where none belongs; this model's mark of an image is {mark}"
        )
    if written != given:
        raise UserError(f"the text holds {written} marks {mark} for {given} images; write one for each")


def check_chat(processor: Any, *, tokenizer: PreTrainedTokenizerBase, path: str) -> None:
    """Raise UserError where a checkpoint brings no vocabulary or no usable chat template.

    Transformers lets both pass: an empty tokenizer is made, and a template is first looked at when it is used.
    """
    import jinja2

    if len(tokenizer) <= len(tokenizer.all_special_ids):
        raise UserError(f"{path}: no tokenizer in this checkpoint; copy the original model's tokenizer files into it")
    if processor.chat_template is None:
        raise UserError(
            f"{path}: no chat template in this checkpoint; copy the original model's chat_template.jinja (or the "
            "tokenizer_config.json or chat_template.json that holds it) into it"
        )
    try:
        processor.apply_chat_template([{"role": "user", "content": "?"}], tokenize=False)
    except jinja2.TemplateError as error:
        raise UserError(f"{path}: the chat template of this checkpoint is broken ({error}); correct it") from error


@contextmanager
def placed(location: str) -> Iterator[None]:
    """Put the place of a row in front of what a kit has against it, in one sentence also where a chat template refuses it."""
    import jinja2

    try:
        yield
    except jinja2.TemplateError as error:
        raise UserError(
            f"{location}: the checkpoint's chat template refuses the conversation ({error}); write the turns as the template "
            "takes them, or take the row out"
        ) from error
    except UserError as error:
        raise UserError(f"{location}: {error}") from error


def chat_of(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages in the form that Hugging Face's chat templates take."""
    from lmm_r1.data.messages import to_chat

    return to_chat(messages)


def part_lists(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages in that form as lists of parts, for templates that write nothing for a message that is a string."""
    return [
        {**turn, "content": [{"type": "text", "text": turn["content"]}]} if isinstance(turn["content"], str) else turn
        for turn in map(dict, chat_of(messages))
    ]
