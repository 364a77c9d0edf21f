"""What other tools act on in rows, messages and parts, and what is refused by name."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lmm_r1.data.formats.chats import read_list
from lmm_r1.data.formats.row_format import Columns, is_empty, listed
from lmm_r1.data.messages import Message, TextPart

# Marks of turns in the loss, of ms-swift, OpenAI, axolotl, LLaMA-Factory, verl and slime; torchtune's says the opposite.
_MARKS = "loss weight train training trainable loss_weight loss_scale loss_mask step_loss_mask masked"
_YES, _NO = ("true", "yes", "1", "1.0"), ("false", "no", "0", "0.0")
IMAGE_SOURCES = ("bytes", "image", "image_url", "url", "path", "base64")
VIDEO_SOURCES = ("video", "video_url", "url", "path")
_TEMPLATE, _TOOLS = "write such settings into the chat template", "write the tools into a system turn"
_MARKED, _CONTENT = "mark the whole turn", "write it into the content"
_SETTINGS = "chat_template_kwargs template_kwargs chat_template mm_processor_kwargs enable_thinking"
_CLIP = "video_start video_end start end start_time end_time start_frame end_frame sample_fps raw_fps video_fps video_metadata"
_SIZE = "nframes num_frames min_frames total_pixels resized_height resized_width"
_THOUGHTS = "reasoning_content reasoning reasoning_details thinking thinking_blocks thought thoughts refusal"
_MEDIA = "audio audios image images video videos objects documents"
ROW, MESSAGE, TEXT_PART, MEDIA_PART = "columns", "keys of messages", "keys of texts", "keys of images and videos"
# By level: the keys that are refused, with what to do instead.
_REFUSED: Mapping[str, Mapping[str, str]] = {
    ROW: {
        "tools functions": _TOOLS,
        "audio audios": "no model takes audio here",
        _SETTINGS: _TEMPLATE,
        "history": "write earlier turns into messages",
        "rejected_images multi_modal_data": "put images into the column images",
    },
    MESSAGE: {
        f"tool_calls function_call {_THOUGHTS} {_MEDIA}": _CONTENT,
        "tools functions": _TOOLS,
        _SETTINGS: _TEMPLATE,
        "train_detail training_detail mask": _MARKED,
        "prefix partial": "use the format r1_vlm for beginnings",
    },
    TEXT_PART: {_MARKS: _MARKED},
    MEDIA_PART: {f"{_CLIP} {_SIZE}": "change the file beforehand", _MARKS: _MARKED},
}
_OPTIONS = re.compile(r"(answer_?)?(choices|options|candidates)|(?:option|choice|opt)[ _]?(?:[a-j]|\d)|[A-J]")


def check_keys(level: str, given: Mapping[str, Any], columns: Columns, *, where: str | None = None) -> None:
    """Raise UserError for a filled key that other tools act on and that is not read.

    Args:
        where: what has the keys, if it is not the row.
    """
    for key, value in given.items():
        way = next((way for names, way in _REFUSED[level].items() if key in names.split()), None)
        if way is None or is_empty(value):
            continue
        # Only switches of templates and marks say something by being off.
        if value is not False or way in (_TEMPLATE, _MARKED):
            found = f'the field "{key}" is' if where is None else f'{where} has "{key}", which is'
            columns.fail(f"{found} not read; {way}, or remove it")


def loss_mark(turn: Mapping[str, Any], columns: Columns, *, where: str) -> bool | None:
    """Return whether a message is marked as in the loss or not, None without a mark; raises UserError for other marks."""
    found: set[bool] = set()
    for key in _MARKS.split():
        if is_empty(value := turn.get(key)):
            continue
        if (text := str(value).strip().lower()) not in (*_YES, *_NO):
            columns.fail(
                f'{where} has "{key}" {value!r}; it must be true or 1 for a turn in the loss, false or 0 for others'
            )
        found.add((text in _YES) != (key == "masked"))
    if len(found) > 1:
        columns.fail(f"{where} is marked both as in the loss and as not in it; keep one of the marks")
    return found.pop() if found else None


def hidden_options(record: Mapping[str, Any], messages: Sequence[Message]) -> str | None:
    """Return what is wrong with a prompt that does not show all options of a row; None if it does, or has none."""
    text = " ".join(part.text for turn in messages for part in turn.parts if isinstance(part, TextPart)).casefold()
    held = {name: list(_options(value)) for name, value in record.items() if _OPTIONS.fullmatch(name)}
    names = [name for name, options in held.items() if any(option.casefold() not in text for option in options)]
    several = len([option for options in held.values() for option in options]) > 1
    return f'its prompt does not show all options of "{", ".join(names)}"' if names and several else None


def _options(value: Any) -> Iterator[str]:
    """Yield the texts of options, of a list, an object or the text of a list."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, str) and value.startswith("["):
        value = read_list(value) or value
    for option in listed(value):
        if isinstance(option, Mapping | list):
            yield from _options(option)
        elif not is_empty(option):
            yield str(option)
