"""A conversion as a YAML file for `--config`, with its notes as comments."""

from __future__ import annotations

from typing import Any

import yaml

from lmm_r1.config.conversion.table import Conversion, NoteKind

TITLES: dict[NoteKind, str] = {
    "without counterpart": "Without counterpart here, left out:",
    "another meaning": "Means something else here:",
    "derived": "Made of several settings:",
}


def to_document(conversion: Conversion, *, source: str, system: str) -> str:
    """Return the file's text, which ends with a line break.

    Args:
        source: what was converted, for the first line.
    """
    comments = [f"Settings of {source} ({system}), written by `lmm-r1 convert_config`."]
    comments.append(f"Run: lmm-r1 {conversion.command} --config THIS_FILE")
    for kind, title in TITLES.items():
        subjects: dict[str, list[str]] = {}
        for note in conversion.notes:
            if note.kind == kind:
                subjects.setdefault(note.text, []).append(note.subject)
        lines = [f"  {', '.join(names)}: {text}" for text, names in subjects.items()]
        comments += [title, *lines] if lines else []
    if conversion.defaults:
        comments += [f"Defaults of {system} that are not ours:", f"  {', '.join(conversion.defaults)}"]
    head = "".join(f"# {line}\n" for comment in comments for line in comment.splitlines())
    settings = yaml.safe_dump(_nested(conversion), sort_keys=False, allow_unicode=True) if conversion.flags else ""
    return head + settings


def _nested(conversion: Conversion) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, value in conversion.flags.items():
        *groups, last = name.split(".")
        node = tree
        for group in groups:
            node = node.setdefault(group, {})
        # A copy: YAML would write the second place of one list as a reference to the first.
        node[last] = list(value) if isinstance(value, list) else value
    return tree
