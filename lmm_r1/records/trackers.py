"""What trackers show of a run, and all trackers of a run as one; trackers.json records how far each of them got."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from lmm_r1.errors import UserError
from lmm_r1.files.json_files import write_json_object
from lmm_r1.files.user_code import failure, module_of
from lmm_r1.records.rollouts import END_WORDS, RecordedPart, SampledResponse

logger = logging.getLogger(__name__)

TRACKERS_FILE = "trackers.json"
FUNCTION = "tracker"
"""The function of a user's file that opens a tracker, if the flag names only the file."""
TRAIN_PREFIX = "train/"
EVAL_PREFIX = "eval/"


@dataclass(frozen=True, kw_only=True)
class Generation:
    """One sampled response, as it is shown in a table."""

    prompt: str
    response: str
    label: str
    reward: float
    scores: Mapping[str, float | None]
    truncated: bool
    images: tuple[Path, ...] = ()
    """Those of the prompt, then those of an episode's turns."""
    ended: str | None = None


@dataclass(frozen=True, kw_only=True)
class Tracker:
    """An opened tracking service; every call may raise whatever its library raises."""

    identity: str = ""
    """What a resumed run needs to find its records again: a run's id, or a folder."""
    log: Callable[[int, Mapping[str, float]], None]
    """Takes a step and its numbers, whose names begin with `train/` or `eval/`."""
    log_generations: Callable[[int, Sequence[Generation]], None] = lambda step, samples: None
    """Takes a step and its samples, shown as a table with their images."""
    close: Callable[[bool], None] = lambda failed: None
    """Sends what is left, and marks the run as ended or, if its argument is true, as failed."""
    replaces_repeats: bool = False
    """Whether a step that is logged again after a resume replaces the first; otherwise it must not be sent again."""


def table(step: int, samples: Sequence[Generation]) -> tuple[list[str], list[list[Any]]]:
    """Return the column names and one row per sample; a part of the reward that a sample lacks is None.

    For episodes, `response` holds all turns, and `ended` says how they have ended.

    The column `sample` counts from 0, and the names of images begin with it.
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


def shown_images(samples: Sequence[Generation]) -> dict[str, Path]:
    """Return every image by its name, such as `sample 0, image 1`."""
    return {
        f"sample {index}, image {number}": path
        for index, sample in enumerate(samples)
        for number, path in enumerate(sample.images, start=1)
    }


def make_generation(response: SampledResponse, *, messages: Sequence[Mapping[str, Any]], folder: Path) -> Generation:
    """Return a rollout as it is shown."""
    assert response.reward is not None, "only a line that is read can lack its reward"
    parts = [part for message in messages for part in message["content"]]
    return Generation(
        prompt=_encodable("\n\n".join(f"{message['role']}: {_text(message['content'])}" for message in messages)),
        response=_encodable(_transcript(response) or response.response),
        label=_encodable(response.label),
        reward=float(response.reward),
        scores=response.scores,
        truncated=bool(response.truncated),
        images=(
            *(folder / part["image"] for part in parts if part["type"] == "image"),
            *(folder / part.value for turn in response.said for part in turn.parts if part.kind == "image"),
        ),
        ended=None if response.end is None else END_WORDS.get(response.end, response.end),
    )


def _text(content: Sequence[Mapping[str, Any]]) -> str:
    return "".join(part["text"] if part["type"] == "text" else f"<{part['type']}>" for part in content)


def _transcript(response: SampledResponse) -> str:
    return "\n\n".join(f"{turn.role}: {''.join(map(_part_text, turn.parts))}" for turn in response.said)


def _part_text(part: RecordedPart) -> str:
    return part.value if part.kind == "text" else "<image>"


def _encodable(text: str) -> str:
    # What a model wrote can hold half of a surrogate pair, which has no encoding.
    return text.encode("utf-8", errors="replace").decode("utf-8")


@dataclass(frozen=True, kw_only=True)
class _Entry:
    identity: str
    last_steps: dict[str, int]
    """The last step that was sent, by kind."""


class TrackerRecord:
    """The content of trackers.json, which is rewritten atomically at every change."""

    def __init__(self, path: Path, *, resumed: bool) -> None:
        """Read the records of an earlier session if `resumed`; a new run discards them."""
        self.path = path
        self._entries = _read(path) if resumed and path.exists() else {}
        self._before = {name: dict(entry.last_steps) for name, entry in self._entries.items()}

    def identity(self, name: str) -> str | None:
        """Return the tracker's identity in the earlier session, None for a new one."""
        return self._entries[name].identity if name in self._entries else None

    def identify(self, name: str, identity: str) -> None:
        """Note the tracker's identity; a new identity starts with no steps."""
        if self.identity(name) != identity:
            self._entries[name] = _Entry(identity=identity, last_steps={})
            self._before.pop(name, None)
            self._write()

    def is_repeated(self, name: str, *, kind: str, step: int) -> bool:
        """Return whether an earlier session has sent this already."""
        return step <= self._before.get(name, {}).get(kind, -1)

    def note(self, name: str, *, kind: str, step: int) -> None:
        self._entries[name].last_steps[kind] = step
        self._write()

    def _write(self) -> None:
        write_json_object(self.path, {name: asdict(entry) for name, entry in self._entries.items()})


def _read(path: Path) -> dict[str, _Entry]:
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        return {
            name: _Entry(identity=entry["identity"], last_steps=entry["last_steps"]) for name, entry in entries.items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path}: cannot be read ({error!r}); remove it, and every tracker starts a new run"
        ) from error


class Trackers:
    """Hands everything to each tracker; leaving the context closes them.

    A tracker that fails is reported once, and tried again after 2, 4, 8, ... further steps: training does not stop for
    a network, and metrics.jsonl has every step in any case. The number of skipped logs is reported at the end.
    """

    def __init__(self, trackers: Mapping[str, Tracker] | None = None, *, record: TrackerRecord | None = None) -> None:
        self._trackers = dict(trackers or {})
        self._record = record or TrackerRecord(Path(TRACKERS_FILE), resumed=False)
        self._failures_in_a_row: Counter[str] = Counter()
        self._resting_until: dict[str, int] = {}
        self._left_out: Counter[str] = Counter()

    def __bool__(self) -> bool:
        return bool(self._trackers)

    def log(self, step: int, values: Mapping[str, object]) -> None:
        """Log the metrics of a step; values that are not numbers are skipped."""
        numbers = _numbers(values, prefix=TRAIN_PREFIX)
        self._send("train", step, lambda tracker: tracker.log(step, numbers))

    def log_eval(self, step: int, values: Mapping[str, object]) -> None:
        numbers = _numbers(values, prefix=EVAL_PREFIX)
        self._send("eval", step, lambda tracker: tracker.log(step, numbers))

    def log_generations(self, step: int, samples: Sequence[Generation]) -> None:
        self._send("generations", step, lambda tracker: tracker.log_generations(step, samples))

    def close(self, *, failed: bool) -> None:
        while self._trackers:
            name, tracker = self._trackers.popitem()
            try:
                tracker.close(failed)
            # As in `_send`.
            except Exception as error:
                logger.warning("--logger.trackers %s: the end of the run could not be logged (%r)", name, error)
            if self._left_out[name]:
                logger.warning(
                    "--logger.trackers %s: %d logs were left out; metrics.jsonl has every step",
                    name,
                    self._left_out[name],
                )

    def __enter__(self) -> Trackers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(failed=error is not None)

    def _send(self, kind: str, step: int, send: Callable[[Tracker], None]) -> None:
        for name, tracker in self._trackers.items():
            if not tracker.replaces_repeats and self._record.is_repeated(name, kind=kind, step=step):
                continue
            if step < self._resting_until.get(name, step):
                self._left_out[name] += 1
                continue
            try:
                send(tracker)
                self._record.note(name, kind=kind, step=step)
            # Each library has errors of its own, and those of the network below it.
            except Exception as error:
                self._fail(name, step, error)
            else:
                self._failures_in_a_row[name] = 0

    def _fail(self, name: str, step: int, error: Exception) -> None:
        self._failures_in_a_row[name] += 1
        self._resting_until[name] = step + 2 ** self._failures_in_a_row[name]
        if not self._left_out[name]:
            place, said = failure(error, modules=(module_of(FUNCTION),))
            logger.warning(
                "--logger.trackers %s: step %d could not be logged (%s%s); training goes on, metrics.jsonl has every step",
                name,
                step,
                said,
                place and f", at{place}",
            )
        self._left_out[name] += 1


def _numbers(values: Mapping[str, object], *, prefix: str) -> dict[str, float]:
    return {f"{prefix}{name}": float(value) for name, value in values.items() if isinstance(value, int | float)}
