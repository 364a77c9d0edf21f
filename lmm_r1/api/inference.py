"""`lmm_r1.generate` and `lmm_r1.evaluate`: what `lmm-r1 batch_inference` and `lmm-r1 evaluate` do."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from lmm_r1.api.settings import IMAGE_DIR, Rows, image_dir, is_messages, own_process, read_config, row_file
from lmm_r1.config.evaluate import EvaluateConfig, page_path
from lmm_r1.config.generation import BatchConfig
from lmm_r1.data.files import SkippedRow
from lmm_r1.errors import UserError

if TYPE_CHECKING:
    from lmm_r1.evaluation.board import Board


@dataclass(frozen=True, kw_only=True)
class GeneratedResponse:
    """One response."""

    text: str
    """Without its end token."""
    tokens: int
    finish_reason: str
    """`stop` if the model ended it, `length` if a limit did."""
    reward: float | None
    """None if nothing judged it."""
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
    """The output file; None if none was requested."""

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
        output: JSON lines, from which the same call resumes; None keeps nothing.
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
        from lmm_r1.batch import RowLog
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


AnyPath: TypeAlias = "str | os.PathLike[str]"
ROWS = "rows"


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What was measured: `accuracy()` for the figure, `board` for all of them."""

    board: Board
    """Every score with its standard error, the responses, and the comparisons with the baseline."""
    output: Path | None
    """JSON with all scores, next to the responses; None if none was requested."""
    page: Path | None
    """The HTML page with the scores; None if none was requested."""

    def accuracy(self, checkpoint: str | None = None, file: str | None = None) -> float:
        """Return the share of right responses by the first verifier; of several checkpoints or files, of the first.

        Raises UserError for a name that was not measured.
        """
        names = [one.name for one in self.board.checkpoints]
        files = {one.name: one for one in self.board.files}
        checkpoint, file = checkpoint or names[0], file or next(iter(files))
        if (checkpoint, file) not in self.board.cells:
            raise UserError(
                f"{checkpoint} on {file} was not measured; there are {', '.join(names)} on {', '.join(files)}"
            )
        scores = self.board.cells[checkpoint, file].all
        return scores.verifiers[files[file].verifier].accuracy.mean


def evaluate(
    checkpoints: AnyPath | Sequence[AnyPath] | Mapping[str, AnyPath],
    rows: Rows | Mapping[str, Rows],
    *,
    verifier: str | Sequence[str] = (),
    output: AnyPath | None = None,
    **settings: object,
) -> Evaluation:
    """Measure checkpoints on rows, by one or more verifiers.

    Args:
        checkpoints: one, several, or several by names; of several the first is the baseline.
        rows: one set of rows, or several by names.
        verifier: as `verifiers` of `lmm-r1 evaluate` has it; by default `math`.
        output: the JSON file, with the responses and a page next to it; None keeps nothing.
        settings: others of `lmm-r1 evaluate --help`: `n_samples=4, temperature=0.6`.

    Raises:
        UserError: a setting, a checkpoint or all rows of a file cannot be used.
    """
    arguments = {"checkpoints": "checkpoints", "files": "rows", "verifiers": "verifier"}
    with own_process(arguments), tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) if output is None else Path(output).absolute().parent
        named = rows if isinstance(rows, Mapping) else {ROWS: rows}
        files = {name: row_file(own, folder=folder, argument=name) for name, own in named.items()}
        given: dict[str, object] = {
            "checkpoints": [f"{name}={os.fspath(path)}" for name, path in _named(checkpoints).items()],
            "files": [f"{name}={path}" for name, path in files.items()],
            "output": folder / "scores.json" if output is None else Path(output),
        }
        if verifier:
            given["verifiers"] = [verifier] if isinstance(verifier, str) else list(verifier)
        if settings.get(IMAGE_DIR) is None and all(map(image_dir, named.values())):
            given |= image_dir([])
        config = read_config(EvaluateConfig, settings, given)
        from lmm_r1.cli.evaluate import evaluate as run

        kept = output is not None
        board = run(config, told=kept)
        return Evaluation(
            board=board, output=config.output if kept else None, page=page_path(config) if kept else None
        )


def _named(checkpoints: AnyPath | Sequence[AnyPath] | Mapping[str, AnyPath]) -> Mapping[str, AnyPath]:
    if isinstance(checkpoints, Mapping):
        return checkpoints
    paths = [checkpoints] if isinstance(checkpoints, str | os.PathLike) else list(checkpoints)
    names = [os.path.basename(os.path.abspath(path)) for path in paths]
    if len(set(names)) < len(names):
        # Folders of the same name are distinguished by their paths.
        names = [os.fspath(path) for path in paths]
    return dict(zip(names, paths, strict=True))
