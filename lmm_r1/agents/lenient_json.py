"""JSON as policies write it: spelling is taken leniently, meaning never guessed; in linear time, and without eval."""

from __future__ import annotations

import re
from typing import TypeAlias

from lmm_r1.agents.bad_call import BadCall, harmless, quoted

JsonValue: TypeAlias = "None | bool | int | float | str | list[JsonValue] | dict[str, JsonValue]"

MOST_CHARACTERS = 20_000
_DEEPEST = 32
_LONGEST_INT = 40
_NEAR = 20
_FENCE = "```"
_CLOSING_QUOTES = {'"': '"', "'": "'", "“": "”", "‘": "’"}
_LITERALS = {"true": True, "false": False, "null": None, "none": None}
_ESCAPES = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_SPACE = re.compile(r"\s*")
_NUMBER = re.compile(
    r"[+-]?(?:(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:e[+-]?[0-9]+)?|(?:infinity|inf|nan)\b)", re.IGNORECASE
)
_INT = re.compile(r"[+-]?[0-9]+")
_WORD = re.compile(r"[^\W0-9][\w-]*")
_STRINGS = {
    opening: re.compile(rf"{opening}([^{closing}\\]*(?:\\.[^{closing}\\]*)*){closing}", re.DOTALL)
    for opening, closing in _CLOSING_QUOTES.items()
}
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|.)", re.DOTALL)


def read_json(text: str) -> JsonValue:
    """Return the one value that a text holds.

    Taken as well: single quotes, bare words as keys and texts, trailing commas, Python's `True`, `None` and tuples, a code
    fence around it, and brackets that are missing, or too many, at its end. NaN and infinity are read; whoever wants a
    number refuses them.

    Raises:
        BadCall: it is no JSON, a key stands twice in one object, or it is too long or too deep.
    """
    if len(text) > MOST_CHARACTERS:
        raise BadCall(f"the call has {len(text)} characters, and no more than {MOST_CHARACTERS} are read")
    reader = _Reader(_without_fence(text.strip()))
    value = reader.value(depth=0)
    reader.end()
    return value


def _without_fence(text: str) -> str:
    if not text.startswith(_FENCE):
        return text
    inner = text[len(_FENCE) :].removesuffix(_FENCE)
    language = _WORD.match(inner)
    return inner[language.end() :] if language else inner


def _unescaped(raw: str) -> str:
    if "\\" not in raw:
        return raw

    def character(match: re.Match[str]) -> str:
        code = match[1]
        return chr(int(code[1:], 16)) if len(code) == 5 else _ESCAPES.get(code, code)

    # Halves of surrogate pairs are joined; one that stands alone can be written to no file.
    return _ESCAPE.sub(character, raw).encode("utf-16", "surrogatepass").decode("utf-16", "replace")


class _Reader:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def value(self, *, depth: int) -> JsonValue:
        if depth > _DEEPEST:
            raise BadCall(f"the JSON is nested more than {_DEEPEST} levels deep")
        first = self._peek()
        if first == "{":
            return self._object(depth=depth)
        if first in ("[", "("):
            return self._list(closing="]" if first == "[" else ")", depth=depth)
        if first in _STRINGS:
            return self._string(first)
        if number := self._taken(_NUMBER):
            # The time that int() takes grows with the square of the digits.
            return int(number) if _INT.fullmatch(number) and len(number) <= _LONGEST_INT else float(number)
        if word := self._taken(_WORD):
            return _LITERALS.get(word.lower(), word)
        raise self._error("a value is missing")

    def end(self) -> None:
        """Raise BadCall where anything but closing brackets is left."""
        rest = self._text[self._at :].lstrip(" \t\r\n}])")
        if rest:
            self._at = len(self._text) - len(rest)
            raise self._error("there is more text behind the JSON")

    def _object(self, *, depth: int) -> dict[str, JsonValue]:
        self._at += 1
        read: dict[str, JsonValue] = {}
        while not self._closes("}"):
            key = self._key()
            if key in read:
                raise BadCall(f"the key {quoted(key)} stands twice in one object")
            if self._peek() != ":":
                raise self._error(f"a colon is missing behind the key {quoted(key)}")
            self._at += 1
            read[key] = self.value(depth=depth + 1)
            self._separate("}")
        return read

    def _list(self, *, closing: str, depth: int) -> list[JsonValue]:
        self._at += 1
        read: list[JsonValue] = []
        while not self._closes(closing):
            read.append(self.value(depth=depth + 1))
            self._separate(closing)
        return read

    def _key(self) -> str:
        first = self._peek()
        if first in _STRINGS:
            return self._string(first)
        if word := self._taken(_WORD):
            return word
        raise self._error("a key is missing")

    def _string(self, quote: str) -> str:
        match = _STRINGS[quote].match(self._text, self._at)
        if match is None:
            raise self._error("the quotation mark is never closed")
        self._at = match.end()
        return _unescaped(match[1])

    def _closes(self, closing: str) -> bool:
        """Whether an object or a list ends here, with its bracket or with the text, and step behind it."""
        first = self._peek()
        if first == closing:
            self._at += 1
        return first in ("", closing)

    def _separate(self, closing: str) -> None:
        first = self._peek()
        if first == ",":
            self._at += 1
        elif first not in ("", closing):
            raise self._error(f"a comma or {closing} is missing")

    def _peek(self) -> str:
        """Step over space and return the next character; nothing at the end."""
        space = _SPACE.match(self._text, self._at)
        assert space is not None
        self._at = space.end()
        return self._text[self._at : self._at + 1]

    def _taken(self, pattern: re.Pattern[str]) -> str:
        match = pattern.match(self._text, self._at)
        if match is None:
            return ""
        self._at = match.end()
        return match[0]

    def _error(self, reason: str) -> BadCall:
        if self._at >= len(self._text):
            return BadCall(f"the JSON ends too early: {reason}")
        near = harmless(self._text[self._at : self._at + _NEAR], most=_NEAR)
        return BadCall(f"the JSON cannot be read from character {self._at + 1} on, at '{near}': {reason}")
