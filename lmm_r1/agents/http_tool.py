"""A tool that an HTTP service executes: JSON both ways, images as base64 of PNG files."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from collections.abc import Callable, Mapping
from typing import Annotated

import aiohttp
from PIL import Image
from pydantic import BaseModel, BeforeValidator, ValidationError

from lmm_r1.agents.calls import MOST_SAID, BadCall, harmless
from lmm_r1.agents.tools import DEADLINE_S, EpisodeImages, Tool, ToolFailed, ToolResult, shown
from lmm_r1.data.messages import ImagePart, Row, decode_base64
from lmm_r1.errors import UserError

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
