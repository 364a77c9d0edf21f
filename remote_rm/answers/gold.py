r"""Can anything be judged by a gold answer: `\frac{1}{` and `\sqrt{2` are cut off, and no response could be right.

And the gold answers of a label that lists several.
"""

import json
import re
from functools import lru_cache

_ESCAPED = re.compile(r"\\[{}\\$%#&_]")
_COMMANDS_WITH_ARGUMENTS = re.compile(r"\\(?P<name>[dtc]?frac|[dt]?binom|sqrt|text|mathrm|boxed)(?![A-Za-z])")
_ARGUMENT = re.compile(r"\s*(?:\{(?P<group>[^{}]*)(?P<end>[{}])|[^\s{}&])")
_LEFT, _RIGHT = re.compile(r"\\left(?![A-Za-z])"), re.compile(r"\\right(?![A-Za-z])")
_BEGIN, _END = re.compile(r"\\begin\s*\{([^{}]*)\}"), re.compile(r"\\end\s*\{([^{}]*)\}")
_WORD = re.compile(r"(?<![\\A-Za-z])[^\W\d_]{2,}")
_MEANING = re.compile(r"[^\W_]|[<>=+∞∅√°%⊂⊃∈≤≥≠-]|\\[{|]")
# An age group or a score.
_AND_MORE = re.compile(r"\d+\+")
_DANGLING = re.compile(r"(?:[\^_/]|[\w})\]]\s*=|\d\s*[-+*]|[\w})\]]\s*\\(?:times|cdot|div|le|ge|leq|geq|cup|cap|pm))$")


MAX_CHECKED_CHARS = 1000
"""A longer gold answer is compared as a string only, so that its form does not matter."""


def is_gradable(label: str) -> bool:
    """Return whether the gold answer is whole: every bracket closed, every command with its arguments, nothing cut off.

    Words, names and notations that no parser knows are gradable: an answer is compared with them as text. It takes
    microseconds, so that it can be asked before every reward. An empty label is not gradable.
    """
    text = label.strip()
    return _is_whole(text) if len(text) <= MAX_CHECKED_CHARS else True


@lru_cache(maxsize=16_384)
def _is_whole(text: str) -> bool:
    text = text.strip("$").strip()
    if _AND_MORE.fullmatch(text):
        return True
    if not _MEANING.search(text) or (text.endswith("\\") and not text.endswith("\\\\")):
        return False
    return _brackets_close(text) and _commands_are_whole(text) and not _DANGLING.search(text.rstrip(" .,"))


def _brackets_close(text: str) -> bool:
    is_one_sided = r"\right." in text or r"\left." in text
    if len(_LEFT.findall(text)) != len(_RIGHT.findall(text)):
        return False
    if text.count(r"\{") != text.count(r"\}") and not is_one_sided:
        return False
    if sorted(_BEGIN.findall(text)) != sorted(_END.findall(text)) or text.count(r"\begin") != text.count(r"\end"):
        return False
    depth = 0
    for character in _ESCAPED.sub("", text):
        depth += (character == "{") - (character == "}")
        if depth < 0:
            return False
    # Prose has its own brackets, "1) 5 2) 7" too many closing ones; an opening one that stays open is a cut.
    opened = sum(map(text.count, "([")) > sum(map(text.count, ")]"))
    return depth == 0 and not (opened and not is_one_sided and not _WORD.search(text))


def _commands_are_whole(text: str) -> bool:
    for match in _COMMANDS_WITH_ARGUMENTS.finditer(text):
        position = match.end()
        if match["name"] == "sqrt":
            index = re.compile(r"\s*\[[^\[\]]*\]").match(text, position)
            position = index.end() if index else position
        for _ in range(2 if match["name"].endswith(("frac", "binom")) else 1):
            argument = _ARGUMENT.match(text, position)
            if argument is None:
                return False
            if argument["group"] is None:
                position = argument.end()
                continue
            is_empty = argument["end"] == "}" and not argument["group"].strip()
            if is_empty and match["name"] not in ("text", "mathrm"):
                return False
            position = _group_end(text, position)
    return True


def _group_end(text: str, start: int) -> int:
    depth = 0
    for index in range(start, len(text)):
        if text[index] in "{}" and text[index - 1] != "\\":
            depth += 1 if text[index] == "{" else -1
            if depth == 0:
                return index + 1
    return len(text)


def listed_golds(label: str) -> list[str]:
    """Return the golds of a label that is a JSON list, any of which an answer may meet; else the label as it is.

    The entries are texts, numbers, or objects with an `answer`, as in the annotations of VQA.
    """
    try:
        found = json.loads(label) if label.lstrip().startswith("[") else None
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, list):
        return [label]
    entries = [entry.get("answer") if isinstance(entry, dict) else entry for entry in found]
    if not all(isinstance(entry, (str, int, float)) and not isinstance(entry, bool) for entry in entries):
        return [label]
    return [str(entry) for entry in entries]
