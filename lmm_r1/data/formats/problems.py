"""Rows with one question: problems with labels, and helpers that read the prompts of other formats."""

from __future__ import annotations

import json
import re
import string
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from lmm_r1.data.formats.chats import (
    DATASOURCE,
    MESSAGES,
    chat_message,
    gold_answer,
    media_first,
    read_list,
    unwrapped,
    with_surroundings,
    written_messages,
)
from lmm_r1.data.formats.row_format import Column, Columns, Record, RowFields, RowFormat, filled, is_empty, listed

OPTIONS = string.ascii_uppercase[:10]
CHOOSE = "Answer with the letter of the right option."
"""Follows the options of a multiple-choice question."""
_NUMBERED_IMAGE = re.compile(r"<image (\d+)>")
# A shorter text is not an image, but the index of the row that holds it.
_SHORTEST_IMAGE = 64
_CONVERSATIONS = (*MESSAGES, "conversations", "chosen", "rejected")


def _problem(columns: Columns, *, answer: str, datasource: tuple[str, str] = DATASOURCE) -> RowFields:
    """A problem with its solution, which is both answer and response."""
    solution, images = columns.answer(answer), columns.images("images")
    return RowFields(
        messages=with_surroundings(media_first(columns.prompt("problem"), images), columns=columns),
        answer=solution,
        images=images,
        videos=columns.videos("videos"),
        datasource=columns.datasource(*datasource),
        response=solution,
    )


def _r1_v(columns: Columns) -> RowFields:
    """The image comes before the problem; the answer is the content of the solution's answer tags."""
    solution = columns.answer("solution")
    thinking = columns.text("thinking")
    worked = solution.value
    if thinking is not None and filled(worked):
        worked = f"{thinking}\n\n{worked}"
    images = columns.images("image")
    return RowFields(
        messages=with_surroundings(media_first(columns.prompt("problem"), images), columns=columns),
        answer=Column(name=solution.name, value=unwrapped(solution.value)),
        images=images,
        videos=columns.videos("videos"),
        datasource=columns.datasource(*DATASOURCE),
        response=Column(name=solution.name, value=worked),
    )


def _flat(columns: Columns) -> RowFields:
    """A question with its answer, under the usual names for both; SFT trains on the solution, if there is one."""
    images = columns.images(*IMAGES)
    prompt = prompt_of(columns, images=images, names=PROMPTS)
    answer, solution = gold_answer(columns, *_ANSWERS), columns.take("solution")
    worked = solution if solution.value is not None else columns.answer(*_ANSWERS)
    return RowFields(
        messages=prompt,
        answer=answer,
        images=images,
        videos=columns.videos(*VIDEOS),
        datasource=columns.datasource(*DATASOURCE),
        response=worked,
    )


def _verl(columns: Columns) -> RowFields:
    images = columns.images(*IMAGES)
    prompt = prompt_of(columns, images=images, names=("prompt",))
    judged = columns.take("reward_model").value
    if judged is not None and not isinstance(judged, Mapping):
        columns.fail('the field "reward_model" must be an object with "ground_truth"; correct it')
    answer = columns.answer(_GROUND_TRUTH)
    if isinstance(answer.value, list | dict):
        answer = replace(answer, value=json.dumps(answer.value, ensure_ascii=False))
    response = columns.take(*RESPONSE_COLUMNS)
    return RowFields(
        messages=prompt,
        answer=answer,
        images=images,
        videos=columns.videos(*VIDEOS),
        datasource=columns.datasource(*DATASOURCE),
        response=answer if response.value is None else response,
    )


def _vlmeval(columns: Columns) -> RowFields:
    """One question of a benchmark: images, hint, question and options, in this order."""
    images = _images(columns)
    columns.prompt("question")
    question = columns.text(columns.prompt_column) or ""
    lines = [f"{letter}. {option}" for letter in OPTIONS if (option := columns.text(letter)) is not None]
    hint = columns.text("hint")
    text = "\n".join([*([] if hint is None else [hint]), question, *([*lines, CHOOSE] if lines else [])])
    answer = columns.answer("answer")
    return RowFields(
        messages=with_surroundings(
            [{"role": "user", "content": _placed(text, images, columns=columns)}], columns=columns
        ),
        answer=answer,
        images=Column(name="image", value=None),
        videos=Column(name="videos", value=None),
        datasource=columns.datasource("category"),
        response=answer,
    )


def _images(columns: Columns) -> list[Any]:
    column = columns.images("image", otherwise="image_path")
    # Tables may store several images as the text of a list.
    is_text = isinstance(column.value, str) and column.value.startswith("[")
    images = listed((read_list(column.value) if is_text else None) or column.value)
    for image in images:
        if _is_pointer(image):
            columns.fail(
                f'the "{column.name}" {image} is neither an image nor the index of a row with one image; correct it'
            )
    return images


def _placed(text: str, images: Sequence[Any], *, columns: Columns) -> list[dict[str, object]]:
    """Return parts with the images at `<image 1>` and so on; images without such a place come first."""
    pieces = _NUMBERED_IMAGE.split(text)
    numbers = [int(number) for number in pieces[1::2]]
    if wrong := [number for number in numbers if not 1 <= number <= len(images)]:
        columns.fail(f"the question names <image {wrong[0]}>, and the row has {len(images)} images; correct it")
    unplaced = [image for number, image in enumerate(images, start=1) if number not in numbers]
    parts: list[dict[str, object]] = [{"type": "image", "image": image} for image in unplaced]
    for place, piece in enumerate(pieces):
        if place % 2:
            parts.append({"type": "image", "image": images[int(piece) - 1]})
        elif piece.strip():
            parts.append({"type": "text", "text": piece.strip()})
    return parts


def _is_pointer(image: Any) -> bool:
    """Return whether an image is given by the index of another row, as in benchmarks with several questions per image."""
    if isinstance(image, str):
        return len(image) <= _SHORTEST_IMAGE and image.strip().isdecimal()
    return isinstance(image, int)


def _linked(records: list[Record]) -> list[Record]:
    """Return the records with the images of the rows that they refer to; an index with several images is ignored."""
    images: dict[str, object] = {}
    for record, _, _ in records:
        index, image = str(record.get("index")), record.get("image")
        if image is not None and not _is_pointer(image):
            images[index] = image if images.get(index, image) == image else None

    def with_image(record: dict[str, object]) -> dict[str, object]:
        image = record.get("image")
        pointed = images.get(str(image).strip()) if _is_pointer(image) else None
        return record if pointed is None else {**record, "image": pointed}

    return [(with_image(record), location, base_dir) for record, location, base_dir in records]


PROMPTS = ("prompt", "question", "query", "instruction", "problem")
RESPONSE_COLUMNS = ("response", "completion", "output")
CONVERSATIONS = (*MESSAGES, "conversations")
IMAGES = ("images", "image")
VIDEOS = ("videos", "video")
# Elsewhere, a label may be the verdict on a response.
_ANSWERS = ("answer", "label")
_GROUND_TRUTH = "reward_model.ground_truth"

PROBLEMS = (
    RowFormat(
        name="easyr1",
        source="EasyR1",
        needs=(("problem",), ("answer",)),
        # The format has no column for a single image, which would be lost.
        without=("image", "prompt", *_CONVERSATIONS),
        adapt=partial(_problem, answer="answer"),
    ),
    RowFormat(
        name="r1_v",
        source="R1-V",
        needs=(("problem",), ("solution",)),
        # In a row with an answer, the solution is the working.
        without=("answer", "images", "prompt", *_CONVERSATIONS),
        adapt=_r1_v,
    ),
    RowFormat(
        name="mini_o3",
        source="Mini-o3",
        needs=(("problem",), ("solution",), ("images",)),
        without=("answer", "image", "prompt", *_CONVERSATIONS),
        adapt=partial(_problem, answer="solution", datasource=("data_source", "datasource")),
    ),
    RowFormat(
        name="vlmeval",
        source="VLMEvalKit",
        needs=(("index",), ("question",), ("image", "image_path")),
        without=_CONVERSATIONS,
        adapt=_vlmeval,
        link=_linked,
    ),
    RowFormat(name="verl", source="verl", needs=(("prompt",), ("reward_model",)), without=_CONVERSATIONS, adapt=_verl),
    RowFormat(
        name="flat",
        source="questions with answers, TRL",
        needs=(PROMPTS, (*_ANSWERS, "solution")),
        without=(*RESPONSE_COLUMNS, "reward_model", *_CONVERSATIONS),
        general=True,
        adapt=_flat,
    ),
)


_TAGS = re.compile("(<image>|<video>)")


def prompt_of(columns: Columns, *, images: Column, names: tuple[str, ...] = (*PROMPTS, *CONVERSATIONS)) -> Any:
    """Return the prompt in one of these columns, followed by alpaca's `input` and preceded by `system` and `history`.

    Raises:
        UserError: there is none, or the other columns cannot be combined with it.
    """
    prompt = columns.prompt(*held_prompts(columns, names))
    if columns.names.prompt != "input" and (more := columns.text("input")) is not None:
        if not isinstance(prompt, str):
            columns.fail(
                f'"input" requires a prompt that is text; put it into "{columns.prompt_column}", and empty "input"'
            )
        prompt = f"{prompt}\n{more}"
    return with_surroundings(media_first(prompt, images), columns=columns)


def held_prompts(columns: Columns, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the columns of which one holds the prompt, without conversations if another one is filled.

    Datasets repeat the prompt in a conversation with a response; raises UserError for one that begins differently.
    """
    prompt = columns.record.get("prompt")
    if "prompt" in names and not is_empty(prompt) and not isinstance(written_messages(prompt), str):
        # The other columns are what TRL's scripts made the messages of.
        names = ("prompt", *(name for name in names if name in CONVERSATIONS))
    held = [name for name in names if not is_empty(columns.record.get(name))]
    prompt = next((name for name in held if name not in CONVERSATIONS), None)
    if prompt is None or columns.names.prompt is not None:
        return names
    for name in held:
        turns = columns.record[name]
        if name in CONVERSATIONS and not _begins(turns, columns.record[prompt]):
            columns.fail(
                f'both "{prompt}" and "{name}" are given, and "{name}" does not begin with it; empty one of them'
            )
    return tuple(name for name in names if name not in CONVERSATIONS)


def _begins(turns: Any, prompt: Any) -> bool:
    if isinstance(turns, str) or not isinstance(turns, Sequence):
        return False
    asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if not isinstance(asked, Sequence):
        return False
    said, wanted = (
        [turn for turn in map(chat_message, part) if not isinstance(turn, Mapping) or turn.get("role") != "system"]
        for part in (turns, asked)
    )
    return len(said) >= len(wanted) and all(map(same_words, said, wanted))


def same_turn(one: Any, other: Any) -> bool:
    """Return whether two chat messages are equal, however a text is written and whatever empty fields they have."""
    return _written(one) == _written(other)


def same_words(one: Any, other: Any) -> bool:
    """Return whether two chat messages have the same text, ignoring images and videos."""
    return _words(one) == _words(other)


def _written(turn: Any) -> Any:
    """Return a form of a message that is equal for equal ones: a tag becomes an image part without a source."""
    if not isinstance(turn, Mapping):
        return turn
    role, content = turn.get("role"), turn.get("content")
    if isinstance(content, str):
        pieces = [content] if role == "assistant" else _TAGS.split(content)
        parts: list[Any] = [
            {"type": piece.strip("<>")} if place % 2 else piece.strip() for place, piece in enumerate(pieces)
        ]
        return role, [part for part in parts if part]
    if not isinstance(content, Sequence):
        return role, content
    return role, [written for part in content if (written := _part(part))]


def _part(part: Any) -> Any:
    """Return a part without empty fields, with its text stripped."""
    if not isinstance(part, Mapping):
        return part
    text = part.get("text")
    if part.get("type") == "text" and isinstance(text, str):
        return text.strip()
    return {name: _part(value) for name, value in part.items() if value is not None}


def _words(turn: Any) -> Any:
    written = _written(turn)
    if not isinstance(written, tuple):
        return written
    role, parts = written
    return role, [part for part in parts if isinstance(part, str)] if isinstance(parts, list) else parts
