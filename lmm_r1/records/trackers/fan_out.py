"""All trackers of a run as one, none of which can stop the training."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from lmm_r1.records.trackers.record import TRACKERS_FILE, TrackerRecord
from lmm_r1.records.trackers.tracker import Generation, Tracker

logger = logging.getLogger(__name__)


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
