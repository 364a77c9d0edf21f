"""Tool calls in a response: their syntax, a lenient JSON parser, and errors in them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

_MOST_QUOTED = 100
# Special tokens and tags are written with what is left out here; a kit would read them as such.
_UNSAFE = re.compile(r"[^\w +\-.,:;!?'\"()\[\]{}/=*%#@&$~^…]")


class BadCall(Exception):
    """A call that cannot be parsed or executed; the message is a clause for the policy."""


def harmless(text: str, *, most: int) -> str:
    """Return text on one line, cut after `most` characters, without what special tokens and tags are written with."""
    cut = text if len(text) <= most else f"{text[:most]}…"
    return _UNSAFE.sub("?", " ".join(cut.split()))


def quoted(value: object) -> str:
    """Return what a policy has written as it may stand in a sentence: short, and harmless."""
    if isinstance(value, str):
        return f"'{harmless(value, most=_MOST_QUOTED)}'"
    return harmless(json.dumps(value, ensure_ascii=False, default=str), most=_MOST_QUOTED)


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


CROP = "crop"
"""The tool that a `<grounding>` block calls."""
_ANSWERED = "</answer>"
_ARGUMENTS = ("arguments", "parameters", "args")


@dataclass(frozen=True, kw_only=True)
class Call:
    name: str
    """The name of the tool."""
    arguments: Mapping[str, JsonValue]


@dataclass(frozen=True, kw_only=True)
class CallFormat:
    """A way to write a call: what stands between `<tag>` and `</tag>`."""

    tag: str
    read: Callable[[str], Call]
    """From what stands between the tags; raises BadCall."""

    @property
    def closing(self) -> str:
        """What a call ends with."""
        return f"</{self.tag}>"


@dataclass(frozen=True, kw_only=True)
class WrittenCall:
    """A call as it stands in a turn."""

    format: CallFormat
    body: str = ""
    """What stands between the tags."""
    problem: str = ""
    """What is wrong with the tags; empty where both are there."""

    def read(self) -> Call:
        """Return what the call says; raises BadCall."""
        if self.problem:
            raise BadCall(self.problem)
        return self.format.read(self.body)


def written_calls(text: str, formats: Sequence[CallFormat]) -> list[WrittenCall]:
    """Return the calls of a turn, in their order.

    A call reaches from the last opening tag before a closing one. Where there is none, a tag without its partner is taken
    for a call, which `read` refuses, unless an answer stands behind it: thoughts may speak of a tag.
    """
    by_tag = {one.tag: one for one in formats}
    calls: list[WrittenCall] = []
    alone: list[tuple[int, WrittenCall]] = []
    opened: re.Match[str] | None = None
    for found in re.finditer(rf"<(/?)({'|'.join(map(re.escape, by_tag))})>", text):
        tag = found[2]
        if not found[1]:
            opened = found
        elif opened is not None and opened[2] == tag:
            calls.append(WrittenCall(format=by_tag[tag], body=text[opened.end() : found.start()]))
            opened = None
        else:
            problem = f"the closing tag of {tag} has no opening tag before it"
            alone.append((found.start(), WrittenCall(format=by_tag[tag], problem=problem)))
    if opened is not None:
        problem = f"the call is not closed; end it with the closing tag of {opened[2]}"
        alone.append((opened.start(), WrittenCall(format=by_tag[opened[2]], problem=problem)))
    answered = text.rfind(_ANSWERED)
    return calls or [call for start, call in alone if start > answered][:1]


_FUNCTION = re.compile(r"\s*<function=(?P<name>[^>\n]+)>(?P<parameters>.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>", re.DOTALL)


def _object(value: JsonValue, *, holds: str) -> dict[str, JsonValue]:
    if not isinstance(value, dict):
        raise BadCall(f"the call must hold one JSON object with {holds}, not {quoted(value)}")
    return value


def _grounding(body: str) -> Call:
    return Call(name=CROP, arguments=_object(read_json(body), holds="bbox_2d and source"))


def _tool_call(body: str) -> Call:
    """Read JSON, or a function with its parameters as tags."""
    if body.lstrip().startswith("<function"):
        return _function(body)
    return _named(_object(read_json(body), holds="name and arguments"), loose=False)


def _function(body: str) -> Call:
    if len(body) > MOST_CHARACTERS:
        raise BadCall(f"the call has {len(body)} characters, and no more than {MOST_CHARACTERS} are read")
    found = _FUNCTION.fullmatch(body)
    if found is None:
        raise BadCall("the call is not of the form <function=NAME> parameters </function>")
    arguments: dict[str, JsonValue] = {}
    rest = found["parameters"]
    while parameter := _PARAMETER.match(rest):
        key = parameter["key"].strip()
        if key in arguments:
            raise BadCall(f"the parameter {quoted(key)} is given twice")
        arguments[key] = _line_value(parameter["value"])
        rest = rest[parameter.end() :]
    if rest.strip():
        raise BadCall(f"{quoted(rest.strip())} is not of the form <parameter=NAME> value </parameter>")
    return Call(name=found["name"].strip(), arguments=arguments)


def _tool_block(body: str) -> Call:
    """Read `key: value` lines, `name` being the tool's, or JSON."""
    if body.lstrip().startswith(("{", "`")):
        return _named(_object(read_json(body), holds="name and the arguments"), loose=True)
    if len(body) > MOST_CHARACTERS:
        raise BadCall(f"the call has {len(body)} characters, and no more than {MOST_CHARACTERS} are read")
    values: dict[str, JsonValue] = {}
    for line in filter(None, map(str.strip, body.splitlines())):
        key, colon, value = line.partition(":")
        key = key.strip()
        if not colon or not key:
            raise BadCall(f"the line {quoted(line)} is not of the form key: value")
        if key in values:
            raise BadCall(f"the key {quoted(key)} stands in two lines")
        values[key] = value.strip() if key == "name" else _line_value(value.strip())
    return _named(values, loose=True)


def _line_value(text: str) -> JsonValue:
    try:
        return read_json(text)
    except BadCall:
        # Text needs no quotation marks in such a line; whether it may be text, the tool's schema knows.
        return text


def _named(values: dict[str, JsonValue], *, loose: bool) -> Call:
    """Return the call that an object describes.

    Args:
        loose: whether the arguments may stand beside the name.
    """
    name = values.pop("name", None)
    if not isinstance(name, str) or not name.strip():
        raise BadCall("the call has no name: the name of a tool, as text")
    given = [key for key in _ARGUMENTS if key in values]
    if not given:
        if values and not loose:
            raise BadCall(f"beside name the call has {_listed(values)}; the tool's arguments belong into arguments")
        return Call(name=name.strip(), arguments=values)
    arguments = values.pop(given[0])
    if values:
        raise BadCall(f"beside name and {given[0]} the call has {_listed(values)}")
    if isinstance(arguments, str):
        arguments = read_json(arguments)
    if not isinstance(arguments, dict):
        raise BadCall(f"{given[0]} must be a JSON object, not {quoted(arguments)}")
    return Call(name=name.strip(), arguments=arguments)


def _listed(values: Mapping[str, JsonValue]) -> str:
    return quoted(", ".join(values))


GROUNDING = CallFormat(tag="grounding", read=_grounding)
"""Mini-o3's: `<grounding>{"bbox_2d": [x0, y0, x1, y1], "source": "original_image"}</grounding>`."""
TOOL_CALL = CallFormat(tag="tool_call", read=_tool_call)
"""The form of Hermes and of chat templates that follow it: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

Later templates write `<function=NAME><parameter=KEY>VALUE</parameter></function>` instead of the JSON.
"""
TOOL_BLOCK = CallFormat(tag="tool", read=_tool_block)
"""r1_vlm's: a `<tool>` block of `key: value` lines with the tool's `name`, or of JSON."""
