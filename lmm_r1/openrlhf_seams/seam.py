"""How a name of OpenRLHF's is described, and how it is found."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class Seam:
    upstream: str
    """`module:name`, or `module:class.method`."""
    how: Literal["subclassed", "replaced", "used"]
    ours: str
    """`module:name` of what takes its place or builds on it."""
    reason: str
    signature: str
    """Parameter names of the callable or of the class's constructor, in order."""


def resolve(path: str) -> Callable[..., Any]:
    """Return the object at `module:name` or `module:class.method`; a Ray actor class gives the class inside it."""
    module, _, names = path.partition(":")
    target: Any = importlib.import_module(module)
    for name in names.split("."):
        target = getattr(target, name)
        if hasattr(target, "__ray_metadata__"):
            target = target.__ray_metadata__.modified_class
    return target
