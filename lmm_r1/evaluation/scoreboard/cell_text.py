"""Scores as short texts."""

from lmm_r1.evaluation.comparison import CONFIDENCE, Comparison
from lmm_r1.evaluation.scores import Estimate

MINUS = "\N{MINUS SIGN}"
CONFIDENCE_TEXT = f"{100 * CONFIDENCE:.0f}\N{NO-BREAK SPACE}%"
SMALLEST_P = 0.0001


def share(value: float) -> str:
    """Return 0.5342 as `53.4`, in percent."""
    return f"{100 * value:.1f}"


def estimate(value: Estimate) -> str:
    """Return a mean and its standard error in percent: `53.4 ± 1.2`."""
    error = value.standard_error
    return share(value.mean) if error is None else f"{share(value.mean)} \N{PLUS-MINUS SIGN} {100 * error:.1f}"


def change(difference: float) -> str:
    """Return a difference of two shares in percentage points: `+24.1`, and `0.0` without a sign."""
    rounded = round(100 * difference, 1)
    sign = "+" if rounded > 0 else MINUS if rounded < 0 else ""
    return f"{sign}{abs(rounded):.1f}"


def interval(comparison: Comparison) -> str:
    """Return the interval of a difference in percentage points: `−1.0 to +4.5`."""
    return f"{change(comparison.low)} to {change(comparison.high)}"


def p_value(value: float) -> str:
    """Return a p-value to two digits, `< 0.0001` below that."""
    return f"< {SMALLEST_P:.4f}" if value < SMALLEST_P else f"{value:.2g}"
