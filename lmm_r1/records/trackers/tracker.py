"""What every tracking service is asked to do, and what it is given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from lmm_r1.config.shared import LoggerConfig
from lmm_r1.data.sample import Cut
from lmm_r1.records.rollouts import END_WORDS, RecordedPart, SampledResponse

TRAIN_PREFIX = "train/"
EVAL_PREFIX = "eval/"
GENERATIONS = "train/generated_samples"
IMAGES = "train/generated_samples_images"


@dataclass(frozen=True, kw_only=True)
class TurnImage:
    """A picture that an episode was shown behind its prompt."""

    path: Path
    turn: int
    """From 1, the policy's and the environment's counted together."""
    cut: Cut | None = None


@dataclass(frozen=True, kw_only=True)
class ShownImage:
    """A picture as a tracker shows it."""

    path: Path
    sample: int
    """As the table counts them."""
    turn: int | None = None
    """As that of a `TurnImage`; None for an image of the prompt."""
    cuts: tuple[Cut, ...] = ()
    """What was cut out of it in later turns."""

    @property
    def caption(self) -> str:
        """`sample 0`, or `sample 0, turn 2`."""
        return f"sample {self.sample}" + ("" if self.turn is None else f", turn {self.turn}")

    @property
    def boxes(self) -> list[tuple[float, float, float, float]]:
        """Left, upper, right and lower edge of what was cut out, as shares of the picture's width and height."""
        return [
            (left / width, upper / height, right / width, lower / height)
            for (left, upper, right, lower), (width, height) in ((cut.box, cut.size) for cut in self.cuts)
        ]


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
    turn_images: tuple[TurnImage, ...] = ()
    """Of an episode, those of its turns, in their order."""
    ended: str | None = None
    """How an episode has ended, in words."""


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
        """Log sampled responses as a table, with the images of their prompts and turns."""

    def close(self, *, failed: bool) -> None:
        """Send what is left, and mark the run as ended or as failed."""


def table(step: int, samples: Sequence[Generation]) -> tuple[list[str], list[list[Any]]]:
    """Return the column names and one row per sample; a part of the reward that a sample lacks is None.

    Of episodes, `response` holds all turns, and `ended` says how they have ended.

    The column `sample` counts from 0, and the captions of images name it.
    """
    parts = list(dict.fromkeys(name for sample in samples for name in sample.scores))
    ends = ["ended"] if any(sample.ended is not None for sample in samples) else []
    columns = ["step", "sample", "prompt", "response", "label", "reward", "truncated", *ends, *parts]
    rows = [
        [step, index, sample.prompt, sample.response, sample.label, sample.reward, sample.truncated]
        + [sample.ended for _ in ends]
        + [sample.scores.get(name) for name in parts]
        for index, sample in enumerate(samples)
    ]
    return columns, rows


def shown_images(samples: Sequence[Generation]) -> list[ShownImage]:
    """Return every image of every sample, that of its prompt first, with what was cut out of it."""
    return [image for index, sample in enumerate(samples) for image in _images_of(sample, index=index)]


def _images_of(sample: Generation, *, index: int) -> list[ShownImage]:
    placed: list[tuple[Path, int | None]] = [(path, None) for path in sample.images]
    placed += [(image.path, image.turn) for image in sample.turn_images]
    cuts = [image.cut for image in sample.turn_images if image.cut is not None]
    return [
        ShownImage(path=path, sample=index, turn=turn, cuts=tuple(cut for cut in cuts if cut.picture == number))
        for number, (path, turn) in enumerate(placed)
    ]


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
        response=_encodable(_transcript(response) or response.response),
        label=_encodable(response.label),
        reward=float(response.reward),
        scores=response.scores,
        truncated=bool(response.truncated),
        images=tuple(folder / part["image"] for part in parts if part["type"] == "image"),
        turn_images=tuple(
            TurnImage(path=folder / part.value, turn=number, cut=part.cut)
            for number, turn in enumerate(response.said, start=1)
            for part in turn.parts
            if part.kind == "image"
        ),
        ended=None if response.end is None else END_WORDS.get(response.end, response.end),
    )


def _text(content: Sequence[Mapping[str, Any]]) -> str:
    return "".join(part["text"] if part["type"] == "text" else f"<{part['type']}>" for part in content)


def _transcript(response: SampledResponse) -> str:
    """All turns of an episode; empty for a single response."""
    return "\n\n".join(f"{turn.role}: {''.join(map(_part_text, turn.parts))}" for turn in response.said)


def _part_text(part: RecordedPart) -> str:
    return part.value if part.kind == "text" else "<image>"


def _encodable(text: str) -> str:
    # What a model wrote can hold half of a surrogate pair, which has no encoding.
    return text.encode("utf-8", errors="replace").decode("utf-8")
