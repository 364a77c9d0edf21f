"""Tools that are HTTP services: what is sent, what is taken from the reply, and services that misbehave."""

import asyncio
import base64
import io
import json

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from helpers.episodes import coordinates_image, image_row
from PIL import Image

from lmm_r1.agents import tools
from lmm_r1.agents.calls import BadCall
from lmm_r1.agents.tools import EpisodeImages, HttpTool, PixelBounds, ToolFailed
from lmm_r1.errors import UserError

ROW = image_row(coordinates_image(6, 4))
BOUNDS = PixelBounds(min_pixels=1, max_pixels=10**6, side_multiple=1)


def detect(image: Image.Image, label: str, least: float = 0.5) -> list[Image.Image]:
    """Find objects in an image."""
    raise AssertionError("it only describes the tool")


async def turned(request: web.Request) -> web.Response:
    """Turn the image by 180 degrees and say what was asked."""
    sent = await request.json()
    image = Image.open(io.BytesIO(base64.b64decode(sent["arguments"].pop("image")["png"])))
    buffer = io.BytesIO()
    image.rotate(180).save(buffer, "PNG")
    return web.json_response({"text": json.dumps(sent), "images": [base64.b64encode(buffer.getvalue()).decode()]})


async def called(handler, *, deadline_s=10.0, **arguments):
    app = web.Application()
    app.router.add_post("/tool", handler)
    async with TestServer(app) as server:
        tool = HttpTool(detect, url=str(server.make_url("/tool")), deadline_s=deadline_s)
        return await tool.call(arguments, images=EpisodeImages(ROW, bounds=BOUNDS), row=ROW)


def call(handler, **options):
    return asyncio.run(called(handler, **{"image": "original_image", "label": "sign"} | options))


def test_arguments_and_images_travel_both_ways():
    result = call(turned)
    assert json.loads(result.text) == {"tool": "detect", "arguments": {"label": "sign", "least": 0.5}}
    (part,) = result.images
    assert part.source.size == (6, 4)
    # The last pixel of the original.
    assert part.source.getpixel((0, 0)) == (5, 3, 7)


def answering(text, status=200):
    async def handler(request):
        return web.Response(text=text, status=status)

    return handler


NOT_A_REPLY = "its service answered with something other than JSON with text, images or error"


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        ("not json", NOT_A_REPLY),
        ("[" * 100_000, NOT_A_REPLY),
        ("[1]", NOT_A_REPLY),
        ("{}", "its service answered without text, images or error"),
        ('{"text": 3}', NOT_A_REPLY),
        ('{"images": "abc"}', NOT_A_REPLY),
        ('{"images": ["%%%"]}', NOT_A_REPLY),
        ('{"images": ["AAAA"]}', "it returned an image that cannot be read"),
    ],
)
def test_rubbish_of_a_service_is_a_failure_of_the_tool(reply, said):
    with pytest.raises(ToolFailed) as raised:
        call(answering(reply))
    assert str(raised.value) == said


def test_a_service_can_say_what_was_wrong_with_a_call():
    with pytest.raises(BadCall, match=r"^there is no \?\?label\?\?$"):
        call(answering('{"error": "there is no <|label|>"}'))


def test_an_endless_reply_is_not_read_to_its_end(monkeypatch):
    monkeypatch.setattr(tools, "_MOST_BYTES", 1000)
    with pytest.raises(ToolFailed, match="^its service answered with more than 1000 bytes$"):
        call(answering(json.dumps({"text": "x" * 2000})))


def test_a_service_that_hangs_costs_its_deadline():
    async def hang(request):
        await asyncio.sleep(1.0)
        return web.Response()

    with pytest.raises(ToolFailed, match="^it did not answer within 0.2 seconds$"):
        call(hang, deadline_s=0.2)


def test_a_service_that_dies_is_a_failure_of_the_tool():
    async def die(request):
        request.transport.abort()
        return web.Response()

    with pytest.raises(ToolFailed, match="^its service cannot be reached"):
        call(die)


def test_what_cannot_describe_a_service_is_refused():
    def look(images: EpisodeImages) -> str:
        """Look."""
        return ""

    with pytest.raises(UserError, match="tool detect: 'localhost:80' is not an address"):
        HttpTool(detect, url="localhost:80")
    with pytest.raises(UserError, match="tool look: images cannot be sent to a service"):
        HttpTool(look, url="http://127.0.0.1:1")
