"""Tool calls in a response: their syntax, a lenient JSON parser, and errors in them."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

_MOST_QUOTED = 100
MOST_SAID = 200
"""Characters of a message that a policy is shown."""
# All characters except these: special tokens and tags need others, and a kit would parse them.
_UNSAFE = re.compile(r"[^\w +\-.,:;!?'\"()\[\]{}/=*%#@&$~^…]")


class BadCall(Exception):
    """A call that cannot be parsed or executed; the message is a clause for the policy."""


def harmless(text: str, *, most: int) -> str:
    """Return text on one line, cut after `most` characters, without the characters of special tokens and tags."""
    cut = text if len(text) <= most else f"{text[:most]}…"
    return _UNSAFE.sub("?", " ".join(cut.split()))


def quoted(value: object) -> str:
    """Return text of a policy for use in a sentence: short, and harmless."""
    if isinstance(value, str):
        return f"'{harmless(value, most=_MOST_QUOTED)}'"
    return harmless(json.dumps(value, ensure_ascii=False, default=str), most=_MOST_QUOTED)


def told(error: BaseException) -> str:
    """Return an error for use in a sentence for the policy."""
    return harmless(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__, most=MOST_SAID)


JsonValue: TypeAlias = "None | bool | int | float | str | list[JsonValue] | dict[str, JsonValue]"

MOST_CHARACTERS = 20_000
_DEEPEST = 32
_LONGEST_INT = 40
_NEAR = 20
_FENCED = re.compile(r"```\w*(.*?)(?:```)?", re.DOTALL)
# A string, closed or not, or one bracket.
_STRING_OR_BRACKET = re.compile(r""""(?:[^"\\]|\\.)*(?:"|\Z)|'(?:[^'\\]|\\.)*(?:'|\Z)|[][{}()]""", re.DOTALL)
_CLOSING = {"{": "}", "[": "]", "(": ")"}


def read_json(text: str) -> JsonValue:
    """Return the value in a text: JSON, or a Python literal such as `{'a': (1, None)}`.

    A code fence around it is ignored. Closing brackets at its end may be missing or surplus.

    Raises:
        BadCall: it is neither, an object has a key twice, or it is too deeply nested.
    """
    fenced = _FENCED.fullmatch(text.strip())
    text = _balanced(fenced[1] if fenced else text)
    try:
        value = _loaded(text)
    except ValueError as error:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about backslashes
                value = _loaded(json.dumps(ast.literal_eval(text)))
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            if not isinstance(error, json.JSONDecodeError):
                raise BadCall("the JSON cannot be read") from error
            near = harmless(text[error.pos : error.pos + _NEAR], most=_NEAR)
            place = f"from character {error.pos + 1} on, at '{near}'"
            raise BadCall(f"the JSON cannot be read {place}: {error.msg}") from error
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise BadCall("the JSON contains half of a surrogate pair") from error
    return value


def _loaded(text: str) -> JsonValue:
    # The time that int() takes grows with the square of the digits.
    def whole(digits: str) -> int | float:
        return int(digits) if len(digits) <= _LONGEST_INT else float(digits)

    return json.loads(text, strict=False, parse_int=whole, object_pairs_hook=_unique)


def _unique(pairs: list[tuple[str, JsonValue]]) -> dict[str, JsonValue]:
    read = dict(pairs)
    if len(read) < len(pairs):
        twice = next(key for place, (key, _) in enumerate(pairs) if key in dict(pairs[:place]))
        raise BadCall(f"the key {quoted(twice)} appears twice")
    return read


def _balanced(text: str) -> str:
    """Return a text without surplus closing brackets at its end, and with the missing ones."""
    text = text.strip()
    unclosed: list[str] = []
    for found in _STRING_OR_BRACKET.finditer(text):
        mark = found[0]
        if mark in _CLOSING:
            unclosed.append(_CLOSING[mark])
            if len(unclosed) > _DEEPEST:
                raise BadCall(f"the JSON is nested more than {_DEEPEST} levels deep")
        elif unclosed and mark == unclosed[-1]:
            unclosed.pop()
        elif not unclosed and not text[found.start() :].strip(" \n\t}])"):
            return text[: found.start()]
    return text + "".join(reversed(unclosed))


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
    """A way to write a call: between `<tag>` and `</tag>`."""

    tag: str
    read: Callable[[str], Call]
    """Parses the text between the tags; raises BadCall."""

    @property
    def closing(self) -> str:
        """The text that ends a call."""
        return f"</{self.tag}>"


@dataclass(frozen=True, kw_only=True)
class WrittenCall:
    """A call as written in a turn."""

    format: CallFormat
    body: str = ""
    """The text between the tags."""
    problem: str = ""
    """What is wrong with the tags; empty if both are present."""

    def read(self) -> Call:
        """Return what the call says; raises BadCall."""
        if self.problem:
            raise BadCall(self.problem)
        if len(self.body) > MOST_CHARACTERS:
            raise BadCall(f"the call has {len(self.body)} characters, and no more than {MOST_CHARACTERS} are read")
        return self.format.read(self.body)


def written_calls(text: str, formats: Sequence[CallFormat]) -> list[WrittenCall]:
    """Return the calls of a turn, in their order.

    A call starts at the last opening tag before a closing one. If there is no complete call, a single tag counts as a call,
    which `read` refuses, unless an answer follows it: thoughts may mention a tag.
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
    found = _FUNCTION.fullmatch(body)
    if found is None:
        raise BadCall("the call is not of the form <function=NAME> parameters </function>")
    pairs = [(one["key"].strip(), _line_value(one["value"])) for one in _PARAMETER.finditer(found["parameters"])]
    if rest := _PARAMETER.sub("", found["parameters"]).strip():
        raise BadCall(f"{quoted(rest)} is not of the form <parameter=NAME> value </parameter>")
    return Call(name=found["name"].strip(), arguments=_unique(pairs))


def _tool_block(body: str) -> Call:
    """Read `key: value` lines, `name` being the tool's, or JSON."""
    if body.lstrip().startswith(("{", "`")):
        return _named(_object(read_json(body), holds="name and the arguments"), loose=True)
    pairs: list[tuple[str, JsonValue]] = []
    for line in filter(None, map(str.strip, body.splitlines())):
        key, colon, value = line.partition(":")
        key = key.strip()
        if not colon or not key:
            raise BadCall(f"the line {quoted(line)} is not of the form key: value")
        pairs.append((key, value.strip() if key == "name" else _line_value(value.strip())))
    return _named(_unique(pairs), loose=True)


def _line_value(text: str) -> JsonValue:
    try:
        return read_json(text)
    except BadCall:
        # Text needs no quotation marks here; the tool's schema decides whether text is accepted.
        return text


def _named(values: dict[str, JsonValue], *, loose: bool) -> Call:
    """Return the call that an object describes.

    Args:
        loose: whether the arguments may be next to the name.
    """
    name = values.pop("name", None)
    if not isinstance(name, str) or not name.strip():
        raise BadCall("the call has no name: the name of a tool, as text")
    given = [key for key in _ARGUMENTS if key in values]
    if loose and not given:
        return Call(name=name.strip(), arguments=values)
    arguments = values.pop(given[0]) if given else {}
    if values:
        raise BadCall(
            f"in addition to name and arguments, the call has {quoted(', '.join(values))}; the arguments of the tool belong "
            "into arguments"
        )
    if isinstance(arguments, str):
        arguments = read_json(arguments)
    if not isinstance(arguments, dict):
        raise BadCall(f"{given[0]} must be a JSON object, not {quoted(arguments)}")
    return Call(name=name.strip(), arguments=arguments)


GROUNDING = CallFormat(tag="grounding", read=_grounding)
"""Mini-o3's: `<grounding>{"bbox_2d": [x0, y0, x1, y1], "source": "original_image"}</grounding>`."""
TOOL_CALL = CallFormat(tag="tool_call", read=_tool_call)
"""The form of Hermes and of chat templates that follow it: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

Later templates write `<function=NAME><parameter=KEY>VALUE</parameter></function>` instead of the JSON.
"""
TOOL_BLOCK = CallFormat(tag="tool", read=_tool_block)
"""r1_vlm's: a `<tool>` block of `key: value` lines with the tool's `name`, or of JSON."""
