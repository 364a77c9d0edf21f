"""The responses of an evaluation with their verdicts: JSON lines, one per checkpoint, row and sample."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from lmm_r1.errors import UserError
from lmm_r1.files.atomic import unwritable
from lmm_r1.files.json_files import append_json_lines, count_field, number_field, read_json_lines, text_field


@dataclass(frozen=True, kw_only=True)
class VerifierVerdict:
    score: float
    """Right (1.0) or wrong (0.0), or in between for a verifier that gives partial credit."""
    parts: dict[str, float]
    timed_out: bool = False
    """Whether the answer was not judged within the time limit, which counts as wrong."""

    @property
    def right(self) -> bool:
        return self.parts.get("accuracy", self.score) > 0.5


@dataclass(frozen=True, kw_only=True)
class ShownTurn:
    role: str
    text: str
    """With the mark `<image>` for each picture."""
    images: tuple[str, ...] = ()
    """The picture files of the marks; in the file of responses, relative to its folder."""


@dataclass(frozen=True, kw_only=True)
class PlayedEpisode:
    """An episode; the response is its last turn."""

    end: str
    """`over`, or the limit that ended it: `turns`, `images`, `tokens`."""
    turns: int
    shown_images: int
    """The number shown by the environment, not counting those of the prompt."""
    rewards: dict[str, float]
    counts: dict[str, int]
    """The environment's counts: tool calls, malformed calls, moves."""
    said: tuple[ShownTurn, ...]


@dataclass(frozen=True, kw_only=True)
class JudgedResponse:
    """One sample of one row."""

    checkpoint: str
    file: str
    """The name of the row file or the suite."""
    index: int
    """The row's index among the records of its file, from 0."""
    row: str
    datasource: str
    label: str
    question: str
    sample: int
    response: str
    response_tokens: int | None
    finish_reason: str
    """`stop`, `length`, or `unknown` only in files of earlier versions."""
    verdicts: dict[str, VerifierVerdict]
    episode: PlayedEpisode | None = None
    images: int = 0
    """The number of the row's images; 0 in files of earlier versions."""

    @property
    def truncated(self) -> bool | None:
        """Whether the response was cut off at the maximum length; None if unknown."""
        return None if self.finish_reason == "unknown" else self.finish_reason == "length"


def write_responses(path: Path, responses: Iterable[JudgedResponse], *, append: bool) -> None:
    """Write one line per response: append to the file, or replace it as a whole."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.unlink(missing_ok=True)
        try:
            records = (_record(response, folder=path.parent) for response in responses)
            append_json_lines(path if append else partial, records)
            if not append:
                partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise unwritable(path, error) from error


def responses_digest(responses: Iterable[JudgedResponse], *, folder: Path) -> str:
    """Return a digest of responses as they are written to a file in `folder`."""
    digest = hashlib.sha256()
    for response in responses:
        digest.update(json.dumps(_record(response, folder=folder)).encode())
    return digest.hexdigest()[:16]


def read_responses(path: Path) -> list[JudgedResponse]:
    """Return what `write_responses` wrote; raises UserError, with file and line, for anything else."""
    if not path.is_file():
        raise UserError(f"no file of responses {path}; `lmm-r1 evaluate` writes one next to its output")
    responses = []
    for line in read_json_lines(path):
        if line.record is None:
            raise UserError(f"{line.place}: the line is incomplete; evaluate again")
        responses.append(_response(line.record, place=line.place, folder=path.parent))
    if not responses:
        raise UserError(f"{path} holds no responses; evaluate again")
    return responses


def by_row(responses: Sequence[JudgedResponse]) -> list[list[JudgedResponse]]:
    """Return the samples of each row of one file, rows in the order of first occurrence."""
    rows: dict[int, list[JudgedResponse]] = {}
    for response in responses:
        rows.setdefault(response.index, []).append(response)
    return list(rows.values())


def _record(response: JudgedResponse, *, folder: Path) -> dict[str, object]:
    record = asdict(response)
    if response.episode is None:
        del record["episode"]
        return record
    for turn in record["episode"]["said"]:
        turn["images"] = [os.path.relpath(image, folder) for image in turn["images"]]
    return record


def _response(record: dict[str, object], *, place: str, folder: Path) -> JudgedResponse:
    verdicts = record.get("verdicts")
    if not isinstance(verdicts, dict) or not verdicts or not all(isinstance(said, dict) for said in verdicts.values()):
        raise UserError(f"{place}: verdicts must be an object by verifier; evaluate again")
    return JudgedResponse(
        checkpoint=text_field(record, "checkpoint", place=place),
        file=text_field(record, "file", place=place),
        row=text_field(record, "row", place=place),
        datasource=text_field(record, "datasource", place=place),
        label=text_field(record, "label", place=place),
        question=text_field(record, "question", place=place),
        response=text_field(record, "response", place=place),
        finish_reason=text_field(record, "finish_reason", place=place),
        index=count_field(record, "index", place=place),
        sample=count_field(record, "sample", place=place),
        response_tokens=_tokens(record, place=place),
        verdicts={name: _verdict(said, place=f"{place}, {name}") for name, said in verdicts.items()},
        episode=None if record.get("episode") is None else _episode(record["episode"], place=place, folder=folder),
        images=count_field(record, "images", place=place) if "images" in record else 0,
    )


def _episode(record: object, *, place: str, folder: Path) -> PlayedEpisode:
    said = record.get("said") if isinstance(record, dict) else None
    if not isinstance(record, dict) or not isinstance(said, list) or not all(isinstance(one, dict) for one in said):
        raise UserError(f"{place}: an episode must be an object with a list of turns, said; evaluate again")
    return PlayedEpisode(
        end=text_field(record, "end", place=place),
        turns=count_field(record, "turns", place=place),
        shown_images=count_field(record, "shown_images", place=place),
        rewards=_numbers(record, "rewards", place=place),
        counts={name: int(value) for name, value in _numbers(record, "counts", place=place).items()},
        said=tuple(_turn(one, place=place, folder=folder) for one in said),
    )


def _turn(record: dict[str, object], *, place: str, folder: Path) -> ShownTurn:
    images = record.get("images", [])
    # They are embedded in pages that may be passed on, so no other file of this machine must get in.
    if not isinstance(images, list) or not all(isinstance(one, str) and _is_below(one) for one in images):
        raise UserError(
            f"{place}: the pictures of an episode must be files below the folder of this one; evaluate again"
        )
    return ShownTurn(
        role=text_field(record, "role", place=place),
        text=text_field(record, "text", place=place),
        images=tuple(str(folder / one) for one in images),
    )


def _is_below(path: str) -> bool:
    return not Path(path).is_absolute() and ".." not in Path(path).parts


def _numbers(record: dict[str, object], name: str, *, place: str) -> dict[str, float]:
    values = record.get(name)
    if not isinstance(values, dict):
        raise UserError(f"{place}: {name} must be an object of numbers by name; evaluate again")
    numbers = {key: number_field(values, key, place=f"{place}, {name}") for key in values}
    return {key: value for key, value in numbers.items() if value is not None}


def _tokens(record: dict[str, object], *, place: str) -> int | None:
    # The key must exist: a file without it is of another kind.
    if "response_tokens" in record and record["response_tokens"] is None:
        return None
    return count_field(record, "response_tokens", place=place)


def _verdict(record: dict[str, object], *, place: str) -> VerifierVerdict:
    score, parts = number_field(record, "score", place=place), record.get("parts")
    if score is None or not isinstance(parts, dict):
        raise UserError(f"{place}: a verdict needs a score and parts; evaluate again")
    numbers = {name: number_field(parts, name, place=f"{place}, parts") for name in parts}
    return VerifierVerdict(
        score=score,
        parts={name: value for name, value in numbers.items() if value is not None},
        timed_out=record.get("timed_out") is True,
    )
