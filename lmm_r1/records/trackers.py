"""What trackers show of a run, and all trackers of a run as one."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from lmm_r1.files.user_code import failure, module_of
from lmm_r1.records.rollouts import END_WORDS, SampledResponse

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
    ended: str | None = None


@dataclass(frozen=True, kw_only=True)
class Tracker:
    """An opened tracking service; every call may raise whatever its library raises."""

    identity: str = ""
    """What a resumed run needs to find its records again: a run's id, or a folder."""
    log: Callable[[int, Mapping[str, float]], None]
    """Takes a step and its numbers, whose names begin with `train/` or `eval/`."""
    log_generations: Callable[[int, Sequence[Generation]], None] = lambda step, samples: None
    """Takes a step and its samples, shown as a table."""
    close: Callable[[bool], None] = lambda failed: None
    """Sends what is left, and marks the run as ended or, if its argument is true, as failed."""


def table(step: int, samples: Sequence[Generation]) -> tuple[list[str], list[list[Any]]]:
    """Return the column names and one row per sample; a part of the reward that a sample lacks is None.

    For episodes, `response` holds all turns, and `ended` says how they have ended.

    The column `sample` counts from 0.
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


def make_generation(response: SampledResponse, *, messages: Sequence[Mapping[str, Any]]) -> Generation:
    """Return a rollout as it is shown."""
    assert response.reward is not None, "only a line that is read can lack its reward"
    prompt = (
        f"{message['role']}: " + "".join(part.get("text", f"<{part['type']}>") for part in message["content"])
        for message in messages
    )
    turns = (
        f"{turn.role}: " + "".join(part.value if part.kind == "text" else "<image>" for part in turn.parts)
        for turn in response.said
    )
    # What a model wrote can hold half of a surrogate pair, which has no encoding.
    prompt_text, text, label = (
        text.encode("utf-8", errors="replace").decode("utf-8")
        for text in ("\n\n".join(prompt), "\n\n".join(turns) or response.response, response.label)
    )
    return Generation(
        prompt=prompt_text,
        response=text,
        label=label,
        reward=float(response.reward),
        scores=response.scores,
        truncated=bool(response.truncated),
        ended=None if response.end is None else END_WORDS.get(response.end, response.end),
    )


class Trackers:
    """Hands everything to each tracker; leaving the context closes them.

    A tracker that fails is reported once, and how many logs it lacks at the end: training does not stop for a network,
    and metrics.jsonl has every step in any case.
    """

    def __init__(self, trackers: Mapping[str, Tracker] | None = None) -> None:
        self._trackers = dict(trackers or {})
        self._left_out: Counter[str] = Counter()

    def __bool__(self) -> bool:
        return bool(self._trackers)

    def log(self, step: int, values: Mapping[str, object]) -> None:
        """Log the metrics of a step; values that are not numbers are skipped."""
        numbers = _numbers(values, prefix=TRAIN_PREFIX)
        self._send(step, lambda tracker: tracker.log(step, numbers))

    def log_eval(self, step: int, values: Mapping[str, object]) -> None:
        numbers = _numbers(values, prefix=EVAL_PREFIX)
        self._send(step, lambda tracker: tracker.log(step, numbers))

    def log_generations(self, step: int, samples: Sequence[Generation]) -> None:
        """Show samples of a step."""
        self._send(step, lambda tracker: tracker.log_generations(step, samples))

    def close(self, *, failed: bool) -> None:
        while self._trackers:
            name, tracker = self._trackers.popitem()
            try:
                tracker.close(failed)
            # As in `_send`.
            except Exception as error:
                logger.warning("--logger.trackers %s: the end of the run could not be logged (%r)", name, error)
            if count := self._left_out[name]:
                logger.warning("--logger.trackers %s: %d logs failed; metrics.jsonl has every step", name, count)

    def __enter__(self) -> Trackers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(failed=error is not None)

    def _send(self, step: int, send: Callable[[Tracker], None]) -> None:
        for name, tracker in self._trackers.items():
            try:
                send(tracker)
            # Each library has errors of its own, and those of the network below it.
            except Exception as error:
                if not self._left_out[name]:
                    place, said = failure(error, modules=(module_of(FUNCTION),))
                    logger.warning(
                        "--logger.trackers %s: step %d could not be logged (%s%s); training goes on, metrics.jsonl has "
                        "every step",
                        name,
                        step,
                        said,
                        place and f", at{place}",
                    )
                self._left_out[name] += 1


def _numbers(values: Mapping[str, object], *, prefix: str) -> dict[str, float]:
    return {f"{prefix}{name}": float(value) for name, value in values.items() if isinstance(value, int | float)}
