"""Formats of judged responses: preferences with their two sides."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NoReturn

from lmm_r1.data.formats.chats import (
    DATASOURCE,
    chat_message,
    gold_answer,
    media_first,
    response_text,
    with_surroundings,
    written_messages,
)
from lmm_r1.data.formats.problems import (
    CONVERSATIONS,
    IMAGES,
    PROMPTS,
    RESPONSE_COLUMNS,
    VIDEOS,
    held_prompts,
    prompt_of,
    same_turn,
    same_words,
)
from lmm_r1.data.formats.row_format import (
    NOTHING,
    Column,
    Columns,
    PairFields,
    RowFields,
    RowFormat,
    filled,
    is_empty,
    listed,
)

_ASKED = (*PROMPTS, *CONVERSATIONS)
_BETTER_SCORES = ("chosen_reward", "chosen_score", "score_chosen")
_WORSE_SCORES = ("rejected_reward", "rejected_score", "score_rejected")
# The speakers in hh-rlhf's dialogues.
_SPEAKER = re.compile(r"(?:^|\n\n)(Human|Assistant):")
_SPEAKERS = {"Human": "user", "Assistant": "assistant"}


def sides(columns: Columns, *, images: Column) -> tuple[Any, Column, Column]:
    """Return the prompt of a preference, and its two responses as text or turns.

    Without a prompt column, the prompt is the common beginning of both sides. With one, the sides may repeat it.
    """
    better = columns.take(columns.names.chosen or "chosen")
    worse = columns.take(columns.names.rejected or "rejected")
    for side, flag in ((better, "chosen_key"), (worse, "rejected_key")):
        if side.value is None:
            columns.fail(
                f'the field "{side.name}" is empty; fill it in, or name another with {columns.names.flag(flag)}'
            )
    better, worse = (replace(side, value=written_messages(side.value)) for side in (better, worse))
    if columns.names.prompt is None and all(is_empty(columns.record.get(name)) for name in _ASKED):
        columns.prompt_column = better.name
        prompt, better, worse = _common(better, worse, columns=columns)
        return with_surroundings(media_first(prompt, images), columns=columns), better, worse
    plain = columns.prompt(*held_prompts(columns, _ASKED))
    prompt = prompt_of(columns, images=images)
    return prompt, _without_prompt(plain, better, columns=columns), _without_prompt(plain, worse, columns=columns)


def _without_prompt(prompt: Any, side: Column, *, columns: Columns) -> Column:
    """Return a side without the prompt, if it is a conversation that begins with it."""
    turns = _turns(side.value)
    if turns is None or _role(turns[0]) not in ("user", "system"):
        return side
    asked = _turns(prompt) or [{"role": "user", "content": prompt}]
    begun = turns[: len(asked)]
    if len(begun) < len(asked) or not all(map(same_turn, begun, asked)):
        sentence = f'"{side.name}" begins with a prompt that differs from the row\'s'
        _fail_as_different(asked, begun, sentence, columns=columns)
    return Column(name=side.name, value=turns[len(asked) :])


def _common(better: Column, worse: Column, *, columns: Columns) -> tuple[Any, Column, Column]:
    texts = better.value, worse.value
    if all(isinstance(text, str) for text in texts):
        talks = [_dialogue(text) for text in texts]
        if None in talks:
            return _common_text(better, worse, columns=columns)
        better, worse = (Column(name=side.name, value=talk) for side, talk in zip((better, worse), talks, strict=True))
    one, other = _turns(better.value), _turns(worse.value)
    if one is None or other is None or "assistant" in (_role(one[0]), _role(other[0])):
        columns.fail(_no_prompt(better, worse, flag=columns.names.prompt_flag))
    count = next(
        (place for place, pair in enumerate(zip(one, other, strict=False)) if not same_turn(*pair)),
        min(len(one), len(other)),
    )
    # If one conversation is the beginning of the other, its last turn is the response.
    count = min(count, len(one) - 1, len(other) - 1)
    if _role(one[count]) != "assistant" or _role(other[count]) != "assistant":
        sentence = f'"{better.name}" and "{worse.name}" are answers to different prompts'
        _fail_as_different(one, other, sentence, columns=columns)
    rest = [Column(name=side.name, value=turns[count:]) for side, turns in ((better, one), (worse, other))]
    return one[:count], rest[0], rest[1]


def _common_text(better: Column, worse: Column, *, columns: Columns) -> tuple[str, Column, Column]:
    """`"The sky is blue."`, `"The sky is green."` → `"The sky is"`, `" blue."`, `" green."`: words are not split."""
    shared = os.path.commonprefix([better.value, worse.value])
    blank, line = shared.rfind(" "), shared.rfind("\n")
    # As tokenizers expect: a blank begins the rest, and a line ends with its break.
    count = blank if blank > line else line + 1
    prompt = shared[: max(count, 0)]
    if not prompt.strip():
        columns.fail(_no_prompt(better, worse, flag=columns.names.prompt_flag))
    rest = [Column(name=side.name, value=side.value[len(prompt) :]) for side in (better, worse)]
    return prompt, rest[0], rest[1]


def _no_prompt(better: Column, worse: Column, *, flag: str) -> str:
    return (
        f'no field {" or ".join(_ASKED)} with the prompt, and "{better.name}" and "{worse.name}" do not begin with the '
        f"same; name it with {flag}"
    )


def _fail_as_different(one: Sequence[Any], other: Sequence[Any], sentence: str, *, columns: Columns) -> NoReturn:
    for turn, twin in zip(one, other, strict=False):
        if not same_turn(turn, twin):
            if same_words(turn, twin):
                sentence = "an image or a video is on one side only, or differs between the two"
            break
    columns.fail(f"{sentence}; both responses must answer the same prompt")


def _dialogue(text: str) -> list[dict[str, str]] | None:
    """Return the turns of a text like `"\\n\\nHuman: Hi.\\n\\nAssistant: Hello."`, None for any other text."""
    pieces = _SPEAKER.split(text)
    if pieces[0].strip() or "Human" not in pieces[1::2] or "Assistant" not in pieces[1::2]:
        return None
    spoken = zip(pieces[1::2], pieces[2::2], strict=True)
    return [{"role": _SPEAKERS[speaker], "content": said.strip()} for speaker, said in spoken]


def _turns(value: Any) -> list[Any] | None:
    """Return the chat messages of a non-empty list; None for anything else."""
    if isinstance(value, str) or not isinstance(value, Sequence) or not value:
        return None
    return [chat_message(turn) for turn in value]


def _role(turn: Any) -> Any:
    return turn.get("role") if isinstance(turn, Mapping) else None


def _pair(columns: Columns) -> PairFields:
    images = columns.images(*IMAGES)
    prompt, better, worse = sides(columns, images=images)
    return PairFields(
        messages=prompt,
        images=images,
        videos=columns.videos(*VIDEOS),
        datasource=columns.datasource(*DATASOURCE),
        chosen=better,
        rejected=worse,
        chosen_score=columns.take(*_BETTER_SCORES),
        rejected_score=columns.take(*_WORSE_SCORES),
        margin=columns.take("margin"),
    )


def _rlhf_v(columns: Columns) -> PairFields:
    """Question and responses are JSON text; the image comes before the question."""
    text, columns.prompt_column = columns.take("text").value, "text"
    try:
        held = json.loads(text) if isinstance(text, str) else text
    except (ValueError, RecursionError) as error:
        columns.fail(f'the field "text" is not valid JSON: {error}')
    if not isinstance(held, Mapping):
        columns.fail(
            'the field "text" must be an object with "question", "chosen" and "rejected", or JSON text of one'
        )
    for name in ("question", "chosen", "rejected"):
        if not isinstance(held.get(name), str) or not held[name].strip():
            columns.fail(f'"{name}" in the field "text" must be a text that is not empty')
    images = columns.images("image", "images", otherwise="image_path")
    return PairFields(
        messages=media_first(held["question"], images),
        images=images,
        videos=columns.videos(*VIDEOS),
        datasource=columns.datasource(*DATASOURCE, "origin_dataset"),
        chosen=Column(name="chosen", value=held["chosen"]),
        rejected=Column(name="rejected", value=held["rejected"]),
        chosen_score=Column(name="chosen_score", value=None),
        rejected_score=Column(name="rejected_score", value=None),
        margin=columns.take("margin"),
    )


def _vlfeedback(columns: Columns) -> PairFields:
    """Choose the completions with the best and the worst mean rating; the first of equal ones."""
    completions = _completions(columns)
    rated = [(_mean_rating(completion, number, columns=columns), completion) for number, completion in completions]
    best = max(rated, key=lambda pair: pair[0])
    worst = min(rated, key=lambda pair: pair[0])
    if best[0] == worst[0]:
        columns.fail(
            f"all {len(rated)} completions have the mean rating {best[0]:g}, so none is better; leave the row out"
        )
    images = columns.images("img_path", *IMAGES)
    return PairFields(
        messages=prompt_of(columns, images=images),
        images=images,
        videos=columns.videos(*VIDEOS),
        datasource=columns.datasource(*DATASOURCE),
        chosen=Column(name="the best of completions", value=best[1].get("response")),
        rejected=Column(name="the worst of completions", value=worst[1].get("response")),
        chosen_score=Column(name="the best rating", value=best[0]),
        rejected_score=Column(name="the worst rating", value=worst[0]),
        margin=columns.take("margin"),
    )


def _completions(columns: Columns) -> list[tuple[int, Mapping[str, Any]]]:
    """Return the completions with their numbers: a list of objects, or an object of lists, as `datasets` may store it."""
    value = columns.take("completions").value
    if isinstance(value, Mapping):
        lists = {name: listed(entries) for name, entries in value.items()}
        if len({len(entries) for entries in lists.values()}) != 1:
            columns.fail('the lists in "completions" differ in length; each completion needs an entry in all of them')
        value = [dict(zip(lists, entries, strict=True)) for entries in zip(*lists.values(), strict=True)]
    entries = listed(value)
    if len(entries) < 2 or not all(isinstance(entry, Mapping) for entry in entries):
        columns.fail('"completions" must be a list of two or more objects with "response" and "annotations"')
    return list(enumerate(entries, start=1))


def _mean_rating(completion: Mapping[str, Any], number: int, *, columns: Columns) -> float:
    """Return the mean of a completion's ratings, ignoring aspects without a number, such as N/A."""
    aspects, ratings = completion.get("annotations"), []
    for aspect in aspects.values() if isinstance(aspects, Mapping) else ():
        rating: Any = aspect.get("Rating") if isinstance(aspect, Mapping) else None
        with suppress(ValueError, OverflowError, TypeError):
            ratings.append(float(rating))
    ratings = list(filter(math.isfinite, ratings))
    if not ratings:
        columns.fail(
            f'completion {number} of "completions" has no "Rating" that is a number in its "annotations"; rate it, or leave it '
            "out"
        )
    return sum(ratings) / len(ratings)


PREFERENCES = (
    RowFormat(name="preference", source="preferences", needs=(("chosen",), ("rejected",)), adapt=_pair),
    RowFormat(
        name="rlhf_v",
        source="RLHF-V",
        needs=(("text",), ("ds_name", "origin_dataset", "origin_split"), ("image", "images", "image_path")),
        without=("chosen", "rejected"),
        adapt=_rlhf_v,
    ),
    RowFormat(
        name="vlfeedback",
        source="VLFeedback",
        needs=(("prompt",), ("completions",)),
        without=("chosen", "rejected", "labels"),
        adapt=_vlfeedback,
    ),
)


def _pairs(columns: Columns) -> RowFields:
    prompt = prompt_of(columns, images=columns.images(*IMAGES), names=PROMPTS)
    response = _turn(columns.take(*RESPONSE_COLUMNS), columns=columns)
    return _fields(columns, prompt=prompt, response=response)


def _preference(columns: Columns) -> RowFields:
    """Without a prompt column, the common beginning of the two sides is the prompt."""
    prompt, better, worse = sides(columns, images=columns.images(*IMAGES))
    return _fields(
        columns, prompt=prompt, response=_turn(better, columns=columns), rejected=_turn(worse, columns=columns)
    )


def _fields(columns: Columns, *, prompt: Any, response: Column, rejected: Column = NOTHING) -> RowFields:
    images = columns.images(*IMAGES)
    if isinstance(prompt, Sequence) and not isinstance(prompt, str):
        prompt = [chat_message(turn) for turn in prompt]
    answer = gold_answer(columns, "answer")
    return RowFields(
        messages=media_first(prompt, images),
        answer=answer if answer.value is not None else Column(name=response.name, value=response_text(response.value)),
        images=images,
        videos=columns.videos("videos"),
        datasource=columns.datasource(*DATASOURCE),
        response=response,
        rejected=rejected,
    )


def _turn(column: Column, *, columns: Columns) -> Column:
    """Return a response's text or message; a list must hold exactly one message."""
    value = chat_message(written_messages(column.value))
    if isinstance(value, Sequence) and not isinstance(value, str):
        if len(value) != 1:
            columns.fail(f'"{column.name}" must be text or one message, not a list of {len(value)}')
        value = chat_message(value[0])
    if not filled(value):
        columns.fail(f'the field "{column.name}" is empty; fill it in')
    if not isinstance(value, str) and not (isinstance(value, Mapping) and value.get("role") == "assistant"):
        columns.fail(f'"{column.name}" must be text or a message of the assistant')
    return Column(name=column.name, value=value)


RESPONSES = (
    RowFormat(
        name="pairs",
        source="prompt/response pairs",
        needs=(PROMPTS, RESPONSE_COLUMNS),
        without=("chosen", "rejected", "reward_model", *CONVERSATIONS),
        general=True,
        adapt=_pairs,
    ),
    RowFormat(name="preference", source="preferences", needs=(("chosen",), ("rejected",)), adapt=_preference),
)
