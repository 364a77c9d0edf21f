"""Templates of HTML pages: whatever they show is escaped, and a name that they do not know is an error."""

from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import jinja2

SETTING_WORDS = {
    "dtype": "precision",
    "max_model_len": "longest prompt and response, tokens",
    "max_new_tokens": "longest response, tokens",
    "n_samples": "responses per row",
    "top_p": "top-p",
    "judge_timeout": "seconds to judge a response",
}


def page_templates(folder: Path, *, filters: Mapping[str, Callable[..., Any]]) -> jinja2.Environment:
    """Return the templates in a folder and the parts that pages share, with filters beside `moment` and `in_words`."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([folder, Path(__file__).parent]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"moment": moment, "in_words": in_words, **filters}
    return environment


def in_words(setting: str) -> str:
    """Return the name of a setting as a reader of a page knows it, `n_samples` as `responses per row`."""
    return SETTING_WORDS.get(setting, setting.replace("_", " "))


def moment(time: datetime) -> str:
    """Return a moment in its own time zone, `2026-01-31 12:05 UTC`."""
    zone = "UTC" if time.utcoffset() == timedelta(0) else time.strftime("UTC%z")
    return f"{time:%Y-%m-%d %H:%M} {zone}"
