"""Judges answers by how many characters they are away from the label: ANLS (Biten et al. 2019, arXiv 1905.13648)."""

from dataclasses import dataclass
from typing import ClassVar

from remote_rm.answer_verifier import Grade, GradedVerifier, finite_number, setting
from remote_rm.answers.accuracy import listed_golds

MAX_CHARS = 10_000
"""A longer answer is wrong, and a longer label is ungradable."""
MAX_QUICK_CELLS = 1_000_000
"""Pairs of a character of the answer and one of the label, up to which they are compared without a worker."""


@dataclass(frozen=True, kw_only=True)
class EditDistanceVerifier(GradedVerifier):
    """1 - Levenshtein distance / length of the longer text, of the nearest of the golds; case and white space are folded.

    The measure `anls` is 0 from the threshold on: such an answer is another one, not a misspelt one. Right is an
    answer that is one of the golds.
    """

    name: ClassVar[str] = "edit_distance"
    measures: ClassVar[tuple[str, ...]] = ("anls",)

    anls_threshold: float = setting(
        0.5, type=finite_number, help="share of characters to change from which on an answer is worth nothing; 1: none"
    )

    def __post_init__(self) -> None:
        """Raise a ValueError unless the threshold is a share."""
        if not 0 < self.anls_threshold <= 1:
            raise ValueError(f"--anls-threshold must be above 0 and at most 1, got {self.anls_threshold:g}")

    def grade(self, answer: str, label: str) -> Grade:
        answer = _folded(answer)
        if not answer or len(answer) > MAX_CHARS:
            return Grade(values=(0.0,), is_right=False)
        best = max((self._likeness(answer, gold=gold) for gold in _golds(label)), default=0.0)
        return Grade(values=(best,), is_right=best == 1.0)

    def is_quick(self, answer: str, label: str) -> bool:
        return len(answer) * len(label) <= MAX_QUICK_CELLS

    def is_gradable(self, label: str) -> bool:
        """Return whether the label has a text; one of more than MAX_CHARS characters is not read."""
        return bool(_golds(label))

    def answer_of(self, label: str) -> str:
        return next(iter(_golds(label)), label)

    def _likeness(self, answer: str, *, gold: str) -> float:
        shorter, longer = sorted((len(answer), len(gold)))
        # Missing characters must be inserted in any case.
        if (longer - shorter) / longer >= self.anls_threshold:
            return 0.0
        likeness = similarity(answer, gold)
        return likeness if 1.0 - likeness < self.anls_threshold else 0.0


def _golds(label: str) -> list[str]:
    return [] if len(label) > MAX_CHARS else [gold for gold in map(_folded, listed_golds(label)) if gold]


def _folded(text: str) -> str:
    return " ".join(text.lower().split())


def edit_distance(one: str, other: str) -> int:
    """Return the Levenshtein distance.

    Bit-parallel (Myers 1999, in the form of Hyyrö 2003): one step for each character of the shorter text, on integers with
    a bit for each character of the longer one. Texts of 1,000 characters take about a millisecond.
    """
    if len(one) < len(other):
        one, other = other, one
    if not other:
        return len(one)
    places: dict[str, int] = {}
    for place, character in enumerate(one):
        places[character] = places.get(character, 0) | 1 << place
    every, last = (1 << len(one)) - 1, 1 << (len(one) - 1)
    # Down a column of the table of distances a cell is one more (rises), one less (falls) or the same.
    rises, falls, distance = every, 0, len(one)
    for character in other:
        equal = places.get(character, 0)
        steps = (((equal & rises) + rises) ^ rises) | equal
        # The same along the row, from the last column to this one.
        more, less = falls | (every & ~(steps | rises)), rises & steps
        distance += bool(more & last) - bool(less & last)
        more, less = (more << 1 | 1) & every, (less << 1) & every
        equal |= falls
        rises, falls = less | (every & ~(equal | more)), more & equal
    return distance


def similarity(one: str, other: str) -> float:
    """Return 1 - distance / length of the longer text, from 0.0 to 1.0; 1.0 for two empty ones."""
    longest = max(len(one), len(other))
    return 1.0 - edit_distance(one, other) / longest if longest else 1.0
