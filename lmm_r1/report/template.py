"""The templates beside this module, and how data gets into a page."""

import json
import re
from pathlib import Path

from markupsafe import Markup

from lmm_r1.evaluation.page_templates import page_templates
from lmm_r1.report import number_text

FILTERS = {
    "percent": number_text.percent,
    "points": number_text.points,
    "number": number_text.number,
    "duration": number_text.duration,
    "moment": number_text.moment,
}
LONE_SURROGATE = re.compile("[\ud800-\udfff]")


def render(template: str, **values: object) -> str:
    """Return a page as HTML; whatever a template shows is escaped."""
    return page_templates(Path(__file__).parent, filters=FILTERS).get_template(template).render(**values)


def script_json(value: object) -> Markup:
    """Return JSON that cannot end the script block it stands in, and that any encoding can hold."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    # These stand inside strings only, where an escape means the same.
    text = text.replace("&", r"\u0026").replace("<", r"\u003c").replace(">", r"\u003e")
    return Markup(LONE_SURROGATE.sub(lambda found: f"\\u{ord(found[0]):04x}", text))
