"""A job over rows: responses, scores, and one record per row in the order of the file, whatever order they end in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmm_r1.batch.row_log import INDEX, RowLog
from lmm_r1.batch.trajectories import episode_fields, with_earned
from lmm_r1.data.bad_rows import SkippedRow
from lmm_r1.data.messages import Row
from lmm_r1.data.picture_files import PictureFolder
from lmm_r1.data.row_parser import stored_messages
from lmm_r1.data.sample import Completion
from lmm_r1.errors import UserError
from lmm_r1.generation.engine import Outcome
from lmm_r1.scoring.response_scores import ResponseScorer
from remote_rm.verifier import Score


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

    The pictures of episodes go to the folder beside it as they come, and wait in no memory.

    Args:
        outcomes: one for each index in `order`, in any order.

    Raises:
        UserError: the log cannot be written.
    """
    totals = JobTotals()
    pictures = PictureFolder.beside(log.path)
    kept = (outcome.with_images(pictures.kept) for outcome in outcomes)
    for outcome in in_order(kept, order=order):
        record = None
        reason = outcome.reason
        if reason is None:
            assert outcome.row is not None, "an outcome without a reason has its row"
            try:
                scores = None if scorer is None else scorer.score(outcome.row, outcome.completions)
                record = record_of(outcome, scores, folder=log.path.parent)
            except UserError as error:
                reason = str(error)
        if record is None:
            assert reason is not None
            log.append_skipped([SkippedRow(index=outcome.index, reason=reason)])
            totals.skipped += 1
        else:
            log.append([record])
            totals.rows += 1
            totals.responses += len(outcome.completions)
            totals.tokens += sum(completion.num_tokens or 0 for completion in outcome.completions)
        on_progress(totals)
    return totals


def in_order(outcomes: Iterable[Outcome], *, order: Sequence[int]) -> Iterator[Outcome]:
    """Yield outcomes by the place of their index in `order`, each as soon as all before it have been yielded."""
    waiting: dict[int, Outcome] = {}
    places = iter(order)
    wanted = next(places, None)
    for outcome in outcomes:
        waiting[outcome.index] = outcome
        while wanted in waiting:
            yield waiting.pop(wanted)
            wanted = next(places, None)
    assert wanted is None, f"no outcome came for row {wanted}"


def record_of(outcome: Outcome, scores: Sequence[Score] | None, *, folder: Path) -> dict[str, Any]:
    """Return a row's line in the output, a file in `folder`; raises UserError for an episode that cannot be written."""
    assert outcome.row is not None, "what was answered is a row"
    given: Sequence[Score | None] = scores or [None] * len(outcome.completions)
    responses = []
    for completion, score in zip(outcome.completions, given, strict=True):
        response = _response(completion)
        if completion.played is not None:
            score = with_earned(score, completion.played)
            response |= episode_fields(completion.played, folder=folder, location=outcome.row.location)
        if score is not None:
            timed_out = {"timed_out": 1.0} if score.timed_out else {}
            response |= {"reward": score.reward, "scores": {**score.parts, **timed_out}}
        responses.append(response)
    return {**row_fields(outcome.index, outcome.row), "responses": responses, "seconds": round(outcome.seconds, 4)}


def row_fields(index: int, row: Row) -> dict[str, Any]:
    """Return what the output says of the row itself; with `prompt` as its messages it is a row again."""
    return {
        INDEX: index,
        "location": row.location,
        "datasource": row.datasource,
        "answer": row.answer,
        "prompt": stored_messages(row.messages),
    }


def _response(completion: Completion) -> dict[str, Any]:
    return {"text": completion.text, "tokens": completion.num_tokens, "finish_reason": completion.finish_reason}
