"""What a policy is told of a call that is wrong: one sentence, in which nothing that it wrote can act."""

import json
import re

_MOST_QUOTED = 100
# Special tokens and tags are written with what is left out here; a kit would read them as such.
_UNSAFE = re.compile(r"[^\w +\-.,:;!?'\"()\[\]{}/=*%#@&$~^…]")


class BadCall(Exception):
    """A call that cannot be read, or not be carried out as it stands; the message is a clause for the policy."""


def harmless(text: str, *, most: int) -> str:
    """Return text on one line, cut after `most` characters, without what special tokens and tags are written with."""
    cut = text if len(text) <= most else f"{text[:most]}…"
    return _UNSAFE.sub("?", " ".join(cut.split()))


def quoted(value: object) -> str:
    """Return what a policy has written as it may stand in a sentence: short, and harmless."""
    if isinstance(value, str):
        return f"'{harmless(value, most=_MOST_QUOTED)}'"
    return harmless(json.dumps(value, ensure_ascii=False, default=str), most=_MOST_QUOTED)
