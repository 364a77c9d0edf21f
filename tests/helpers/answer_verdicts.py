"""Verdicts on bare answers: by `math`'s rules, else by sympy within the service's time limit."""

import random
import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FrameType

from remote_rm.answers.accuracy import matches, quick_match

MAX_SECONDS = 1.0
"""The default time limit of the service for one item; what takes longer counts as wrong."""

Pair = tuple[str, str]
"""An answer and a label."""


def is_right(answer: str, label: str) -> bool:
    """Return whether the answer is right for the label."""
    verdict = quick_match(answer, label)
    return _by_sympy(answer, label) if verdict is None else verdict


def right_ones(pairs: Iterable[Pair], *, by_sympy: int) -> list[Pair]:
    """Return the pairs that are right; of those that the rules leave open, `by_sympy` at random are judged."""
    verdicts = {pair: quick_match(*pair) for pair in pairs}
    left_open = [pair for pair, verdict in verdicts.items() if verdict is None]
    some = left_open if len(left_open) <= by_sympy else random.Random(len(verdicts)).sample(left_open, by_sympy)
    return [pair for pair, verdict in verdicts.items() if verdict] + [pair for pair in some if _by_sympy(*pair)]


def expect_none(wrong: Iterable[Pair]) -> None:
    """Fail with the number of answers that were judged wrongly, by their wording, each with its shortest example."""
    found = sorted(set(wrong), key=lambda pair: (len(pair[0]), pair))
    wordings: dict[str, list[Pair]] = {}
    for answer, label in found:
        wordings.setdefault(answer.replace(label, "…"), []).append((answer, label))
    most = sorted(wordings.values(), key=len, reverse=True)[:30]
    lines = [f"  {len(some):5}  {some[0][0]!r} for the label {some[0][1]!r}" for some in most]
    assert not found, "\n".join([f"{len(found)} answers of {len(wordings)} wordings", *lines])


@contextmanager
def time_limit(seconds: float = MAX_SECONDS) -> Iterator[None]:
    """Raise a TimeoutError within the block when the time is over, as the service kills a worker."""

    def over(_signal: int, _frame: FrameType | None) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _by_sympy(answer: str, label: str) -> bool:
    try:
        with time_limit():
            return matches(answer, label)
    except TimeoutError:
        return False
