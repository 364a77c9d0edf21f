"""Conversation rows: LMM-R1's messages, r1_vlm's with a prefill, ShareGPT's and LLaVA's, Mini-o3's episodes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from lmm_r1.data.formats.row_format import (
    NOTHING,
    Column,
    Columns,
    RowFields,
    RowFormat,
    listed,
    media_entries,
    read_list,
)

MESSAGES = ("message", "messages")
DATASOURCE = ("datasource", "data_source")
PLACEHOLDER = "IMAGE_PLACEHOLDER"
"""r1_vlm's placeholder for the row's image in a message."""
# By a conversation's name for a speaker; other names are reported as unknown roles.
_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "function_call": "assistant",
    "observation": "tool",
}
_JSON_MESSAGES = re.compile(r"\s*\[\s*\{")
_TAG = re.compile(r"<(image|video)>")
_MARKED = re.compile(r"^####\s*(\S.*?)\s*\Z", re.MULTILINE)
_BOX = "\\boxed{"
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_OBSERVATION = re.compile(r"observation_(\d+)(?:\.\w+)?")
_ORIGINAL = re.compile(r"original_image(?:_(\d+))?(?:\.\w+)?")


def _lmm_r1(columns: Columns) -> RowFields:
    """Rows of messages, also ms-swift's with a `solution`; and rows of any columns of which the user named the prompt's."""
    prompt = columns.prompt(*MESSAGES)
    # Messages may have their own images, which a column may repeat.
    is_text = isinstance(prompt, str) and not _JSON_MESSAGES.match(prompt)
    images = columns.images("images", *(("image",) if is_text else ()))
    messages = with_system(media_first(prompt, images), columns=columns)
    turns = written_messages(messages)
    responds = not isinstance(turns, str) and _split_last(listed(turns))[1] is not None
    return RowFields(
        messages=messages,
        answer=gold_answer(columns, "answer"),
        images=images,
        videos=columns.videos("videos"),
        datasource=columns.datasource(*DATASOURCE),
        response=NOTHING if responds else columns.take("solution"),
    )


def gold_answer(columns: Columns, *names: str) -> Column:
    """Return the gold answer: of a worked solution, its end.

    Args:
        names: the columns that hold it; `solution` does in rows without them.
    """
    found = columns.answer(*names)
    if found.value is None and columns.names.answer is None:
        solution = columns.take("solution")
        # A message about a missing answer names the usual column.
        found = found if solution.value is None else solution
    return replace(found, value=_end_of(found.value)) if isinstance(found.value, str) else found


def _end_of(solution: str) -> str:
    """Return what a solution says in its answer tags, after GSM8K's `####`, or in the last box of a text."""
    from remote_rm.answers.extraction import last_boxed

    if (answer := unwrapped(solution)) != solution:
        return answer
    if (marked := _MARKED.search(solution)) is not None:
        return marked[1]
    boxed = None if solution.strip().startswith(_BOX) else last_boxed(solution)
    return solution if boxed is None else boxed


def media_first(prompt: Any, images: Column) -> Any:
    """Return a prompt with its images before the first user turn, if it has no places for images or videos."""
    count = len(media_entries(images))
    written = written_messages(prompt)
    if not count or isinstance(written, str):
        return prompt if not count or _TAG.search(written) else "<image>" * count + written
    if not isinstance(written, Sequence):
        return prompt
    turns = [chat_message(turn) for turn in written]
    contents = [turn.get("content") if isinstance(turn, Mapping) else None for turn in turns]
    asked = next((at for at, turn in enumerate(turns) if isinstance(turn, Mapping) and turn.get("role") == "user"), -1)
    if asked < 0 or any(map(_has_places, contents)):
        return prompt
    content = contents[asked]
    parts = [{"type": "image"}] * count
    shown = "<image>" * count + content if isinstance(content, str) else [*parts, *listed(content)]
    return [*turns[:asked], {**turns[asked], "content": shown}, *turns[asked + 1 :]]


def _has_places(content: Any) -> bool:
    if isinstance(content, str):
        return _TAG.search(content) is not None
    return any(isinstance(part, Mapping) and part.get("type") not in (None, "text") for part in listed(content))


def _r1_vlm(columns: Columns) -> RowFields:
    """Take a final assistant turn as a prefill only if the row has r1_vlm's placeholder, or the user named the format.

    Otherwise the row is a whole conversation with an `image` column, as in many datasets.
    """
    messages = columns.prompt("messages")
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        columns.fail(f'the messages in "{columns.prompt_column}" must be a list with at least one message')
    messages = with_system(messages, columns=columns)
    # An addition row asks for the sum, while its label lists the digits.
    sums = ("total",) if columns.record.get("task") == "addition" else ()
    labels = ("answer", *sums, "label", "solution")
    answer = columns.first(*labels) if columns.names.answer is None else columns.answer(*labels)
    if isinstance(answer.value, list):
        answer = Column(name=answer.name, value=json.dumps(answer.value, ensure_ascii=False))
    contents = [message.get("content") for message in messages if isinstance(message, Mapping)]
    parts = [part for content in contents if not isinstance(content, str) for part in listed(content)]
    images = (part for part in parts if isinstance(part, Mapping) and part.get("type") == "image")
    sources = [part.get("image") for part in images]
    image = Column(name="image", value=None)
    if not sources or any(source in (None, PLACEHOLDER) for source in sources):
        image = columns.images("image", "images")
    last = None
    beside = columns.names.images or "image"
    has_image = bool(media_entries(Column(name=beside, value=columns.record.get(beside))))
    if PLACEHOLDER in sources or (columns.format_is_named and not has_image):
        messages, last = _split_last([_without_placeholders(message) for message in messages])
    return RowFields(
        messages=media_first(messages, image),
        answer=answer,
        images=image,
        videos=columns.videos("videos"),
        datasource=columns.datasource(*DATASOURCE, "task"),
        response=Column(name="messages", value=last),
        prefill=response_text(last) or "",
    )


def _without_placeholders(message: Any) -> Any:
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, Sequence) or isinstance(content, str):
        return message
    parts = [
        {**part, "image": None} if isinstance(part, Mapping) and part.get("image") == PLACEHOLDER else part
        for part in content
    ]
    return {**message, "content": parts}


def _conversation(columns: Columns, *, images: Column) -> RowFields:
    turns = columns.prompt("conversations")
    # Its text is JSON or a Python literal, which is never executed.
    turns = read_list(turns) if isinstance(turns, str) else turns
    if not isinstance(turns, Sequence):
        columns.fail('"conversations" must be a list of turns, or the text of one in JSON or as a Python literal')
    before, last = _split_last(with_system(turns, columns=columns))
    answer = columns.answer("answer")
    return RowFields(
        messages=before,
        answer=answer if answer.value is not None else Column(name="conversations", value=response_text(last)),
        images=images,
        videos=columns.videos("videos", "video"),
        datasource=columns.datasource(*DATASOURCE),
        response=Column(name="conversations", value=last),
    )


def _mini_o3_cold_start(columns: Columns) -> RowFields:
    """An episode with the tool: images in the order of their names, and the answer of the last turn."""
    fields = _conversation(columns, images=_ordered(columns))
    return replace(fields, answer=Column(name=fields.answer.name, value=unwrapped(fields.answer.value)))


def _ordered(columns: Columns) -> Column:
    images, names = columns.images("images"), listed(columns.take("image_names").value)
    entries = media_entries(images)
    if len(names) != len(entries):
        columns.fail(
            f'"image_names" has {len(names)} names for {len(entries)} images in "{images.name}"; each needs one'
        )
    places = []
    for name in map(str, names):
        found = _ORIGINAL.fullmatch(name) or _OBSERVATION.fullmatch(name)
        if found is None:
            # Other names do not indicate an order.
            return images
        places.append((found.re is _OBSERVATION, int(found[1] or 0)))
    order = sorted(range(len(entries)), key=places.__getitem__)
    return Column(name=images.name, value=[entries[index] for index in order])


def unwrapped(solution: Any) -> Any:
    """`"<answer> 3 </answer>"` → `"3"`; anything without exactly one such block is returned unchanged."""
    held = _ANSWER.findall(solution) if isinstance(solution, str) else []
    return held[0].strip() if len(held) == 1 else solution


def _split_last(messages: Sequence[Any]) -> tuple[list[Any], Any]:
    last = messages[-1] if messages else None
    if isinstance(last, Mapping) and last.get("role") == "assistant" and len(messages) > 1:
        return list(messages[:-1]), last
    return list(messages), None


def with_system(prompt: Any, *, columns: Columns) -> Any:
    """Return a prompt preceded by the column `system`; it becomes chat messages if that is filled.

    Raises:
        UserError: the messages begin with another system turn.
    """
    system = columns.text("system")
    turns = prompt if system is None else written_messages(prompt)
    before: list[Any] = [] if system is None else [{"role": "system", "content": system}]
    if isinstance(turns, str) or not isinstance(turns, Sequence):
        return [*before, {"role": "user", "content": turns}] if before else turns
    turns = [chat_message(turn) for turn in turns]
    own = turns[0] if turns and isinstance(turns[0], Mapping) and turns[0].get("role") == "system" else None
    if own is None or system is None:
        return [*before, *turns]
    if str(response_text(own)).strip() != system.strip():
        columns.fail('the messages begin with a system turn, and the field "system" differs from it; keep one')
    return turns


def written_messages(value: Any) -> Any:
    """Return the messages that a text lists as JSON, as in tables; anything else unchanged."""
    if not isinstance(value, str) or not _JSON_MESSAGES.match(value):
        return value
    turns = read_list(value)
    are_turns = turns and all(isinstance(turn, Mapping) and {"role", "from"} & turn.keys() for turn in turns)
    return turns if are_turns else value


def chat_message(turn: Any) -> Any:
    """Return `{"from": "gpt", "value": "4"}` as `{"role": "assistant", "content": "4"}`; anything else unchanged."""
    if not isinstance(turn, Mapping) or "role" in turn:
        return turn
    speaker = turn.get("from")
    others = {key: value for key, value in turn.items() if key not in ("from", "value")}
    return {"role": _ROLES.get(str(speaker), speaker), "content": turn.get("value"), **others}


def response_text(response: Any) -> str | None:
    """Return the text of an assistant turn; None if there is none."""
    if response is None or isinstance(response, str):
        return response
    content = response.get("content") if isinstance(response, Mapping) else None
    if isinstance(content, str) or content is None:
        return content
    return "".join(str(part.get("text", "")) for part in listed(content) if isinstance(part, Mapping))


CHATS = (
    RowFormat(
        name="lmm_r1", source="messages of LMM-R1 and ms-swift", needs=(MESSAGES,), without=("image",), adapt=_lmm_r1
    ),
    RowFormat(name="r1_vlm", source="r1_vlm", needs=(("messages",), ("image",)), without=("message",), adapt=_r1_vlm),
    RowFormat(
        name="sharegpt",
        source="ShareGPT, LLaVA",
        needs=(("conversations",),),
        without=("image_names",),
        adapt=lambda columns: _conversation(columns, images=columns.images("images", "image")),
    ),
    RowFormat(
        name="mini_o3_cold_start",
        source="Mini-o3 cold start",
        needs=(("conversations",), ("image_names",), ("images",)),
        adapt=_mini_o3_cold_start,
    ),
)
