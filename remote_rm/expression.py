"""Compares two normalised answers by math-verify, to the gold's own precision; loads sympy, so workers only."""

import logging
from functools import lru_cache

from remote_rm.normalization import to_latex
from remote_rm.quantity import ROUNDED_FROM_PLACES, parse_quantity

EXACT_DECIMALS = 12
"""Decimal places to which floating-point values of exact golds are compared."""
CACHED_GOLDS = 4096
"""How many parsed golds a worker keeps: the samples of one prompt share a gold, and every epoch has it again."""


def same_expression(answer: str, gold: str) -> bool:
    """Return whether math-verify finds the normalised answer equal to the normalised gold; may run without end."""
    # This import pulls in sympy (half a second); the server process never needs it.
    from math_verify import verify

    gold_parsed = list(_parsed_gold(gold))
    answer_parsed = _parse(answer) if gold_parsed else []
    gold_number = parse_quantity(gold)
    is_rounded = gold_number is not None and gold_number.places >= ROUNDED_FROM_PLACES
    return verify(
        gold_parsed,
        answer_parsed,
        float_rounding=gold_number.places if gold_number is not None and is_rounded else EXACT_DECIMALS,
        timeout_seconds=None,
    )


@lru_cache(maxsize=CACHED_GOLDS)
def _parsed_gold(gold: str) -> tuple:
    return tuple(_parse(gold))


def _parse(text: str) -> list:
    from math_verify import LatexExtractionConfig, parse

    # Without time limits of its own, which need the main thread's signals, it warns: the pool keeps the time.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    latex = to_latex(text).replace("%", r"\%")
    return parse(f"${latex}$", [LatexExtractionConfig()], fallback_mode="no_fallback", parsing_timeout=None)
