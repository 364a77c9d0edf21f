"""The evaluation.json of a run: how well each checkpoint answers held-out rows."""

from dataclasses import dataclass, field
from pathlib import Path

from lmm_r1.errors import UserError
from lmm_r1.files.json_files import count_field, number_field, read_json_object, text_field

EVALUATION_FILE = "evaluation.json"


@dataclass(frozen=True, kw_only=True)
class FileScores:
    """One checkpoint on one file of held-out rows; shares are between 0 and 1."""

    rows: int
    accuracy: float | None
    format: float | None
    mean_response_tokens: float | None
    truncated_rate: float | None


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """One evaluated checkpoint; it carries the name of the stage that made it."""

    name: str
    files: dict[str, FileScores]
    """By the name of the row file, `text` and `image` in a curriculum."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Everything in an evaluation.json; no checkpoints where there is no such file."""

    checkpoints: tuple[Checkpoint, ...] = ()
    settings: dict[str, object] = field(default_factory=dict)
    """What the checkpoints were evaluated with."""

    @property
    def file_names(self) -> list[str]:
        """The row files that occur: `text`, then `image`, then the others in the order of first occurrence."""
        found = dict.fromkeys(name for checkpoint in self.checkpoints for name in checkpoint.files)
        first = [name for name in ("text", "image") if name in found]
        return [*first, *(name for name in found if name not in first)]


def read_evaluation(path: Path) -> Evaluation:
    """Return the evaluation in a file, an empty one if there is none; a malformed one is a UserError."""
    if not path.exists():
        return Evaluation()
    record = read_json_object(path)
    settings = record.get("settings", {})
    checkpoints = record.get("checkpoints")
    if not isinstance(checkpoints, list) or not all(isinstance(checkpoint, dict) for checkpoint in checkpoints):
        raise UserError(f"{path}: checkpoints must be a list of objects; evaluate again")
    return Evaluation(
        checkpoints=tuple(
            _checkpoint(checkpoint, place=f"{path}, checkpoint {number}")
            for number, checkpoint in enumerate(checkpoints, start=1)
        ),
        settings=settings if isinstance(settings, dict) else {},
    )


def _checkpoint(record: dict[str, object], *, place: str) -> Checkpoint:
    files = record.get("files")
    if not isinstance(files, dict) or not all(isinstance(scores, dict) for scores in files.values()):
        raise UserError(f"{place}: files must be an object of scores by row file; evaluate again")
    return Checkpoint(
        name=text_field(record, "name", place=place),
        files={name: _file_scores(scores, place=f"{place}, {name}") for name, scores in files.items()},
    )


def _file_scores(record: dict[str, object], *, place: str) -> FileScores:
    return FileScores(
        rows=count_field(record, "rows", place=place),
        accuracy=_share(record, "accuracy", place=place),
        format=_share(record, "format", place=place),
        mean_response_tokens=number_field(record, "mean_response_tokens", place=place),
        truncated_rate=_share(record, "truncated_rate", place=place),
    )


def _share(record: dict[str, object], key: str, *, place: str) -> float | None:
    value = number_field(record, key, place=place)
    if value is not None and not 0 <= value <= 1:
        raise UserError(f"{place}: {key} must lie between 0 and 1, found {value}")
    return value
