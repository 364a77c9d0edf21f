"""A tool that an HTTP service carries out: JSON both ways, images as base64 of PNG files."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable, Mapping
from typing import Any

import aiohttp
from PIL import Image

from lmm_r1.agents.calls import BadCall, harmless
from lmm_r1.agents.tools import DEADLINE_S, EpisodeImages, Tool, ToolFailed, ToolResult, shown
from lmm_r1.data.messages import ImagePart, Row, decode_base64
from lmm_r1.errors import UserError

_MOST_BYTES = 64 * 2**20
_MOST_SAID = 300
_JSON = {"Content-Type": "application/json"}


class HttpTool(Tool):
    """A tool whose calls are sent to a service, described by a function that is never run.

    A call is a POST of `{"tool": NAME, "arguments": {...}}`; an argument that is an image is `{"png": BASE64}`. The reply is
    `{"text": ..., "images": [BASE64, ...]}`, either of which may be missing, or `{"error": ...}` with a clause that tells the
    policy what was wrong with its call. A call is sent once: what fails, fails.
    """

    def __init__(
        self, function: Callable[..., object], *, url: str, name: str | None = None, deadline_s: float = DEADLINE_S
    ) -> None:
        """Read the function's signature and docstring; raises UserError where they cannot describe such a tool."""
        super().__init__(function, name=name, deadline_s=deadline_s)
        if not url.startswith(("http://", "https://")):
            raise UserError(f"tool {self.name}: {url!r} is no address; write http://HOST:PORT/PATH")
        if self.parameters.given:
            raise UserError(
                f"tool {self.name}: {', '.join(self.parameters.given)} cannot be sent to a service; take images as "
                "PIL.Image.Image"
            )
        self.url = url

    async def invoked(self, values: dict[str, object], *, images: EpisodeImages, row: Row) -> ToolResult:
        """Send the call and return what the service shows."""
        body = await self.in_thread(lambda: self._body(self.filled(values, images=images, row=row)))
        try:
            # A session of its own: the tool serves whichever event loop calls it, and none has to close it.
            # Its time is bounded by `call`.
            timeout = aiohttp.ClientTimeout(total=None)
            async with aiohttp.ClientSession(timeout=timeout) as session:
                async with session.post(self.url, data=body, headers=_JSON) as response:
                    reply = await _read(response)
                    status = response.status
        except (aiohttp.ClientError, OSError) as error:
            raise ToolFailed(f"its service cannot be reached ({type(error).__name__})") from error
        if status != 200:
            raise ToolFailed(f"its service answered with status {status}")
        return await self.in_thread(lambda: _result(reply))

    def _body(self, arguments: Mapping[str, object]) -> bytes:
        own = self.parameters.own.items()
        defaults = {name: one.schema["default"] for name, one in own if not one.is_required}
        given = {name: _png(one) if isinstance(one, Image.Image) else one for name, one in arguments.items()}
        return json.dumps({"tool": self.name, "arguments": defaults | given}).encode()


async def _read(response: aiohttp.ClientResponse) -> bytes:
    received = bytearray()
    async for piece in response.content.iter_any():
        received += piece
        if len(received) > _MOST_BYTES:
            raise ToolFailed(f"its service answered with more than {_MOST_BYTES} bytes")
    return bytes(received)


def _png(image: Image.Image) -> dict[str, str]:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return {"png": base64.b64encode(buffer.getvalue()).decode("ascii")}


def _result(reply: bytes) -> ToolResult:
    try:
        read: Any = json.loads(reply)
    except (ValueError, RecursionError) as error:
        raise ToolFailed("its service answered with something else than JSON") from error
    if not isinstance(read, dict) or not read.keys() & {"text", "images", "error"}:
        raise ToolFailed("its service answered without text, images or error")
    if "error" in read:
        raise BadCall(harmless(str(read["error"]), most=_MOST_SAID))
    text, images = read.get("text", ""), read.get("images", [])
    if not isinstance(text, str) or not isinstance(images, list) or not all(isinstance(one, str) for one in images):
        raise ToolFailed("its service answered with text or images of another type than it should")
    try:
        parts = tuple(ImagePart(decode_base64(one)) for one in images)
    except ValueError as error:
        raise ToolFailed("its service answered with an image that is not base64") from error
    return shown(ToolResult(text=text, images=parts))
