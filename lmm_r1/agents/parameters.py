"""The arguments of a tool, read off a Python function: their JSON schema, and the check of what a call brings."""

from __future__ import annotations

import functools
import inspect
import json
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import docstring_parser
from PIL import Image
from pydantic import ConfigDict, PydanticUserError, TypeAdapter, ValidationError

from lmm_r1.agents.bad_call import BadCall, harmless, quoted
from lmm_r1.agents.images import EpisodeImages
from lmm_r1.data.messages import Row
from lmm_r1.errors import UserError

GIVEN = (EpisodeImages, Row)
"""Types of parameters that the environment fills in, and the policy is not told of."""
_NUMBERS_ONLY = ConfigDict(allow_inf_nan=False)
_MOST_SAID = 200
_IMAGE_NAME = "Name of an image."


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """One argument that a call may bring."""

    name: str
    schema: dict[str, Any]
    is_required: bool
    is_image: bool
    """Whether a call names an image, which the function gets as one."""
    adapter: TypeAdapter[Any]

    def checked(self, value: object) -> object:
        """Return a value in the parameter's type; raises BadCall that says what is wrong with it."""
        try:
            return self.adapter.validate_python(value)
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False)[0]
        place = "".join(f"[{step}]" for step in first["loc"] if isinstance(step, int))
        said = harmless(first["msg"].removeprefix("Input ").replace(" after validation", ""), most=_MOST_SAID)
        raise BadCall(f"{self.name}{place} is wrong: {said}; it is {quoted(first['input'])}")


class Parameters:
    """What a function takes from a call, and what from the environment."""

    def __init__(self, function: Callable[..., object], *, tool: str, descriptions: Mapping[str, str]) -> None:
        """Read the signature and the docstring's `Args`; raises UserError for a parameter that no call could fill.

        Args:
            descriptions: of parameters, in the place of the docstring's.
        """
        self._tool = tool
        inner = function.func if isinstance(function, functools.partial) else function
        fixed = function.keywords if isinstance(function, functools.partial) else {}
        documented = _documented(inner, tool=tool)
        self.description = documented.description or ""
        """What the function does, by its docstring."""
        said = {one.arg_name: one.description or "" for one in documented.params} | dict(descriptions)
        hints = _hints(inner, tool=tool)
        self.given: dict[str, type] = {}
        self.own: dict[str, Parameter] = {}
        for parameter in inspect.signature(function).parameters.values():
            hint = hints.get(parameter.name)
            if parameter.name in fixed:
                continue
            if hint in GIVEN:
                self.given[parameter.name] = hint
            else:
                description = " ".join(said.get(parameter.name, "").split())
                self.own[parameter.name] = _parameter(parameter, hint, tool=tool, description=description)

    @property
    def schema(self) -> dict[str, Any]:
        """A JSON schema of the arguments, as an object."""
        required = [name for name, one in self.own.items() if one.is_required]
        return {
            "type": "object",
            "properties": {name: one.schema for name, one in self.own.items()},
            **({"required": required} if required else {}),
        }

    def checked(self, arguments: Mapping[str, object]) -> dict[str, object]:
        """Return a call's arguments in their types; raises BadCall that says what is missing, unknown or wrong."""
        takes = f"{self._tool} takes {', '.join(self.own) or 'no arguments'}"
        if unknown := [name for name in arguments if name not in self.own]:
            raise BadCall(f"there is no argument {quoted(unknown[0])}; {takes}")
        if missing := [name for name, one in self.own.items() if one.is_required and name not in arguments]:
            raise BadCall(f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing; {takes}")
        return {name: self.own[name].checked(value) for name, value in arguments.items()}


def _documented(function: Callable[..., object], *, tool: str) -> docstring_parser.Docstring:
    try:
        return docstring_parser.parse(inspect.getdoc(function) or "")
    except docstring_parser.ParseError as error:
        raise UserError(
            f"tool {tool}: its docstring cannot be read ({error}); write `Args:` as Google does"
        ) from error


def _check_is_json(default: object, *, where: str) -> None:
    try:
        json.dumps(default, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise UserError(f"{where}: its default {default!r} is none that a call could bring ({error})") from error


def _hints(function: Callable[..., object], *, tool: str) -> dict[str, Any]:
    # A callable object has its annotations on its class.
    annotated = function if inspect.isroutine(function) else getattr(function, "__call__", function)  # noqa: B004
    try:
        return typing.get_type_hints(annotated, include_extras=True)
    except (NameError, TypeError) as error:
        raise UserError(f"tool {tool}: its annotations cannot be read ({error}); import what they name") from error


def _parameter(parameter: inspect.Parameter, hint: Any, *, tool: str, description: str) -> Parameter:
    where = f"tool {tool}: parameter {parameter.name}"
    if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
        raise UserError(f"{where} has no name in a call; write a parameter of its own for each argument")
    if hint is None:
        raise UserError(f"{where} has no type; annotate it")
    is_image = hint is Image.Image
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(str if is_image else hint, config=_NUMBERS_ONLY)
        schema = adapter.json_schema()
    except PydanticUserError as error:
        raise UserError(
            f"{where}: a call cannot bring {hint}; take str, int, float, bool, list, dict, Literal, Optional, or "
            "PIL.Image.Image for an image"
        ) from error
    is_required = parameter.default is parameter.empty
    if is_image:
        description = f"{description} {_IMAGE_NAME}".strip()
        if not is_required and not isinstance(parameter.default, str):
            raise UserError(f"{where}: its default must be the name of an image, as text")
    if description:
        schema["description"] = description
    if not is_required:
        schema["default"] = parameter.default
        _check_is_json(parameter.default, where=where)
    return Parameter(name=parameter.name, schema=schema, is_required=is_required, is_image=is_image, adapter=adapter)
