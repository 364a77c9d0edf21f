"""The calls in a turn's text: where they stand, and what each says, in the formats that policies are trained on."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from lmm_r1.agents.bad_call import BadCall, quoted
from lmm_r1.agents.lenient_json import MOST_CHARACTERS, JsonValue, read_json

CROP = "crop"
"""The tool that a `<grounding>` block calls."""
_ANSWERED = "</answer>"
_ARGUMENTS = ("arguments", "parameters", "args")


@dataclass(frozen=True, kw_only=True)
class Call:
    name: str
    """Of the tool."""
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


def _object(value: JsonValue, *, holds: str) -> dict[str, JsonValue]:
    if not isinstance(value, dict):
        raise BadCall(f"the call must hold one JSON object with {holds}, not {quoted(value)}")
    return value


def _grounding(body: str) -> Call:
    return Call(name=CROP, arguments=_object(read_json(body), holds="bbox_2d and source"))


def _tool_call(body: str) -> Call:
    return _named(_object(read_json(body), holds="name and arguments"), loose=False)


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
"""Of Hermes, and of the chat templates that follow it: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""
TOOL_BLOCK = CallFormat(tag="tool", read=_tool_block)
"""r1_vlm's: a `<tool>` block of `key: value` lines with the tool's `name`, or of JSON."""
