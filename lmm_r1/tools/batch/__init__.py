"""Batch inference: what it reads and selects, and a job that writes one record per row in the order of the file."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from lmm_r1.data.files import all_records
from lmm_r1.data.formats import OWN, PROMPT_ROWS
from lmm_r1.data.formats.row_format import Record, RowFields, RowFormat, Unreadable
from lmm_r1.data.images import PictureFolder
from lmm_r1.data.messages import Message, Part, Row, SkippedRow, TextPart, demonstration, kind_of
from lmm_r1.data.reading import RowReading, read_skipped
from lmm_r1.data.row_parser import stored_messages
from lmm_r1.data.sample import WHOLE, Completion, EpisodeResult, Said
from lmm_r1.errors import UserError
from lmm_r1.files.atomic import check_creatable
from lmm_r1.files.json_files import (
    append_json_lines,
    cut_torn_line,
    last_line,
    read_json_lines,
    read_json_object,
    write_json_object,
)
from lmm_r1.generation.engine import Outcome
from lmm_r1.scoring.sources import ResponseScorer, RewardFailed
from remote_rm.verifier import Score

INDEX = "index"


class RowLog:
    """One JSON object per finished row, by ascending `index`; a second file lists the rows that were left out.

    Each row is in one of the two files, and is written completely before the next. A killed process leaves at most one
    incomplete line, which `open` cuts off.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.skipped_path = path.parent / f"{path.name}.skipped"
        self.settings_path = path.parent / f"{path.name}.settings.json"
        self.last: Mapping[str, Any] | None = None
        """The last finished row of an earlier session."""
        self._begin: Mapping[str, Any] | None = None
        """The settings of a file that is written anew, until its first row."""

    def open(self, settings: Mapping[str, Any], *, overwrite: bool, flag: str) -> int:
        """Return the index of the first row that is not written yet; writes nothing before the first row.

        Args:
            settings: what the rows depend on; a file with other settings is not continued.
            flag: the flag that names the file, for messages.

        Raises:
            UserError: the file cannot be written, belongs to other settings, or is not a file of this kind.
        """
        check_creatable(self.path, flag=flag)
        if self.path.is_dir():
            raise UserError(f"{flag} {self.path} is a folder; name a file")
        if overwrite or not (self.path.exists() or self.settings_path.exists()):
            self._begin = settings
            return 0
        if not self.settings_path.exists():
            raise UserError(
                f"{flag} {self.path} exists and was not begun by this command; choose another file or add --overwrite"
            )
        known = read_json_object(self.settings_path)
        # JSON turns tuples into lists.
        wanted = json.loads(json.dumps(settings))
        if different := [name for name in {**wanted, **known} if known.get(name) != wanted.get(name)]:
            name = different[0]
            raise UserError(
                f"{flag} {self.path} was begun with another --{name} ({known.get(name)}, now {wanted.get(name)}); "
                "choose another file or add --overwrite"
            )
        self.last = _last_record(self.path)
        ends = [line[INDEX] for line in (self.last, _last_record(self.skipped_path)) if line is not None]
        return max(ends, default=-1) + 1

    def append(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Append finished rows; if that fails, the file is unchanged and a UserError is raised."""
        self._append(self.path, records)

    def append_skipped(self, rows: Sequence[SkippedRow]) -> None:
        self._append(self.skipped_path, [{INDEX: row.index, "reason": row.reason} for row in rows])

    def records(self) -> Iterator[Mapping[str, Any]]:
        """Yield the finished rows."""
        if self.path.exists():
            yield from (line.record for line in read_json_lines(self.path) if line.record is not None)

    def skipped(self) -> list[SkippedRow]:
        """Return the rows that were left out."""
        return read_skipped(self.skipped_path)

    def _append(self, path: Path, records: Sequence[Mapping[str, Any]]) -> None:
        if self._begin is not None:
            for file in (self.path, self.skipped_path):
                file.unlink(missing_ok=True)
            write_json_object(self.settings_path, self._begin)
            self._begin = None
        try:
            append_json_lines(path, records, readable=True)
        except OSError as error:
            raise UserError(
                f"{path}: cannot be written ({error.strerror}); it holds all rows that were finished. Free space and "
                "repeat the command, which resumes the job"
            ) from error


def _last_record(path: Path) -> Mapping[str, Any] | None:
    """Cut off an incomplete last line and return the object in the line before it, None if there is none."""
    cut_torn_line(path)
    line = last_line(path)
    if not line:
        return None
    try:
        record = json.loads(line)
        int(record[INDEX])
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: its last line was not written by this command; choose another file") from error
    return record


@dataclass(kw_only=True)
class JobTotals:
    """What this session of a job has done."""

    rows: int = 0
    responses: int = 0
    tokens: int = 0
    skipped: int = 0


def run_job(
    outcomes: Iterable[Outcome],
    *,
    order: Sequence[int],
    log: RowLog,
    scorer: ResponseScorer | None,
    on_progress: Callable[[JobTotals], None],
) -> JobTotals:
    """Write every outcome to the log, in `order`, as soon as all before it are written.

    The pictures of episodes are written to the folder next to the log as they arrive, and not kept in memory.

    Args:
        outcomes: one for each index in `order`, in any order.

    Raises:
        UserError: the log cannot be written, or a reward function failed.
    """
    totals = JobTotals()
    pictures = PictureFolder.next_to(log.path)
    for outcome in in_order((outcome.with_images(pictures.kept) for outcome in outcomes), order=order):
        try:
            if outcome.reason is not None:
                raise UserError(outcome.reason)
            assert outcome.row is not None, "an outcome without a reason has its row"
            scores = None if scorer is None else scorer.score(outcome.row, outcome.completions)
            record = record_of(outcome, scores, folder=log.path.parent)
        except RewardFailed:
            raise
        except UserError as error:
            log.append_skipped([SkippedRow(index=outcome.index, reason=str(error))])
            totals.skipped += 1
        else:
            log.append([record])
            totals.rows += 1
            totals.responses += len(outcome.completions)
            totals.tokens += sum(completion.num_tokens or 0 for completion in outcome.completions)
        on_progress(totals)
    return totals


def in_order(outcomes: Iterable[Outcome], *, order: Sequence[int]) -> Iterator[Outcome]:
    """Yield outcomes in the order of their index in `order`, each as soon as all before it have been yielded."""
    waiting: dict[int, Outcome] = {}
    places = iter(order)
    wanted = next(places, None)
    for outcome in outcomes:
        waiting[outcome.index] = outcome
        while wanted in waiting:
            yield waiting.pop(wanted)
            wanted = next(places, None)
    assert wanted is None, f"there is no outcome for row {wanted}"


def record_of(outcome: Outcome, scores: Sequence[Score] | None, *, folder: Path) -> dict[str, object]:
    """Return a row's record for an output file in `folder`; raises UserError for an episode that cannot be written."""
    assert outcome.row is not None, "only valid rows have responses"
    given: Sequence[Score | None] = scores or [None] * len(outcome.completions)
    responses = []
    for completion, score in zip(outcome.completions, given, strict=True):
        response: dict[str, object] = {
            "text": completion.text,
            "tokens": completion.num_tokens,
            "finish_reason": completion.finish_reason,
        }
        if completion.played is not None:
            score = with_earned(score, completion.played)
            response |= episode_fields(completion.played, folder=folder, location=outcome.row.location)
        if score is not None:
            timed_out = {"timed_out": 1.0} if score.timed_out else {}
            response |= {"reward": score.reward, "scores": {**score.parts, **timed_out}}
        responses.append(response)
    # Read with `prompt` as its messages, the record is a row again.
    return {
        INDEX: outcome.index,
        "location": outcome.row.location,
        "datasource": outcome.row.datasource,
        "answer": outcome.row.answer,
        "prompt": stored_messages(outcome.row.messages),
        "responses": responses,
        "seconds": round(outcome.seconds, 4),
    }


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
