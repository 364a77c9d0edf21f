"""All trackers of a run as one, none of which can stop the training; trackers.json keeps how far each has got."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

from lmm_r1.errors import UserError
from lmm_r1.files.json_files import write_json_object
from lmm_r1.records.trackers.tracker import Generation, Tracker

logger = logging.getLogger(__name__)

TRACKERS_FILE = "trackers.json"


@dataclass(frozen=True, kw_only=True)
class _Entry:
    """One service."""

    identity: str
    last_steps: dict[str, int]
    """By what was sent: the last step of it."""


class TrackerRecord:
    """The file's content, which is written anew, atomically, whenever something changes."""

    def __init__(self, path: Path, *, resumed: bool) -> None:
        """Read the records of an earlier session where `resumed`; a run that starts anew forgets them.

        Raises UserError where the file cannot be read.
        """
        self.path = path
        self._entries = _read(path) if resumed and path.exists() else {}
        self._before = {name: dict(entry.last_steps) for name, entry in self._entries.items()}

    def identity(self, name: str) -> str | None:
        """Return what the tracker was called before, None for one that is new."""
        return self._entries[name].identity if name in self._entries else None

    def identify(self, name: str, identity: str) -> None:
        """Note what the tracker is called; a new name starts with no steps."""
        if self.identity(name) != identity:
            self._entries[name] = _Entry(identity=identity, last_steps={})
            self._before.pop(name, None)
            self._write()

    def is_repeated(self, name: str, *, kind: str, step: int) -> bool:
        """Return whether an earlier session has sent this already."""
        return step <= self._before.get(name, {}).get(kind, -1)

    def note(self, name: str, *, kind: str, step: int) -> None:
        """Note that something has been sent."""
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

    A tracker that fails is reported once, and tried again after 2, 4, 8, ... further steps: hours of training are not
    lost to a network, and metrics.jsonl has every step in any case. What was left out is counted at the end.
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
        """Log the metrics of a step; values that are not numbers are left out."""
        numbers = _numbers(values)
        self._send("train", step, lambda tracker: tracker.log(step, numbers))

    def log_eval(self, step: int, values: Mapping[str, object]) -> None:
        """Log an evaluation after a step."""
        numbers = _numbers(values)
        self._send("eval", step, lambda tracker: tracker.log_eval(step, numbers))

    def log_generations(self, step: int, samples: Sequence[Generation]) -> None:
        """Log sampled responses."""
        self._send("generations", step, lambda tracker: tracker.log_generations(step, samples))

    def close(self, *, failed: bool) -> None:
        """Close every tracker, once."""
        while self._trackers:
            name, tracker = self._trackers.popitem()
            try:
                tracker.close(failed=failed)
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
            logger.warning(
                "--logger.trackers %s: step %d could not be logged (%r); training goes on, metrics.jsonl has every step",
                name,
                step,
                error,
            )
        self._left_out[name] += 1


def _numbers(values: Mapping[str, object]) -> dict[str, float]:
    return {name: float(value) for name, value in values.items() if isinstance(value, int | float)}
