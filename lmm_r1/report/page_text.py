"""How values get into a page: numbers and spans as a reader wants to see them, data for its script, the templates."""

import json
import re
from pathlib import Path

from markupsafe import Markup

from lmm_r1.evaluation.page_parts import MINUS, mean_text, page_templates, percent_text, points_text

NONE = "\N{EN DASH}"
LONE_SURROGATE = re.compile("[\ud800-\udfff]")


def percent(share: float | None) -> str:
    """Return 0.534 as `53.4 %`."""
    return NONE if share is None else f"{percent_text(share)}\N{NO-BREAK SPACE}%"


def points(change: float | None) -> str:
    """Return a difference of two shares in percentage points, 0.241 as `+24.1`; nothing where there is none."""
    return "" if change is None else points_text(change)


def mean(value: float | None) -> str:
    """Return a mean of counts, 31.2 tokens, in tenths."""
    return NONE if value is None else mean_text(value)


def direction(change: float) -> str:
    """Return the class of a change's colour, with a space in front; none where it is shown as 0.0."""
    text = points_text(change)
    return "" if text == "0.0" else " down" if text.startswith(MINUS) else " up"


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


FILTERS = {show.__name__: show for show in (percent, points, direction, mean, number, duration)}


def render(template: str, **values: object) -> str:
    """Return a page as HTML; whatever a template shows is escaped."""
    return page_templates(Path(__file__).parent, filters=FILTERS).get_template(template).render(**values)


def script_json(value: object) -> Markup:
    """Return JSON that cannot end the script block it stands in, and that any encoding can hold."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    # These stand inside strings only, where an escape means the same.
    text = text.replace("&", r"\u0026").replace("<", r"\u003c").replace(">", r"\u003e")
    return Markup(LONE_SURROGATE.sub(lambda found: f"\\u{ord(found[0]):04x}", text))
