"""The responses of an evaluation with their verdicts: JSON lines, one per checkpoint, row and sample."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from lmm_r1.errors import UserError
from lmm_r1.files.json_files import append_json_lines, count_field, number_field, read_json_lines, text_field


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What one verifier says of a response."""

    score: float
    """Right (1.0) or wrong (0.0), or between the two by a verifier that measures."""
    parts: dict[str, float]
    timed_out: bool = False
    """The answer was not judged within the time limit, and counts as wrong."""

    @property
    def right(self) -> bool:
        """Whether the answer is right."""
        return self.parts.get("accuracy", self.score) > 0.5


@dataclass(frozen=True, kw_only=True)
class JudgedResponse:
    """One sample of one row."""

    checkpoint: str
    file: str
    """The name of the row file or the suite."""
    index: int
    """The row's place among the records of its file, from 0."""
    row: str
    """The row's file and line."""
    datasource: str
    label: str
    question: str
    """The text of the user's turns."""
    sample: int
    """From 0."""
    response: str
    response_tokens: int | None
    """None where nobody counted them."""
    finish_reason: str
    """`stop`, `length`, or `unknown` of a response that was read from a file which does not say."""
    verdicts: dict[str, Verdict]
    """By verifier."""

    @property
    def truncated(self) -> bool | None:
        """Whether the response was cut off at the longest length; None where that is not known."""
        return None if self.finish_reason == "unknown" else self.finish_reason == "length"


def write_responses(path: Path, responses: Iterable[JudgedResponse], *, append: bool) -> None:
    """Write one line per response, behind those in the file where `append` is set; make its folder if need be.

    Raises UserError where nothing can be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not append:
            path.write_bytes(b"")
        append_json_lines(path, map(asdict, responses))
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror}); choose another place") from error


def read_responses(path: Path) -> list[JudgedResponse]:
    """Return what `write_responses` wrote; raises UserError with file and line for anything else."""
    if not path.is_file():
        raise UserError(f"no file of responses {path}; `lmm-r1 evaluate` writes one beside its output")
    responses = []
    for line in read_json_lines(path):
        if line.record is None:
            raise UserError(f"{line.place}: the line is cut short; evaluate again")
        responses.append(_response(line.record, place=line.place))
    if not responses:
        raise UserError(f"{path} holds no responses; evaluate again")
    return responses


def by_row(responses: Sequence[JudgedResponse]) -> list[list[JudgedResponse]]:
    """Return the samples of each row, rows in the order of first occurrence; the responses are of one file."""
    rows: dict[int, list[JudgedResponse]] = {}
    for response in responses:
        rows.setdefault(response.index, []).append(response)
    return list(rows.values())


def _response(record: dict[str, object], *, place: str) -> JudgedResponse:
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
    )


def _tokens(record: dict[str, object], *, place: str) -> int | None:
    # The key must be there: a file without it is of another kind.
    if "response_tokens" in record and record["response_tokens"] is None:
        return None
    return count_field(record, "response_tokens", place=place)


def _verdict(record: dict[str, object], *, place: str) -> Verdict:
    score, parts = number_field(record, "score", place=place), record.get("parts")
    if score is None or not isinstance(parts, dict):
        raise UserError(f"{place}: a verdict needs a score and parts; evaluate again")
    numbers = {name: number_field(parts, name, place=f"{place}, parts") for name in parts}
    return Verdict(
        score=score,
        parts={name: value for name, value in numbers.items() if value is not None},
        timed_out=record.get("timed_out") is True,
    )
