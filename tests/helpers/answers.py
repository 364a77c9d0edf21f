"""Answers to mathematical questions in many notations, and what they must score."""

from __future__ import annotations

import random
import re
import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from helpers.tables import table

from remote_rm.answers.accuracy import matches, quick_match


@dataclass(frozen=True, kw_only=True, repr=False)
class Label:
    """One gold answer and what is right for it."""

    text: str
    kind: str
    value: str
    """What it means: two labels of one value are right for each other."""
    same: tuple[str, ...] = ()
    """Other spellings of the whole value, each right for this label."""
    shorter: frozenset[str] = frozenset()
    """Values that say less and are right for it, as it is right for them: `12` for `12 cm`, and `12 cm` for `12`."""
    accepts: frozenset[str] = frozenset()
    """Values that are right for it, as it is not for them: `101` for `101_2`, whose question names the base."""
    open: frozenset[str] = frozenset()
    """Values that a fair teacher may mark either way beside it: nothing is asked of such a pair."""

    def __repr__(self) -> str:
        return f"<{self.kind} {self.text}>"

    @property
    def spellings(self) -> tuple[str, ...]:
        """Every spelling of the whole value, the label itself first."""
        return (self.text, *self.same)

    @property
    def bare(self) -> tuple[str, ...]:
        """The spellings that are no sentence of their own, so that a sentence may be written around them."""
        return (self.text, *(text for text in self.same if not _SENTENCE.search(text)))


_SENTENCE = re.compile(r"^in |\b(?:is|be|choose)\b|[选是].|[.。]$")
DIMENSIONS = frozenset({"money", "quantity", "percentage"})
COLLECTIONS_IN_BRACKETS = frozenset({"interval", "set", "tuple"})


def expected(answer: Label, label: Label) -> bool | None:
    """Return whether one label's text is right for the other label; None where that is left open.

    Two that say more than a third do not answer one another where they are of one kind, or say what it is: `12 cm`
    and `12 kg`, `(B) 12` and `B. 13`. It is left open where they say more in different ways: `12 cm` and `(B) 12`.
    """
    if answer.value == label.value:
        return True
    if answer.value in label.shorter | label.accepts or label.value in answer.shorter:
        return True
    if answer.value in label.open or label.value in answer.open:
        return None
    kinds = {answer.kind, label.kind}
    clash = len(kinds) == 1 or kinds <= DIMENSIONS or kinds <= COLLECTIONS_IN_BRACKETS or label.value in answer.accepts
    return False if clash or are_apart(answer, label) else None


def share_an_answer(one: Label, other: Label) -> bool:
    """Return whether some answer that says less may be right for both: `12` for `12 cm` and `12 kg`."""
    return bool(_all_values(one) & _all_values(other))


def are_apart(one: Label, other: Label) -> bool:
    """Return whether no answer at all may be right for both."""
    return not share_an_answer(one, other)


def _all_values(label: Label) -> frozenset[str]:
    return label.shorter | label.accepts | label.open | {label.value}


def _label(kind: str, text: str, value: str, *columns: str) -> Label:
    """A label of a row of the table: spellings, and the values of `shorter`, `accepts` and `open`."""
    same, *values = ([*columns, "", "", "", ""])[:4]
    shorter, accepts, open_values = (frozenset(column.split(" | ")) - {""} for column in values)
    spellings = tuple(same.split(" | ")) if same else ()
    return Label(text=text, kind=kind, value=value, same=spellings, shorter=shorter, accepts=accepts, open=open_values)


CATALOGUE: tuple[Label, ...] = tuple(_label(*row) for row in table("helpers/answer_catalogue", "labels"))
KINDS: tuple[str, ...] = tuple(dict.fromkeys(label.kind for label in CATALOGUE))


NUMERIC_KINDS = frozenset({"number", "percentage", "money", "quantity"})
FORMULA_KINDS = NUMERIC_KINDS | {
    "interval",
    "set",
    "tuple",
    "list",
    "matrix",
    "expression",
    "equation",
    "based",
    "residue",
}
CHOICE_KINDS = frozenset({"choice", "lettered"})

SAID = tuple(table("helpers/answer_frames", "said"))
"""Ways to give an answer, right for whatever it is right for; each is also tried within the blocks of `BLOCKS`."""
FORMULA_SAID = tuple(table("helpers/answer_frames", "formula_said"))
WORD_SAID = (r"\text{{{}}}", '"{}"')
BLOCKS = tuple(table("helpers/answer_frames", "blocks"))
"""Whole responses around a bare answer."""

DENIED = tuple(table("helpers/answer_frames", "denied"))
"""What denies an answer, doubts it or asks for it: never right for it."""
FORMULA_DENIED = tuple(table("helpers/answer_frames", "formula_denied"))
_NO_FORMULA = re.compile(r"\$|(?<![\\A-Za-z{])[A-Za-z]{3,}|[^\x00-\x7f]")
BOUNDED = tuple(table("helpers/answer_frames", "bounded"))
"""What only bounds a number."""

HEDGED = tuple(table("helpers/answer_frames", "hedged"))
"""What gives two different answers and settles on none: right for neither."""
SECOND = tuple(table("helpers/answer_frames", "second"))
"""What gives a second, different answer: right for at most one of the two."""
LEFT_OPEN = tuple(table("helpers/answer_frames", "left_open"))
"""What gives one answer and keeps the rest open: not right for it."""

CHANGED = tuple(table("helpers/answer_frames", "changed"))
"""What makes another number of a natural number above one."""
CHANGED_NUMBERS = ("5", "6", "7", "12", "3", "16")


def said(label: Label) -> list[str]:
    """Return the sentences that give the label's answer, in each of its spellings."""
    sentences = [frame.format(text) for text in label.bare for frame in SAID]
    if label.kind in FORMULA_KINDS:
        formulas = [text for text in label.bare if not _NO_FORMULA.search(text)]
        return sentences + [frame.format(text) for text in formulas for frame in FORMULA_SAID]
    return sentences + [frame.format(text) for text in label.bare if text.isalpha() for frame in WORD_SAID]


def denials(label: Label) -> tuple[str, ...]:
    """Return the sentences that deny or bound an answer of this label's kind."""
    more = BOUNDED + FORMULA_DENIED if label.kind in NUMERIC_KINDS else ()
    # "No, no." and "No? No." say no.
    frames = [
        frame for frame in DENIED if label.text not in ("No", "False", "否") or not frame.lower().endswith(" no.")
    ]
    return (*frames, *more)


def rivals(label: Label, *, of: Iterable[Label] = CATALOGUE) -> list[Label]:
    """Return the labels of the same kind that no answer may share with this one, in an order of this label's own.

    Zero and one have none: `5/1` is 5, and `0/5` is 0.
    """
    kinds = CHOICE_KINDS if label.kind in CHOICE_KINDS else {label.kind}
    found = [other for other in of if other.kind in kinds and are_apart(label, other) and other.value not in "01"]
    random.Random(label.text).shuffle(found)
    return found if label.value not in "01" else []


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

    before = signal.signal(signal.SIGPROF, over)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def _by_sympy(answer: str, label: str) -> bool:
    try:
        with time_limit():
            return matches(answer, label)
    except TimeoutError:
        return False
