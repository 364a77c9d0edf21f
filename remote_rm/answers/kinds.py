"""The kinds of values, and which of them are compared at all: equal kinds, and the pairs of one table."""

from enum import Enum


class Kind(Enum):
    """What a value is; its text is how the README calls it."""

    NUMBER = "number"
    QUANTITY = "quantity"
    MONEY = "money"
    EXPRESSION = "expression"
    COMPUTATION = "computation"
    EQUATION = "equation"
    INTERVAL = "interval"
    SET = "set"
    TUPLE = "tuple"
    LIST = "list"
    MATRIX = "matrix"
    WORD = "word"
    CHOICE = "choice"
    YES_NO = "yes or no"
    NO_VALUE = "no value"
    DATE = "date"
    CLOCK = "clock"
    RANGE = "range"
    RATIO = "ratio"
    TELEPHONE = "telephone"
    CODE = "code"
    BASED = "base"
    RESIDUE = "residue"


SEQUENCES = frozenset({Kind.SET, Kind.TUPLE, Kind.LIST})

COMPARED: dict[Kind, frozenset[Kind]] = {
    # The unit or the currency may be missing.
    Kind.NUMBER: frozenset({Kind.QUANTITY, Kind.MONEY, Kind.EXPRESSION, Kind.RATIO, Kind.BASED, Kind.RESIDUE}),
    Kind.QUANTITY: frozenset({Kind.EXPRESSION}),
    Kind.MONEY: frozenset({Kind.EXPRESSION}),
    # `point A` is A; `x_1` is x1.
    Kind.EXPRESSION: frozenset({Kind.WORD, Kind.CODE}),
    # `2A3` is 2A3 in base 16.
    Kind.BASED: frozenset({Kind.CODE, Kind.EXPRESSION}),
    # `x > 3` may be written as an interval, and an interval of two numbers without its brackets.
    Kind.INTERVAL: frozenset({Kind.EXPRESSION, Kind.EQUATION, Kind.TUPLE}),
    # A vector may be written as a tuple, and with a factor in front.
    Kind.MATRIX: frozenset({Kind.EXPRESSION}) | SEQUENCES,
    # What is named or in brackets is compared by what it holds: `x = 5` is 5, `[5]` is 5.
    **dict.fromkeys((Kind.EQUATION, *SEQUENCES), frozenset(Kind) - {Kind.INTERVAL}),
}
"""With which other kinds each kind is compared; that holds in both directions."""

_PAIRS = frozenset({(one, other) for one, others in COMPARED.items() for other in others})


def are_compared(answer: Kind, gold: Kind) -> bool:
    """Return whether values of the two kinds can be the same."""
    return answer is gold or (answer, gold) in _PAIRS or (gold, answer) in _PAIRS
