"""Templates of HTML pages: whatever they show is escaped, and a name that they do not know is an error."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jinja2


def page_templates(folder: Path, *, filters: Mapping[str, Callable[..., Any]]) -> jinja2.Environment:
    """Return the templates in a folder, with filters that turn values into text."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= filters
    return environment
