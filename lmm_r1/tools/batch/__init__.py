"""Batch inference: a job over rows writes one record per row in the order of the file, in whatever order they finish."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmm_r1.data.images import PictureFolder
from lmm_r1.data.messages import Row, SkippedRow
from lmm_r1.data.reading import read_skipped
from lmm_r1.data.row_parser import stored_messages
from lmm_r1.data.sample import Completion
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
from lmm_r1.tools.batch.inputs import episode_fields, with_earned
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
    kept = (outcome.with_images(pictures.kept) for outcome in outcomes)
    for outcome in in_order(kept, order=order):
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
