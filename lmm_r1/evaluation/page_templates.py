"""Templates of HTML pages: whatever they show is escaped, and a name that they do not know is an error."""

from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import jinja2


def page_templates(folder: Path, *, filters: Mapping[str, Callable[..., Any]]) -> jinja2.Environment:
    """Return the templates in a folder, with filters that turn values into text beside `moment`."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"moment": moment, **filters}
    return environment


def moment(time: datetime) -> str:
    """Return a moment in its own time zone, `2026-01-31 12:05 UTC`."""
    zone = "UTC" if time.utcoffset() == timedelta(0) else time.strftime("UTC%z")
    return f"{time:%Y-%m-%d %H:%M} {zone}"
