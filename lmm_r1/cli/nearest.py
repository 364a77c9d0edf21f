"""The known name that a mistyped one was probably meant to be."""

import difflib
from collections.abc import Iterable


def nearest(name: str, *, known: Iterable[str]) -> str | None:
    """Return the known name most like `name`, by the whole of it or else by its last dotted part; None if none is."""
    names = list(known)
    if whole := difflib.get_close_matches(name, names, n=1):
        return whole[0]
    by_last_part = {known_name.rpartition(".")[2]: known_name for known_name in reversed(names)}
    last_part = difflib.get_close_matches(name.rpartition(".")[2], list(by_last_part), n=1)
    return by_last_part[last_part[0]] if last_part else None
