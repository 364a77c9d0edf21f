"""Sentences around answers: those that say the answer, and those that take it back, leave it open or change it."""

import random
import re
from collections.abc import Iterable

from helpers.answer_catalogue import CATALOGUE, Label, are_apart
from helpers.tables import table

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
