"""Labels of every kind, with spellings that are right for each and, for any two, whether one answers the other.

All of it was written by hand, as a fair teacher would mark, and none of it by what the verifiers say.
"""

import re
from dataclasses import dataclass

from helpers.tables import table


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
