"""Figures as every table and page shows them: rounded here, and nowhere else, so that one value has one figure."""

from decimal import ROUND_HALF_EVEN, Decimal

MINUS = "\N{MINUS SIGN}"
# Sums and differences of floats are off in the last digits, which would decide where a half is rounded to.
_DIGITS = 9


def percent_text(share: float) -> str:
    """Return 0.5342 as `53.4`; halves go to the even tenth, 0.2125 and 0.8500 - 0.6375 to `21.2`."""
    return mean_text(100 * share)


def points_text(difference: float) -> str:
    """Return a difference of two shares in percentage points: `+24.1`, and `0.0` without a sign."""
    text = percent_text(difference)
    return text if text == "0.0" or text.startswith(MINUS) else f"+{text}"


def mean_text(mean: float) -> str:
    """Return a mean of counts, 1234.56 as `1,234.6`."""
    tenths = Decimal(repr(round(mean, _DIGITS))).quantize(Decimal("0.1"), rounding=ROUND_HALF_EVEN)
    return f"{MINUS}{-tenths:,}" if tenths < 0 else f"{abs(tenths):,}"
