"""Tools: Python functions that a policy may call, or services behind them, with a schema and a deadline per call."""

from __future__ import annotations

import asyncio
import base64
import functools
import inspect
import io
import json
import logging
import re
import threading
import typing
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any

import aiohttp
import docstring_parser
from PIL import Image
from pydantic import BaseModel, BeforeValidator, ConfigDict, PydanticUserError, TypeAdapter, ValidationError

from lmm_r1.agents.calls import MOST_SAID, BadCall, harmless, quoted, told
from lmm_r1.agents.environment import DeadlinePassed, Outcome, passable, start_thread, within
from lmm_r1.data.images import load_image
from lmm_r1.data.messages import ImagePart, Row, decode_base64, images_of
from lmm_r1.errors import UserError
from lmm_r1.lmm_kits.encoding import bounded_size

ORIGINAL = "original_image"
OBSERVATION = "observation"
MOST_ASPECT = 100
"""How many times longer than its shorter side an image may be; image processors refuse thinner ones."""


def is_too_thin(size: tuple[int, int]) -> bool:
    """Return whether image processors would refuse an image of this width and height."""
    return max(size) > MOST_ASPECT * min(size)


@dataclass(frozen=True, kw_only=True)
class PixelBounds:
    """Bounds on the pixels of images without bounds of their own."""

    min_pixels: int
    max_pixels: int
    side_multiple: int
    """The image processor rounds sides to multiples of it."""

    def of(self, part: ImagePart) -> ImagePart:
        """Return an image with both bounds; its own take precedence, and move the other one if they would cross."""
        lowest = min(self.min_pixels, part.max_pixels or self.min_pixels)
        highest = max(self.max_pixels, part.min_pixels or self.max_pixels)
        return replace(part, min_pixels=part.min_pixels or lowest, max_pixels=part.max_pixels or highest)

    def shown_size(self, part: ImagePart, *, size: tuple[int, int]) -> tuple[int, int]:
        """Return the width and height with which an image of `size` is shown."""
        bounded = self.of(part)
        assert bounded.min_pixels is not None
        assert bounded.max_pixels is not None
        height, width = bounded_size(
            height=size[1],
            width=size[0],
            factor=self.side_multiple,
            min_pixels=bounded.min_pixels,
            max_pixels=bounded.max_pixels,
        )
        return width, height


class EpisodeImages:
    """The images of the row, and those that tools have added; loaded on first access, in any thread.

    A row's only image is `original_image`. Several are `original_image_1`, `original_image_2` and so on, without the bare
    name. Images of tools are `observation_1`, `observation_2`, numbered without gaps.
    """

    def __init__(self, row: Row, *, bounds: PixelBounds) -> None:
        self.bounds = bounds
        self._location = row.location
        originals = images_of(row.messages)
        names = [ORIGINAL] if len(originals) == 1 else [f"{ORIGINAL}_{i}" for i in range(1, len(originals) + 1)]
        self._parts = dict(zip(names, originals, strict=True))
        self._aliases = {f"{ORIGINAL}_1": ORIGINAL} if len(originals) == 1 else {}
        self._observations = 0
        self._loaded: dict[str, Image.Image] = {}
        self._lock = threading.Lock()

    def __deepcopy__(self, memo: dict[int, Any]) -> EpisodeImages:
        # The pictures are shared, later additions are not.
        other = copy(self)
        other._parts, other._loaded = dict(self._parts), dict(self._loaded)
        other._lock = threading.Lock()
        return other

    @property
    def names(self) -> tuple[str, ...]:
        """The row's images, then the observations, in the order in which they were shown."""
        return tuple(self._parts)

    def number(self, name: str) -> int:
        """Return the index of an image in `names`; raises BadCall if there is none."""
        return self.names.index(self.known(name))

    def known(self, name: str) -> str:
        """Return the name of an image as in `names`; raises BadCall if there is none."""
        spelt = name.strip().lower().replace(" ", "_")
        spelt = self._aliases.get(spelt, spelt)
        if spelt not in self._parts:
            there = ", ".join(self.names) or "none"
            raise BadCall(f"there is no image {quoted(name)}; the images are: {there}")
        return spelt

    def load(self, name: str) -> Image.Image:
        """Return an image in RGB, upright and in full resolution. It must not be changed; call this in a thread.

        Raises:
            BadCall: there is no image of this name.
            UserError: the row's image cannot be read.
        """
        name = self.known(name)
        with self._lock:
            if name not in self._loaded:
                self._loaded[name] = load_image(self._parts[name], location=self._location)
            return self._loaded[name]

    def shown_size(self, name: str) -> tuple[int, int]:
        """Return the width and height with which the policy sees an image; raises as `load` does."""
        return self.bounds.shown_size(self._parts[self.known(name)], size=self.load(name).size)

    def add(self, part: ImagePart) -> str:
        """Add an image of a tool and return its name."""
        self._observations += 1
        name = f"{OBSERVATION}_{self._observations}"
        self._parts[name] = part
        return name


GIVEN = (EpisodeImages, Row)
"""Types of parameters that come from the environment and are not in the schema."""


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """One argument of a call."""

    schema: dict[str, object]
    is_required: bool
    is_image: bool
    """Whether a call names an image, which the function gets as one."""
    adapter: TypeAdapter[Any]

    @classmethod
    def of(cls, parameter: inspect.Parameter, hint: Any, *, where: str, description: str) -> Parameter:
        """Return the parameter of a function; raises UserError for one that no call could fill."""
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise UserError(f"{where} has no name in a call; write a named parameter for each argument")
        if hint is None:
            raise UserError(f"{where} has no type; annotate it")
        is_image = hint is Image.Image
        try:
            adapter: TypeAdapter[Any] = TypeAdapter(str if is_image else hint, config=ConfigDict(allow_inf_nan=False))
            schema = adapter.json_schema()
        except PydanticUserError as error:
            raise UserError(
                f"{where}: a call cannot contain {hint}; use str, int, float, bool, list, dict, Literal, Optional, or "
                "PIL.Image.Image for an image"
            ) from error
        if is_image:
            description = f"{description} Name of an image.".strip()
        if description:
            schema["description"] = description
        is_required = parameter.default is parameter.empty
        if not is_required:
            schema["default"] = parameter.default
        return cls(schema=schema, is_required=is_required, is_image=is_image, adapter=adapter)

    def checked(self, value: object, *, name: str) -> object:
        """Return a value in the parameter's type; raises BadCall that says what is wrong with it."""
        try:
            return self.adapter.validate_python(value)
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False)[0]
        place = "".join(f"[{step}]" for step in first["loc"] if isinstance(step, int))
        said = harmless(first["msg"].removeprefix("Input ").replace(" after validation", ""), most=MOST_SAID)
        raise BadCall(f"{name}{place} is wrong: {said}; it is {quoted(first['input'])}")


DEADLINE_S = 30.0
_NAME = re.compile(r"[A-Za-z_][\w-]*", re.ASCII)
_MOST_CHARACTERS = 8_000
_MOST_LEFT_BEHIND = 64

logger = logging.getLogger(__name__)


class ToolFailed(Exception):
    """A tool failed, which is not the policy's fault; the message is a clause for the policy."""


@dataclass(frozen=True, kw_only=True)
class ToolResult:
    """The result of a tool."""

    text: str = ""
    images: tuple[ImagePart, ...] = ()
    """Images without pixel bounds get those of the environment."""


class Tool:
    """A function as a tool. Its name, signature and docstring describe it to the policy.

    Its parameters are str, int, float, bool, list, dict, Literal or Optional; a `PIL.Image.Image` is one of the episode's
    images, which the call names. Parameters annotated `EpisodeImages` or `Row` come from the environment and are not in
    the schema. It returns text, a number, a dict, an image, a list of texts and images, or a `ToolResult`, and raises
    `BadCall` with a clause that tells the policy what was wrong with its call.

    A plain function runs in its own thread, an `async` one in the run's event loop, which it must not block.
    """

    def __init__(
        self,
        function: Callable[..., object],
        *,
        name: str | None = None,
        description: str | None = None,
        descriptions: Mapping[str, str] | None = None,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        """Read the function's signature; raises UserError if it cannot be a tool.

        Args:
            description: of the tool, instead of the docstring's.
            descriptions: of its parameters, instead of the docstring's.
            deadline_s: time limit of a call in seconds.
        """
        self.name = str(getattr(function, "__name__", type(function).__name__)) if name is None else name
        if not _NAME.fullmatch(self.name):
            raise UserError(f"tool {self.name!r}: a name has only letters, digits, _ and -; give name=...")
        if not 0 < deadline_s < float("inf"):
            raise UserError(f"tool {self.name}: deadline_s must be a number of seconds above 0, not {deadline_s}")
        self.deadline_s = deadline_s
        self._function = function
        self._left_behind: list[threading.Thread] = []
        self.parameters: dict[str, Parameter] = {}
        self.given: dict[str, type] = {}
        """Parameters that come from the environment."""
        try:
            documented = self._read_signature(descriptions or {})
            self.description = description or documented
            json.dumps(self.schema, allow_nan=False)
        except UserError:
            raise
        except (TypeError, ValueError, NameError, docstring_parser.ParseError) as error:
            raise UserError(
                f"tool {self.name}: its signature and docstring make no JSON schema ({type(error).__name__}: {error})"
            ) from error
        if not self.description:
            raise UserError(f"tool {self.name}: it has no docstring; describe in one for the policy what it does")

    def _read_signature(self, descriptions: Mapping[str, str]) -> str:
        """Fill in the parameters and return the docstring's description."""
        function = self._function
        inner, fixed = (
            (function.func, function.keywords) if isinstance(function, functools.partial) else (function, {})
        )
        documented = docstring_parser.parse(inspect.getdoc(inner) or "")
        said = {one.arg_name: one.description or "" for one in documented.params} | dict(descriptions)
        # A callable object has its annotations on its class.
        annotated = inner if inspect.isroutine(inner) else getattr(inner, "__call__", inner)  # noqa: B004
        hints = typing.get_type_hints(annotated, include_extras=True)
        for name, parameter in inspect.signature(function).parameters.items():
            if name in fixed:
                continue
            if hints.get(name) in GIVEN:
                self.given[name] = hints[name]
            else:
                description = " ".join(said.get(name, "").split())
                where = f"tool {self.name}: parameter {name}"
                self.parameters[name] = Parameter.of(parameter, hints.get(name), where=where, description=description)
        return documented.description or ""

    @property
    def schema(self) -> dict[str, object]:
        """The schema for chat templates: `{"type": "function", "function": {"name": ...}}`."""
        required = [name for name, one in self.parameters.items() if one.is_required]
        properties = {name: one.schema for name, one in self.parameters.items()}
        parameters = {"type": "object", "properties": properties, **({"required": required} if required else {})}
        described = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": described}

    def _checked(self, arguments: Mapping[str, object]) -> dict[str, object]:
        """Return a call's arguments in their types; raises BadCall for missing, unknown or wrong ones."""
        takes = f"{self.name} takes {', '.join(self.parameters) or 'no arguments'}"
        if unknown := [name for name in arguments if name not in self.parameters]:
            raise BadCall(f"there is no argument {quoted(unknown[0])}; {takes}")
        if missing := [name for name, one in self.parameters.items() if one.is_required and name not in arguments]:
            raise BadCall(f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing; {takes}")
        return {name: self.parameters[name].checked(value, name=name) for name, value in arguments.items()}

    async def call(self, arguments: Mapping[str, object], *, images: EpisodeImages, row: Row) -> ToolResult:
        """Return the tool's result for a call's arguments.

        Raises:
            BadCall: the arguments are wrong.
            ToolFailed: it raised something else, did not return in time, or returned something that cannot be shown. A
                thread that hangs continues until its function returns; while 64 of a tool hang, its calls fail at once.
            UserError: an image of the row cannot be read.
        """
        values = self._checked(arguments)
        self._left_behind = [thread for thread in self._left_behind if thread.is_alive()]
        if len(self._left_behind) >= _MOST_LEFT_BEHIND:
            raise self._failed(f"{len(self._left_behind)} of its earlier calls have not ended yet", row=row)
        try:
            return await within(self.deadline_s, self.invoked(values, images=images, row=row))
        except (BadCall, ToolFailed, UserError):
            raise
        except DeadlinePassed as error:
            raise self._failed(f"it did not answer within {self.deadline_s:g} seconds", row=row) from error
        except Exception as error:  # a tool is the user's own code, which may raise anything
            logger.warning("%s: the tool %s raised", row.location, self.name, exc_info=error)
            raise ToolFailed(f"it raised {told(error)}") from error

    async def invoked(self, values: dict[str, object], *, images: EpisodeImages, row: Row) -> ToolResult:
        """Run the function on checked arguments, without a deadline."""
        called = getattr(self._function, "__call__", None)  # noqa: B004
        if not (inspect.iscoroutinefunction(self._function) or inspect.iscoroutinefunction(called)):
            return await self.in_thread(lambda: shown(self._function(**self.filled(values, images=images, row=row))))
        filled = await self.in_thread(partial(self.filled, values, images=images, row=row))
        try:
            returned = await self._function(**filled)  # type: ignore[misc]
        except SystemExit as error:
            # Otherwise it would end the event loop.
            raise passable(error) from error
        return await self.in_thread(lambda: shown(returned))

    def filled(self, values: Mapping[str, object], *, images: EpisodeImages, row: Row) -> dict[str, object]:
        """Return the function's arguments, including images and those from the environment; may take long.

        Raises the errors of `EpisodeImages.load`.
        """
        complete = dict(values)
        for name, parameter in self.parameters.items():
            if parameter.is_image:
                named = str(values.get(name, parameter.schema.get("default")))
                complete[name] = images.load(named).copy()
        for name, kind in self.given.items():
            complete[name] = images if kind is EpisodeImages else row
        return complete

    async def in_thread(self, function: Callable[[], Outcome]) -> Outcome:
        """Run a function in its own thread and return its result; the thread is abandoned if this is cancelled."""
        answer, thread = start_thread(function, name=f"tool {self.name}")
        try:
            return await answer
        except asyncio.CancelledError:
            self._left_behind.append(thread)
            raise

    def _failed(self, reason: str, *, row: Row) -> ToolFailed:
        logger.warning("%s: the tool %s failed: %s", row.location, self.name, reason)
        return ToolFailed(reason)


def as_tools(tools: Sequence[Tool | Callable[..., object]]) -> dict[str, Tool]:
    """Return tools by name, with functions as tools; raises UserError if two have the same name."""
    made: dict[str, Tool] = {}
    for one in tools:
        tool = one if isinstance(one, Tool) else Tool(one)
        if tool.name in made:
            raise UserError(f"two tools are named {tool.name}; rename one of them: Tool(function, name=...)")
        made[tool.name] = tool
    return made


def shown(returned: object) -> ToolResult:
    """Return a function's result as shown to the policy: images in RGB and upright, text of bounded length.

    Raises:
        ToolFailed: it cannot be shown.
    """
    if isinstance(returned, ToolResult):
        return ToolResult(text=_text(returned.text), images=tuple(map(_image, returned.images)))
    if isinstance(returned, (Image.Image, ImagePart)):
        return ToolResult(images=(_image(returned),))
    if isinstance(returned, (list, tuple)) and any(isinstance(one, (Image.Image, ImagePart)) for one in returned):
        images = tuple(_image(one) for one in returned if isinstance(one, (Image.Image, ImagePart)))
        texts = [_text(one) for one in returned if not isinstance(one, (Image.Image, ImagePart))]
        return ToolResult(text=_text("\n".join(texts)), images=images)
    return ToolResult(text=_text(returned))


def _text(value: object) -> str:
    if value is None:
        raise ToolFailed("it returned nothing")
    try:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ToolFailed(f"it returned neither text nor an image, but a {type(value).__name__}") from error
    # Files cannot contain half of a surrogate pair.
    text = text.encode("utf-8", "replace").decode("utf-8")
    if len(text) <= _MOST_CHARACTERS:
        return text
    return f"{text[:_MOST_CHARACTERS]}… (truncated; {len(text)} characters in total)"


def _image(value: Image.Image | ImagePart) -> ImagePart:
    part = ImagePart(value) if isinstance(value, Image.Image) else value
    try:
        image = load_image(part, location="a tool's result")
    except UserError as error:
        raise ToolFailed("it returned an image that cannot be read") from error
    if min(image.size) < 1 or is_too_thin(image.size):
        raise ToolFailed(f"it returned an image of {image.width} x {image.height} pixels, which cannot be shown")
    return replace(part, source=image)


_MOST_BYTES = 64 * 2**20


class HttpTool(Tool):
    """A tool whose calls are sent to a service, described by a function that is never run.

    A call is a POST of `{"tool": NAME, "arguments": {...}}`; an argument that is an image is `{"png": BASE64}`. The reply is
    `{"text": ..., "images": [BASE64, ...]}`, either of which may be missing, or `{"error": ...}` with a clause that tells the
    policy what was wrong with its call. A call is sent once and not retried.
    """

    def __init__(
        self, function: Callable[..., object], *, url: str, name: str | None = None, deadline_s: float = DEADLINE_S
    ) -> None:
        """Read the function's signature and docstring; raises UserError if they cannot describe such a tool."""
        super().__init__(function, name=name, deadline_s=deadline_s)
        if not url.startswith(("http://", "https://")):
            raise UserError(f"tool {self.name}: {url!r} is not an address; write http://HOST:PORT/PATH")
        if self.given:
            raise UserError(
                f"tool {self.name}: {', '.join(self.given)} cannot be sent to a service; take images as PIL.Image.Image"
            )
        self.url = url

    async def invoked(self, values: dict[str, object], *, images: EpisodeImages, row: Row) -> ToolResult:
        """Send the call and return the service's result."""
        body = await self.in_thread(lambda: self._body(self.filled(values, images=images, row=row)))
        try:
            # Its own session, because any event loop may call the tool. `call` limits the time.
            async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
                async with session.post(self.url, data=body, headers={"Content-Type": "application/json"}) as response:
                    reply = await _read(response)
        except (aiohttp.ClientError, OSError) as error:
            raise ToolFailed(f"its service cannot be reached ({type(error).__name__})") from error
        if response.status != 200:
            raise ToolFailed(f"its service answered with status {response.status}")
        return await self.in_thread(lambda: _result(reply))

    def _body(self, arguments: Mapping[str, object]) -> bytes:
        defaults = {name: one.schema["default"] for name, one in self.parameters.items() if not one.is_required}
        given = dict(arguments)
        for name, one in arguments.items():
            if isinstance(one, Image.Image):
                one.save(buffer := io.BytesIO(), "PNG")
                given[name] = {"png": base64.b64encode(buffer.getvalue()).decode("ascii")}
        return json.dumps({"tool": self.name, "arguments": defaults | given}).encode()


class _Reply(BaseModel):
    text: str = ""
    images: list[Annotated[bytes, BeforeValidator(decode_base64)]] = []
    error: object = None


async def _read(response: aiohttp.ClientResponse) -> bytes:
    try:
        await response.content.readexactly(_MOST_BYTES + 1)
    except asyncio.IncompleteReadError as error:
        return error.partial
    raise ToolFailed(f"its service answered with more than {_MOST_BYTES} bytes")


def _result(body: bytes) -> ToolResult:
    try:
        reply = _Reply.model_validate_json(body)
    except ValidationError as error:
        raise ToolFailed("its service answered with something other than JSON with text, images or error") from error
    if reply.error is not None:
        raise BadCall(harmless(str(reply.error), most=MOST_SAID))
    if not reply.model_fields_set:
        raise ToolFailed("its service answered without text, images or error")
    return shown(ToolResult(text=reply.text, images=tuple(map(ImagePart, reply.images))))
