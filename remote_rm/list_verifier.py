r"""Judges answers that are several values, in order or (`--unordered`) in any order.

python -m remote_rm list --unordered --port 5000
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import ClassVar

from remote_rm.answer_verifier import AnswerVerifier, is_matchable, setting
from remote_rm.answers import accuracy
from remote_rm.answers.accuracy import is_gradable
from remote_rm.answers.comparison import all_of, any_of
from remote_rm.answers.lexer import Token, introductions
from remote_rm.answers.notation import elements
from remote_rm.answers.reading import enclosing_delimiters, normalize
from remote_rm.answers.statement import is_prose, read

MAX_CHARS = 1000
"""A longer answer is wrong, and a longer label is ungradable."""
MAX_QUICK_PAIRS = 64
"""Pairs of elements that are compared without a worker."""

Verdict = bool | None
"""Whether two values are equal; None if a worker must decide."""

_CLOSED_PAIRS = (("[", "]"), ("(", ")"), ("{", "}"), (r"\{", r"\}"))


def items_of(text: str) -> list[str]:
    r"""Return the elements of a list: between commas, semicolons or line breaks, else between spaces if all are numbers.

    `[1, 3, 5]`, `1; 3; 5`, `1, 3 and 5`, `1 3 5` → `1`, `3`, `5`. A comma always separates, in `1,234` too.
    """
    lines = [Token.BULLET.sub("", line, count=1).strip().rstrip(",;") for line in text.splitlines() if line.strip()]
    whole = normalize(", ".join(lines) if len(lines) > 1 else text.strip())
    pair = enclosing_delimiters(whole)
    inside = whole[len(pair[0]) : -len(pair[1])].strip() if pair in _CLOSED_PAIRS else whole
    return [normalize(item) for item in elements(inside)]


def _same_in_any_order(items: Sequence[str], gold: Sequence[str], equal: Callable[[str, str], Verdict]) -> Verdict:
    table = [[equal(item, gold_item) for item in items] for gold_item in gold]
    if is_matchable([[verdict is True for verdict in row] for row in table]):
        return True
    return None if is_matchable([[verdict is not False for verdict in row] for row in table]) else False


@dataclass(frozen=True, kw_only=True)
class ListVerifier(AnswerVerifier):
    """Several values; a label with an element that is empty or cannot be read is ungradable."""

    name: ClassVar[str] = "list"
    reports_ungradable: ClassVar[bool] = True

    unordered: bool = setting(False, help="accept the elements in any order")

    def matches(self, answer: str, label: str) -> bool:
        """Return whether the answer has the label's elements and no others."""
        return bool(self._compared(answer, label, equal=accuracy.matches, max_pairs=inf))

    def quick_match(self, answer: str, label: str) -> Verdict:
        """Return the same as `matches` if that is possible without sympy, else None."""
        return self._compared(answer, label, equal=accuracy.quick_match, max_pairs=MAX_QUICK_PAIRS)

    def states(self, answer: str, label: str) -> bool:
        """Return whether the answer has the label's elements as they are written."""
        return bool(self._compared(answer, label, equal=accuracy.is_stated, max_pairs=inf))

    def is_gradable(self, label: str) -> bool:
        """Return whether the label is a list of one or more elements that can each be read; an empty one cannot."""
        return len(label) <= MAX_CHARS and all(map(is_gradable, items_of(label)))

    def _compared(self, answer: str, label: str, *, equal: Callable[[str, str], Verdict], max_pairs: float) -> Verdict:
        if not self.is_gradable(label) or len(answer) > MAX_CHARS:
            return False
        gold = items_of(label)
        # A sentence may be a list of phrases, unless it introduces its answer, or state the list in its last clause.
        readings = [] if introductions(answer) else [answer]
        readings += [read(answer).value] if is_prose(answer) else []
        candidates = [items for items in map(items_of, readings) if len(items) == len(gold) and all(items)]
        if not any("," in item for item in gold):
            # 1, 3, 5 (red, blue) names others.
            candidates = [items for items in candidates if not any("," in item for item in items)]
        if candidates and (len(gold) ** 2 if self.unordered else len(gold)) > max_pairs:
            return None
        if self.unordered:
            return any_of([_same_in_any_order(items, gold, equal) for items in candidates])
        return any_of([all_of(list(map(equal, items, gold))) for items in candidates])
