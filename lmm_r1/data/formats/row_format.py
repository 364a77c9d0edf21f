"""What a row format is: how it is detected and read as messages, answer and media; and the keys that are refused."""

from __future__ import annotations

import ast
import json
import math
import numbers
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeAlias, TypeVar

from lmm_r1.data.messages import Message, TextPart
from lmm_r1.errors import UserError

RawRow: TypeAlias = dict[str, Any]
"""The columns of a row as its file holds them."""
Record: TypeAlias = tuple[RawRow, str, Path]
"""A row file's record, its location such as `rows.jsonl line 7`, and the folder that relative paths start from."""


class Unreadable(RawRow):
    """Takes the place of a record that its file does not hold in a readable form."""

    def __init__(self, error: UserError) -> None:
        super().__init__()
        self.error = error


@dataclass(frozen=True, kw_only=True)
class ColumnNames:
    """Columns that the user named instead of a format's own; None leaves them to the format."""

    prompt: str | None = None
    response: str | None = None
    answer: str | None = None
    images: str | None = None
    videos: str | None = None
    datasource: str | None = None
    chosen: str | None = None
    """For a preference: the better response, or the whole conversation with it."""
    rejected: str | None = None
    """The same for the worse response."""
    asked_only: bool = False
    """Not a column: nothing is trained on the rows, so a turn may be empty, and a tag is text if no column can fill it."""
    prefix: str = field(default="--data.", compare=False)
    """Not a column: how the command's flags about rows begin, for messages."""
    prompt_key: str = field(default="input_key", compare=False)
    """Not a column: the rest of the command's flag for `prompt`, for messages."""

    def flag(self, name: str) -> str:
        """Return the command's flag of this name: `--data.label_key` in a trainer, `--label_key` in others."""
        return f"{self.prefix}{name}"

    @property
    def prompt_flag(self) -> str:
        return self.flag(self.prompt_key)

    @property
    def names_sides(self) -> bool:
        """Whether the user named other columns than the usual ones for a preference's responses."""
        return self.chosen not in (None, "chosen") or self.rejected not in (None, "rejected")


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column's name, for messages, and its value, None if the record does not have it."""

    name: str
    value: Any


# Larger floats are not exact, and their digits would be made up.
_EXACT = 2**53
NOTHING = Column(name="response", value=None)


class Columns:
    """A record's columns as a format reads them; keeps track of the columns that were read."""

    def __init__(
        self, record: Mapping[str, Any], *, location: str, names: ColumnNames, format_is_named: bool = False
    ) -> None:
        """Args: format_is_named: the user named the row format instead of having it detected."""
        self.record = record
        self.location = location
        self.names = names
        self.format_is_named = format_is_named
        self.prompt_column = "messages"
        """Where the prompt was found, for messages."""
        self._taken: set[str] = set()
        self._shown: set[str] = set()

    def fail(self, sentence: str) -> NoReturn:
        raise UserError(f"{self.location}: {sentence}")

    def value(self, name: str) -> Any:
        """Return the value of a column, None if there is none; `a.b` also names the field `b` of the object `a`."""
        if name in self.record or "." not in name:
            return self.record.get(name)
        value: Any = self.record
        for key in name.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        return value

    def take(self, *names: str, key: str | None = None) -> Column:
        """Return the one of these columns that is filled, else the first of them, empty.

        Raises UserError if two of them differ, because one of them would be lost.

        Args:
            key: the name of the flag that chooses between them, for that message.
        """
        held = [Column(name=name, value=self.value(name)) for name in names if not is_empty(self.value(name))]
        if not held:
            return self.first(*names)
        self._taken.update(column.name for column in held)
        for other in held[1:]:
            if listed(other.value) != listed(held[0].value):
                way = "" if key is None else f"name the one to use with {self.names.flag(key)}, or "
                self.fail(
                    f'both "{held[0].name}" and "{other.name}" are given, and they differ; {way}empty one of them, or leave '
                    "it out"
                )
        return held[0]

    def first(self, *names: str) -> Column:
        """Return the first of these columns that is filled, else the first of them, empty."""
        held = next((name for name in names if not is_empty(self.value(name))), None)
        # A message should name a column that exists.
        name = held or next((name for name in names if name in self.record), names[0])
        self._taken.add(name)
        return Column(name=name, value=None if held is None else self.value(name))

    def text(self, *names: str) -> str | None:
        """Return the text of `take`, None if empty; raises UserError for anything but text and numbers."""
        found = self.take(*names)
        if found.value is None or isinstance(found.value, str):
            return found.value
        if isinstance(found.value, bool) or not isinstance(found.value, numbers.Number):
            self.fail(f'the field "{found.name}" must be text, not {type(found.value).__name__}')
        return text_of_number(found.value)

    def prompt(self, *names: str) -> Any:
        """Return the value of the prompt's column; raises UserError if it is missing or empty."""
        names = names if self.names.prompt is None else (self.names.prompt,)
        found = self._show(*names, key=self.names.prompt_key)
        self.prompt_column = found.name
        if found.value is None:
            wanted = " or ".join(f'"{name}"' for name in names)
            if found.name in self.record:
                self.fail(
                    f'the field "{found.name}" is empty; fill it in, or name another with {self.names.prompt_flag}'
                )
            self.fail(
                f"no field {wanted} (found: {', '.join(self.record) or 'nothing'}); name it with "
                f"{self.names.prompt_flag}, or another row format with {self.names.flag('format')}"
            )
        return found.value

    def answer(self, *names: str) -> Column:
        return self.take(*(names if self.names.answer is None else (self.names.answer,)), key="label_key")

    def images(self, *names: str, otherwise: str | None = None) -> Column:
        """Return the images of these columns.

        Args:
            otherwise: the column to use if all of these are empty; otherwise it only repeats them as paths.
        """
        if self.names.images is not None:
            return self._show(self.names.images)
        found = self._show(*names, key="image_key")
        return found if found.value is not None or otherwise is None else self._show(otherwise)

    def videos(self, *names: str) -> Column:
        return self._show(*(names if self.names.videos is None else (self.names.videos,)))

    def _show(self, *names: str, key: str | None = None) -> Column:
        found = self.take(*names, key=key)
        self._shown.add(found.name)
        return found

    def datasource(self, *names: str) -> str:
        """Return the value by which metrics are split; raises UserError if the column that the user named is missing."""
        named = self.names.datasource
        if named is not None and named not in self.record and self.value(named) is None:
            self.fail(
                f'no field "{named}" (found: {", ".join(self.record)}); name the source\'s with '
                f"{self.names.flag('datasource_key')}"
            )
        value = self.first(*(names if named is None else (named,))).value
        return "default" if value is None else str(value)

    def rest(self) -> RawRow:
        """Return the columns that were not read."""
        return {name: value for name, value in self.record.items() if name not in self._taken}

    def outside_prompt(self) -> RawRow:
        """Return all columns except the prompt and its media, for reward functions and environments."""
        return {name: value for name, value in self.record.items() if name not in self._shown}


@dataclass(frozen=True, kw_only=True)
class AskedFields:
    """The prompt of a record in any format, not yet validated."""

    messages: Any
    """A list of messages, its JSON text, or text with `<image>` and `<video>` tags."""
    images: Column
    """The images for `<image>` tags and for image parts without a source, in order."""
    videos: Column
    """The same for videos."""
    datasource: str


@dataclass(frozen=True, kw_only=True)
class RowFields(AskedFields):
    """A prompt with its answer and its response."""

    answer: Column
    """The gold answer."""
    response: Column = NOTHING
    """The assistant turn after the messages, as text or as a message, for SFT."""
    prefill: str = ""
    """How a response begins; the model continues it."""


Fields = TypeVar("Fields", bound=AskedFields)


@dataclass(frozen=True, kw_only=True)
class RowFormat(Generic[Fields]):
    """One kind of row; a file has it if it has a column of each of `needs` and none of `without`."""

    name: str
    source: str
    """Whose rows they are, in one or two words."""
    needs: tuple[tuple[str, ...], ...]
    without: tuple[str, ...] = ()
    adapt: Callable[[Columns], Fields]
    each: Callable[[Record], Record] | None = None
    """Makes a record one of this format."""

    def fits(self, columns: set[str]) -> bool:
        return all(not columns.isdisjoint(names) for names in self.needs) and columns.isdisjoint(self.without)

    @property
    def wants(self) -> str:
        """Its columns in words: `problem, solution`."""
        return ", ".join(" or ".join(names) for names in self.needs)


def text_of_number(value: Any) -> str:
    """Return a number as text; pandas makes 7.0 of 7 in a column with an empty cell."""
    is_float = isinstance(value, numbers.Real) and not isinstance(value, int)
    return str(int(value)) if is_float and abs(float(value)) < _EXACT and value % 1 == 0 else str(value)


def listed(value: Any) -> list[Any]:
    """Return a media column's value as a list; a single entry needs no list."""
    if value is None:
        return []
    is_list = isinstance(value, Sequence) and not isinstance(value, (str, bytes))
    return list(value) if is_list else [value]


def is_empty(value: Any) -> bool:
    """Return whether a value is empty: null, NaN as pandas may write it, a blank text, an empty list, only empty fields."""
    if isinstance(value, Mapping):
        return all(map(is_empty, value.values()))
    if isinstance(value, float):
        return math.isnan(value)
    return value is None or (isinstance(value, Sequence) and not (value.strip() if isinstance(value, str) else value))


def media_entries(column: Column) -> list[Any]:
    """Return the images or videos of a column, without empty entries."""
    return [entry for entry in listed(column.value) if not is_empty(entry)]


def read_list(text: str) -> list[Any] | None:
    """Return the list that a text holds as JSON or as a Python literal, None for any other text; executes nothing."""
    for read in (json.loads, ast.literal_eval):
        try:
            value = read(text)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            continue
        if isinstance(value, list):
            return value
    return None


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
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Keys of an assistant's message that hold its thought as text."""
_THOUGHTS = "reasoning_details thinking_blocks thought thoughts refusal"
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


def as_thought(text: str) -> str:
    """Return a thought in its tags; one that has them is returned unchanged."""
    return text if "<think>" in text else f"<think>{text}</think>"


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
