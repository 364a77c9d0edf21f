"""Numbers, spans and moments as a reader wants to see them."""

from datetime import datetime, timedelta

MINUS = "\N{MINUS SIGN}"
NONE = "\N{EN DASH}"


def percent(share: float | None) -> str:
    """Return 0.534 as `53.4 %`."""
    return NONE if share is None else f"{100 * share:.1f}\N{NO-BREAK SPACE}%"


def points(change: float | None) -> str:
    """Return a difference of two shares in percentage points, 0.241 as `+24.1`."""
    if change is None:
        return ""
    rounded = round(100 * change, 1)
    sign = "+" if rounded > 0 else MINUS if rounded < 0 else "\N{PLUS-MINUS SIGN}"
    return f"{sign}{abs(rounded):.1f}"


def number(value: float | None) -> str:
    """Return a number in at most about six characters: 31.2, 12.4k, 1.5e-4."""
    if value is None:
        return NONE
    size = abs(value)
    if value == 0:
        text = "0"
    elif size >= 999_500:
        text = f"{size / 1e6:.3g}M"
    elif size >= 9_995:
        text = f"{size / 1e3:.3g}k"
    elif size < 1e-3:
        text = _scientific(size)
    else:
        text = f"{size:.4g}" if size >= 1000 else f"{size:.3g}"
    return f"{MINUS}{text}" if value < 0 else text


def _scientific(size: float) -> str:
    mantissa, exponent = f"{size:.1e}".split("e")
    return f"{mantissa.removesuffix('.0')}e{int(exponent)}"


def duration(seconds: float | None) -> str:
    """Return 41.2 as `41.2 s`, 200 as `3 min 20 s` and 3840 as `1 h 04 min`."""
    if seconds is None:
        return NONE
    if seconds < 59.95:
        return f"{seconds:.1f}\N{NO-BREAK SPACE}s"
    whole = round(seconds)
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes}\N{NO-BREAK SPACE}min {rest:02d}\N{NO-BREAK SPACE}s"
    hours, minutes = divmod(round(whole / 60), 60)
    return f"{hours}\N{NO-BREAK SPACE}h {minutes:02d}\N{NO-BREAK SPACE}min"


def moment(time: datetime) -> str:
    """Return a moment in its own time zone, `2026-01-31 12:05 UTC`."""
    zone = "UTC" if time.utcoffset() == timedelta(0) else time.strftime("UTC%z")
    return f"{time:%Y-%m-%d %H:%M} {zone}"
