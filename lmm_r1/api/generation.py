"""Responses of a checkpoint, as `lmm-r1 batch_inference` makes them."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmm_r1.api.process import own_process
from lmm_r1.api.settings import IMAGE_DIR, Rows, image_dir, is_messages, read_config, row_file
from lmm_r1.config.batch_inference import BatchConfig
from lmm_r1.data.files import SkippedRow


@dataclass(frozen=True, kw_only=True)
class GeneratedResponse:
    """One response."""

    text: str
    """Without its end token."""
    tokens: int
    finish_reason: str
    """`stop` where the model ended it, `length` where a limit did."""
    reward: float | None
    """None where nothing judged it."""
    scores: Mapping[str, float]
    """The named parts of the reward."""


@dataclass(frozen=True, kw_only=True)
class AnsweredRow:
    """A row with its responses."""

    index: int
    """Its place in the rows."""
    answer: str
    prompt: Sequence[Mapping[str, Any]]
    """The messages; relative paths of images are absolute."""
    responses: tuple[GeneratedResponse, ...]


@dataclass(frozen=True, kw_only=True)
class Generation:
    """What a call has generated."""

    rows: tuple[AnsweredRow, ...]
    """In the order of the rows."""
    skipped: tuple[SkippedRow, ...]
    """Rows that could not be used, with the reason."""
    output: Path | None
    """The file with all of it; None where none was asked for."""

    @property
    def texts(self) -> list[str]:
        """The first response to each row."""
        return [row.responses[0].text for row in self.rows]


def generate(
    checkpoint: str | os.PathLike[str],
    rows: Rows,
    *,
    verifier: str | None = None,
    output: str | os.PathLike[str] | None = None,
    **settings: object,
) -> Generation:
    """Generate responses to rows, or to one conversation given as a list of messages.

    Args:
        checkpoint: a folder, a name of the hub, or a `TrainedRun`.
        verifier: by which every response is scored, as `verifier` of `lmm-r1 batch_inference` names it.
        output: JSON lines, by which an interrupted call goes on; None keeps nothing.
        settings: others of `lmm-r1 batch_inference --help`: `n_samples=4, temperature=1.0, max_new_tokens=256`.

    Raises:
        UserError: a setting or the checkpoint cannot be used, or none of the rows can.
    """
    with own_process({"model": "checkpoint", "data": "rows"}), tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) if output is None else Path(output).absolute().parent
        given: dict[str, object] = {} if verifier is None else {"verifier": verifier}
        if settings.get(IMAGE_DIR) is None:
            given |= image_dir(rows)
        config = BatchConfig(
            model=os.fspath(checkpoint),
            data=row_file([{"messages": rows}] if is_messages(rows) else rows, folder=folder, argument="rows"),
            output=folder / "responses.jsonl" if output is None else Path(output),
        )
        config = read_config(BatchConfig, config, settings, given)
        from lmm_r1.batch.job import RowLog
        from lmm_r1.batch.run import run_batch
        from lmm_r1.cli.job_progress import job_progress

        report = run_batch(config, progress=job_progress)
        return Generation(
            rows=tuple(map(_answered, RowLog(config.output).records())),
            skipped=tuple(report.skipped),
            output=None if output is None else config.output,
        )


def _answered(record: Mapping[str, Any]) -> AnsweredRow:
    return AnsweredRow(
        index=record["index"],
        answer=record["answer"],
        prompt=record["prompt"],
        responses=tuple(
            GeneratedResponse(
                text=response["text"],
                tokens=response["tokens"],
                finish_reason=response["finish_reason"],
                reward=response.get("reward"),
                scores=response.get("scores", {}),
            )
            for response in record["responses"]
        ),
    )
