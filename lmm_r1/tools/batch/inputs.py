"""What batch inference reads and selects: rows, given responses and episodes."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from lmm_r1.data.files import all_records
from lmm_r1.data.formats import OWN, PROMPT_ROWS
from lmm_r1.data.formats.row_format import Record, RowFields, RowFormat, Unreadable
from lmm_r1.data.messages import Message, Part, SkippedRow, TextPart, demonstration, kind_of
from lmm_r1.data.reading import RowReading
from lmm_r1.data.row_parser import stored_messages
from lmm_r1.data.sample import WHOLE, Completion, EpisodeResult, Said
from lmm_r1.errors import UserError
from lmm_r1.generation.engine import Outcome
from remote_rm.verifier import Score

MESSAGES = "messages"
"""The field with the conversation of a response that is an episode."""
END = "end"
_MARK = "<image>"


def episode_fields(played: EpisodeResult, *, folder: Path, location: str) -> dict[str, object]:
    """Return the fields of an episode, in addition to those of its last turn.

    Raises UserError if the places of its pictures are unknown.

    Args:
        folder: the folder of the output file; pictures below it get relative paths.
        location: the row's location, for messages.
    """
    messages = [*played.shown, *(_message(said, location=location) for said in played.said)]
    within = os.path.abspath(folder)

    def path_from_there(path: str) -> str:
        return os.path.relpath(path, within) if Path(path).is_relative_to(within) else path

    return {
        END: played.end,
        "turns": played.turns,
        "shown_images": played.images,
        "counts": dict(played.counts),
        MESSAGES: with_paths(stored_messages(messages), path_from_there),
    }


def with_earned(score: Score | None, played: EpisodeResult) -> Score | None:
    """Return the score of an episode's last turn plus the environment's rewards; None if there is neither."""
    if not played.rewards:
        return score
    earned = sum(played.rewards.values())
    if score is None:
        return Score(reward=earned, score=earned, parts=dict(played.rewards))
    return replace(score, reward=score.reward + earned, parts={**score.parts, **played.rewards})


def with_paths(messages: Sequence[Mapping[str, Any]], change: Callable[[str], str]) -> list[dict[str, object]]:
    """Return stored messages with the path of each image file changed; other images are unchanged."""

    def changed(part: Mapping[str, Any]) -> dict[str, object]:
        image = part.get("image")
        if not isinstance(image, str) or kind_of(image) != "path":
            return dict(part)
        return {**part, "image": change(image)}

    return [
        {**one, "content": list(map(changed, one["content"]))} if isinstance(one["content"], list) else dict(one)
        for one in messages
    ]


def _message(said: Said, *, location: str) -> Message:
    if said.role == "assistant":
        return Message(role=said.role, parts=(TextPart(said.text),))
    texts = said.text.split(_MARK)
    if len(texts) != len(said.images) + 1:
        raise UserError(
            f"{location}: the environment shows the word {_MARK} as text, so the places of its pictures are unknown; "
            "change the environment to write another word"
        )
    parts: list[Part] = [TextPart(texts[0])]
    for image, text in zip(said.images, texts[1:], strict=True):
        parts += [image, TextPart(text)]
    return Message(role=said.role, parts=tuple(part for part in parts if part != TextPart("")))


PROMPT_KEY = "prompt"
RESPONSES_KEY = "responses"


def load_responses(
    path: str, *, split: str, max_rows: int | None, reading: RowReading, count_tokens: Callable[[str], int | None]
) -> tuple[list[Outcome], list[SkippedRow]]:
    """Return the rows of a file with their responses, and the records that cannot be used.

    Raises UserError if the file is missing, empty or not readable.
    """
    outcomes: list[Outcome] = []
    skipped: list[SkippedRow] = []
    # This project's own format unless the user named one.
    row_format = OWN if reading.format is None else PROMPT_ROWS.named(reading.format, file=path, names=reading.names)
    for index, record in itertools.islice(enumerate(all_records(path, split=split)), max_rows):
        try:
            outcomes.append(_outcome(index, record, row_format, reading=reading, count_tokens=count_tokens))
        except UserError as error:
            skipped.append(SkippedRow(index=index, reason=str(error)))
    if not outcomes:
        reason = f"; the first: {skipped[0].reason}" if skipped else ""
        raise UserError(f"{path} holds no rows with responses{reason}; check the path")
    return outcomes, skipped


def _outcome(
    index: int,
    record: Record,
    row_format: RowFormat[RowFields],
    *,
    reading: RowReading,
    count_tokens: Callable[[str], int | None],
) -> Outcome:
    fields, location, base_dir = record if row_format.each is None else row_format.each(record)
    if isinstance(fields, Unreadable):
        raise fields.error
    listed = record[0].get(RESPONSES_KEY)
    if listed is not None and reading.names.prompt is None:
        reading = replace(reading, names=replace(reading.names, prompt=PROMPT_KEY))
    row = demonstration(
        reading.row(
            fields,
            row_format=row_format,
            location=location,
            base_dir=base_dir,
            answer_required=False,
            media_required=True,
        )
    )
    if listed is None:
        *before, last = row.messages
        if last.role != "assistant" or not before:
            raise UserError(
                f'{location}: there is nothing to score: the row has no "{RESPONSES_KEY}" and does not end with an '
                "assistant turn after a prompt"
            )
        texts = [part.text for part in last.parts if isinstance(part, TextPart)]
        if len(texts) < len(last.parts):
            raise UserError(f"{location}: the assistant turn to score must be text")
        row, listed = replace(row, messages=tuple(before)), [{"text": "".join(texts)}]
    if not isinstance(listed, list) or not listed:
        raise UserError(f'{location}: "{RESPONSES_KEY}" must be a list with at least one response')
    if any(isinstance(response, Mapping) and MESSAGES in response for response in listed):
        raise UserError(
            f"{location}: the row holds episodes of several turns, but only single responses can be scored here"
        )
    completions = tuple(_completion(response, location, count_tokens) for response in listed)
    return Outcome(index=index, row=row, completions=completions)


def _completion(response: Any, location: str, count_tokens: Callable[[str], int | None]) -> Completion:
    if not isinstance(response, Mapping) or not isinstance(response.get("text"), str):
        raise UserError(f'{location}: a response must be an object with a "text"')
    tokens = response.get("tokens")
    reason = response.get("finish_reason", "stop")
    if reason not in WHOLE:
        raise UserError(f'{location}: the finish_reason {reason!r} is unknown; it must be "stop" or "length"')
    return Completion(
        text=response["text"],
        num_tokens=tokens if isinstance(tokens, int) else count_tokens(response["text"]),
        finish_reason=reason,
    )


Selection = Literal["best_of_n", "rejection_sampling", "dpo_pairs"]


def select(
    records: Iterable[Mapping[str, Any]], *, kind: Selection, min_reward: float, max_per_prompt: int, min_margin: float
) -> Iterator[dict[str, object]]:
    """Yield the selected rows of a job's records, whose responses have rewards."""
    for record in records:
        if kind == "best_of_n":
            yield _answered(record, _ranked(record)[0])
        elif kind == "rejection_sampling":
            yield from accepted(record, min_reward=min_reward, max_per_prompt=max_per_prompt)
        else:
            yield from preferred(record, min_margin=min_margin, max_per_prompt=max_per_prompt)


def accepted(record: Mapping[str, Any], *, min_reward: float, max_per_prompt: int) -> Iterator[dict[str, object]]:
    """Yield SFT rows of the best distinct responses that reach `min_reward` and were not cut off by a limit.

    Rejection sampling as in RAFT (arXiv 2304.06767).
    """
    found: set[tuple[str, ...]] = set()
    for response in _ranked(record):
        if len(found) == max_per_prompt or response["reward"] < min_reward:
            return
        is_whole = response["finish_reason"] == "stop" and response.get(END) in (None, "over")
        said = [one for one in response.get(MESSAGES, ()) if one["role"] == "assistant"]
        written = tuple(json.dumps(one["content"]) for one in said) or (response["text"],)
        if is_whole and written not in found:
            found.add(written)
            yield _answered(record, response)


def preferred(record: Mapping[str, Any], *, min_margin: float, max_per_prompt: int) -> Iterator[dict[str, object]]:
    """Yield pairs whose rewards differ by at least `min_margin`, and by more than 0: first the best over the worst.

    One such pair per prompt is an iteration of iterative DPO (arXiv 2312.11456), in which the trained policy samples the next
    pairs. A reward model can train on all comparisons of a prompt's responses (InstructGPT, arXiv 2203.02155). Empty responses
    are left out, and so are pairs of equal texts, because nothing can be learned from them.
    """
    ranked = [response for response in _ranked(record) if response["text"].strip()]
    # From the outermost pair to neighbours in the ranking.
    places = sorted(
        itertools.combinations(range(len(ranked)), 2), key=lambda pair: (pair[0] + len(ranked) - pair[1], pair[0])
    )
    found: set[tuple[str, str]] = set()
    for one, other in places:
        best, worst = ranked[one], ranked[other]
        margin, said = best["reward"] - worst["reward"], (best["text"].strip(), worst["text"].strip())
        if len(found) == max_per_prompt:
            return
        if margin <= 0 or margin < min_margin or said[0] == said[1] or said in found:
            continue
        found.add(said)
        yield {
            "prompt": record["prompt"],
            "chosen": [{"role": "assistant", "content": best["text"]}],
            "rejected": [{"role": "assistant", "content": worst["text"]}],
            "chosen_reward": best["reward"],
            "rejected_reward": worst["reward"],
            **_origin(record),
        }


def _ranked(record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the responses by falling reward; equal ones stay in the order of sampling."""
    return sorted(record["responses"], key=lambda response: -response["reward"])


def _answered(record: Mapping[str, Any], response: Mapping[str, Any]) -> dict[str, object]:
    turn = {"role": "assistant", "content": response["text"]}
    messages = response[MESSAGES] if MESSAGES in response else [*record["prompt"], turn]
    return {"messages": messages, "reward": response["reward"], **_origin(record)}


def _origin(record: Mapping[str, Any]) -> dict[str, object]:
    return {name: record[name] for name in ("answer", "datasource")}
