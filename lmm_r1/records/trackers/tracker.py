"""What every tracking service is asked to do, and what it is given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from lmm_r1.config.shared import LoggerConfig
from lmm_r1.records.rollouts import SampledResponse

TRAIN_PREFIX = "train/"
EVAL_PREFIX = "eval/"
GENERATIONS = "train/generated_samples"
IMAGES = "train/generated_samples_images"


@dataclass(frozen=True, kw_only=True)
class Generation:
    """One sampled response, as it is shown in a table."""

    prompt: str
    response: str
    label: str
    reward: float
    scores: Mapping[str, float | None]
    """The parts of the reward by name."""
    truncated: bool
    images: tuple[Path, ...] = ()
    """Files of the prompt's images."""


@dataclass(frozen=True, kw_only=True)
class Session:
    """What a tracker is opened with."""

    logger: LoggerConfig
    folder: Path
    """The run folder."""
    settings: Mapping[str, Any]
    """Every flag by its nested name, without keys of services."""
    earlier: str | None
    """What `Tracker.identity` was in the session that this one goes on from; None starts anew."""


class Tracker(Protocol):
    """One tracking service; every method may raise whatever its library raises."""

    identity: str
    """What a resumed run needs to find its records again: a run's id, or a folder."""
    replaces_repeats: bool
    """Whether a step that is logged again after a resume takes the place of the first; else it must not be sent."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log the metrics of a step, under `train/`."""

    def log_eval(self, step: int, values: Mapping[str, float]) -> None:
        """Log an evaluation after a step, under `eval/`."""

    def log_generations(self, step: int, samples: Sequence[Generation]) -> None:
        """Log sampled responses as a table, with the images of their prompts."""

    def close(self, *, failed: bool) -> None:
        """Send what is left, and mark the run as ended or as failed."""


def table(step: int, samples: Sequence[Generation]) -> tuple[list[str], list[list[Any]]]:
    """Return the column names and one row per sample; a part of the reward that a sample lacks is None.

    The column `sample` counts from 0, and the captions of images name it.
    """
    parts = list(dict.fromkeys(name for sample in samples for name in sample.scores))
    columns = ["step", "sample", "prompt", "response", "label", "reward", "truncated", *parts]
    rows = [
        [step, index, sample.prompt, sample.response, sample.label, sample.reward, sample.truncated]
        + [sample.scores.get(name) for name in parts]
        for index, sample in enumerate(samples)
    ]
    return columns, rows


def captioned_images(samples: Sequence[Generation]) -> list[tuple[Path, str]]:
    """Return (file, caption) of every image of every sample."""
    return [(image, f"sample {index}") for index, sample in enumerate(samples) for image in sample.images]


def markdown(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return a table in Markdown; what a model wrote stands in it as text, never as markup."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(_cell(value) for value in line) + " |" for line in lines)


def _cell(value: object) -> str:
    text = "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
    for character, written in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ("|", "&#124;"), ("\n", "<br>")):
        text = text.replace(character, written)
    return text


def make_generation(response: SampledResponse, *, messages: Sequence[Mapping[str, Any]], folder: Path) -> Generation:
    """Return a rollout as it is shown.

    Args:
        messages: its prompt as the run folder keeps it.
    """
    assert response.reward is not None, "only a line that is read can lack its reward"
    parts = [part for message in messages for part in message["content"]]
    return Generation(
        prompt=_encodable("\n\n".join(f"{message['role']}: {_text(message['content'])}" for message in messages)),
        response=_encodable(response.response),
        label=_encodable(response.label),
        reward=float(response.reward),
        scores=response.scores,
        truncated=bool(response.truncated),
        images=tuple(folder / part["image"] for part in parts if part["type"] == "image"),
    )


def _text(content: Sequence[Mapping[str, Any]]) -> str:
    return "".join(part["text"] if part["type"] == "text" else f"<{part['type']}>" for part in content)


def _encodable(text: str) -> str:
    # What a model wrote can hold half of a surrogate pair, which has no encoding.
    return text.encode("utf-8", errors="replace").decode("utf-8")
