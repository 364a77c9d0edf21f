"""The templates beside this module, and how data gets into a page."""

import json
import re
from pathlib import Path

import jinja2
from markupsafe import Markup

from lmm_r1.evaluation.report import number_text

LONE_SURROGATE = re.compile("[\ud800-\udfff]")


def render(template: str, **values: object) -> str:
    """Return a page as HTML; whatever a template shows is escaped."""
    return _environment().get_template(template).render(**values)


def script_json(value: object) -> Markup:
    """Return JSON that cannot end the script block it stands in, and that any encoding can hold."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    # These stand inside strings only, where an escape means the same.
    text = text.replace("&", r"\u0026").replace("<", r"\u003c").replace(">", r"\u003e")
    return Markup(LONE_SURROGATE.sub(lambda found: f"\\u{ord(found[0]):04x}", text))


def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "percent": number_text.percent,
        "points": number_text.points,
        "number": number_text.number,
        "duration": number_text.duration,
        "moment": number_text.moment,
    }
    return environment
