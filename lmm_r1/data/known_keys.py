"""What other tools act on in rows, messages and parts: the keys that are read, and those that are refused by name."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lmm_r1.data.formats.chats import read_list
from lmm_r1.data.formats.row_format import Columns, is_empty, listed
from lmm_r1.data.messages import Message, TextPart

# Marks of turns in the loss, of ms-swift, OpenAI, axolotl, LLaMA-Factory, verl and slime; torchtune's says the opposite.
_MARKS = (
    *("loss", "weight", "train", "training", "trainable", "loss_weight", "loss_scale", "loss_mask", "step_loss_mask"),
    "masked",
)
_YES, _NO = ("true", "yes", "1", "1.0"), ("false", "no", "0", "0.0")
IMAGE_SOURCES = ("bytes", "image", "image_url", "url", "path", "base64")
VIDEO_SOURCES = ("video", "video_url", "url", "path")


@dataclass(frozen=True, kw_only=True)
class Level:
    """The keys of a row, a message or a part."""

    name: str
    """In the plural, for messages."""
    read: tuple[str, ...] = ()
    refused: Mapping[str, str]
    """What to do instead, by names separated by blanks."""

    def check(self, given: Mapping[str, Any], columns: Columns, *, where: str | None = None) -> None:
        """Note the filled keys that nothing reads; raises UserError for one that other tools act on.

        Args:
            where: what has the keys, if it is not the row.
        """
        for key, value in given.items():
            if key in self.read or is_empty(value):
                continue
            way = next((way for names, way in self.refused.items() if key in names.split()), None)
            # Only switches of templates and marks say something by being off.
            if way is not None and (value is not False or way in (_TEMPLATE, _MARKED)):
                found = f'the field "{key}" is' if where is None else f'{where} has "{key}", which is'
                columns.fail(f"{found} not read; {way}, or remove it")
            columns.overlooked.add((self.name, key))


_TEMPLATE = "write such settings into the chat template"
_SETTINGS = "chat_template_kwargs template_kwargs chat_template mm_processor_kwargs enable_thinking"
_TOOLS = "write the tools into a system turn"
_MARKED = "mark the whole turn"
ROW = Level(
    name="columns",
    refused={
        "tools functions": _TOOLS,
        "audio audios": "no model takes audio here",
        "rejected_images multi_modal_data": "put images into the column images, or into parts of the messages",
        _SETTINGS: _TEMPLATE,
    },
)
MESSAGE = Level(
    name="keys of messages",
    read=("role", "content", "from", "value", *_MARKS),
    refused={
        "tool_calls function_call reasoning_content reasoning reasoning_details thinking thinking_blocks thought thoughts "
        "refusal": "write it into the content",
        "tools functions": _TOOLS,
        "audio audios image images video videos objects documents": "write it as parts of the content",
        "train_detail training_detail mask": _MARKED,
        "prefix partial": "give responses a beginning with the format r1_vlm",
        _SETTINGS: _TEMPLATE,
    },
)
_SOURCES = ("type", "text", *IMAGE_SOURCES, *VIDEO_SOURCES)
TEXT_PART = Level(name="keys of parts", read=_SOURCES, refused={" ".join(_MARKS): _MARKED})
MEDIA_PART = Level(
    name="keys of parts",
    read=(*_SOURCES, "min_pixels", "max_pixels", "fps", "max_frames"),
    refused={
        "video_start video_end start end start_time end_time start_frame end_frame nframes num_frames min_frames sample_fps "
        "raw_fps video_fps video_metadata total_pixels resized_height resized_width": "change the file beforehand",
        **TEXT_PART.refused,
    },
)
# How ms-swift marks the places of references and boxes, which it takes from the column `objects`.
_PLACES = ("<ref-object>", "<bbox>")
_OPTIONS = re.compile(r"(answer_?)?(choices|options|candidates)|(?:option|choice|opt)[ _]?(?:[a-j]|\d)|[A-J]")


def loss_mark(turn: Mapping[str, Any], columns: Columns, *, where: str) -> bool | None:
    """Return whether a message is marked as in the loss or not, None without a mark; raises UserError for other marks."""
    found: set[bool] = set()
    for key in _MARKS:
        if is_empty(value := turn.get(key)):
            continue
        text = str(value).strip().lower()
        if text not in (*_YES, *_NO):
            columns.fail(
                f'{where} has "{key}" {value!r}; a turn is in the loss (true or 1) or not (false or 0): correct it'
            )
        found.add((text in _YES) != (key == "masked"))
    if len(found) > 1:
        columns.fail(f"{where} is marked both as in the loss and as not in it; keep one of the marks")
    return found.pop() if found else None


def check_columns(columns: Columns) -> None:
    """Raise UserError if a column that the format has not read is one that other tools act on."""
    rest = columns.rest()
    ROW.check(rest, columns)
    if not is_empty(rest.get("objects")) and (place := next((x for x in _PLACES if x in str(columns.record)), None)):
        columns.fail(f'the text has {place}, and the column "objects" is not read; write its values into the text')


@dataclass
class Overlooked:
    """What rows hold that no training reads."""

    keys: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Rows by the level and the key."""
    options: dict[str, str] = field(default_factory=dict)
    """What is not shown, by the row's location."""

    def add(self, columns: Columns, messages: Sequence[Message]) -> None:
        """Note what a valid row holds."""
        self.keys.update(columns.overlooked)
        text = " ".join(part.text for turn in messages for part in turn.parts if isinstance(part, TextPart)).casefold()
        held = {name: list(_options(value)) for name, value in columns.rest().items() if _OPTIONS.fullmatch(name)}
        names = [name for name, options in held.items() if any(option.casefold() not in text for option in options)]
        if len([option for options in held.values() for option in options]) > 1 and names:
            self.options[columns.location] = f'its prompt does not show all options of "{", ".join(names)}"'

    @property
    def notes(self) -> list[str]:
        """One sentence per level."""
        levels = dict.fromkeys(level for level, _ in sorted(self.keys))
        return [f"{level} that no training reads: {self._listed(level)}" for level in levels]

    def _listed(self, level: str) -> str:
        found = sorted((key, count) for (of, key), count in self.keys.items() if of == level)
        return ", ".join(f"{key} ({count:,} row{'s' * (count > 1)})" for key, count in found)


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
