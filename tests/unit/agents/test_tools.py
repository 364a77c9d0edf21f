"""Functions as tools: their schema, the check of arguments, what they return, what misbehaves; and the images of an episode."""

import asyncio
import threading
import time
from typing import Literal, Optional

import pytest
from helpers.episodes import coordinates_image, image_row
from PIL import Image

from lmm_r1.agents.calls import BadCall
from lmm_r1.agents.tools import EpisodeImages, PixelBounds, Tool, ToolFailed, ToolResult
from lmm_r1.data.messages import ImagePart
from lmm_r1.errors import UserError

ROW = image_row(coordinates_image(8, 4))
BOUNDS = PixelBounds(min_pixels=1, max_pixels=10**6, side_multiple=1)


def search(
    words: str,
    most: int = 3,
    near: Optional[float] = None,  # noqa: UP045  (a user's file may say it so)
    boxes: list[list[float]] | None = None,
    order: Literal["best", "newest"] = "best",
    exact: bool = False,
) -> str:
    """Search the web.

    Only the titles are shown.

    Args:
        words: What to look for.
        most: How many
            results to show.
    """
    return f"{words} {most!r} {near!r} {boxes!r} {order} {exact!r}"


def flip(image: Image.Image, upside_down: bool = False) -> Image.Image:
    """Mirror an image."""
    return image.transpose(Image.Transpose.FLIP_TOP_BOTTOM if upside_down else Image.Transpose.FLIP_LEFT_RIGHT)


def call(tool, row=ROW, images=None, **arguments):
    images = images or EpisodeImages(row, bounds=BOUNDS)
    return asyncio.run(tool.call(arguments, images=images, row=row))


def test_the_schema_is_read_off_the_signature_and_the_docstring():
    assert Tool(search).schema == {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Search the web.\n\nOnly the titles are shown.",
            "parameters": {
                "type": "object",
                "properties": {
                    "words": {"type": "string", "description": "What to look for."},
                    "most": {"type": "integer", "description": "How many results to show.", "default": 3},
                    "near": {"anyOf": [{"type": "number"}, {"type": "null"}], "default": None},
                    "boxes": {
                        "anyOf": [
                            {"type": "array", "items": {"type": "array", "items": {"type": "number"}}},
                            {"type": "null"},
                        ],
                        "default": None,
                    },
                    "order": {"type": "string", "enum": ["best", "newest"], "default": "best"},
                    "exact": {"type": "boolean", "default": False},
                },
                "required": ["words"],
            },
        },
    }


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"words": "a"}, "a 3 None None best False"),
        ({"words": "a", "most": "5", "near": "0.5", "exact": "true"}, "a 5 0.5 None best True"),
        ({"words": "a", "most": 5.0, "boxes": [[1, "2"]], "order": "newest"}, "a 5 None [[1.0, 2.0]] newest False"),
        ({"words": "a", "near": None}, "a 3 None None best False"),
    ],
)
def test_arguments_are_converted_where_that_loses_nothing(arguments, text):
    assert call(Tool(search), **arguments) == ToolResult(text=text)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({}, "words is missing; search takes words, most, near, boxes, order, exact"),
        ({"words": "a", "word": "a"}, "no argument 'word'; search takes words, most, near, boxes, order, exact"),
        ({"words": 3}, "words is wrong: should be a valid string; it is 3"),
        ({"words": "a", "most": "many"}, "most is wrong: should be a valid integer"),
        ({"words": "a", "most": 2.5}, "got a number with a fractional part; it is 2.5"),
        ({"words": "a", "near": float("nan")}, "near is wrong: should be a finite number; it is NaN"),
        ({"words": "a", "boxes": [[1.0], [float("inf")]]}, "boxes[1][0] is wrong: should be a finite number"),
        ({"words": "a", "boxes": 1}, "boxes is wrong: should be a valid list; it is 1"),
        ({"words": "a", "order": "<|x|>"}, "order is wrong: should be 'best' or 'newest'; it is '??x??'"),
    ],
)
def test_wrong_arguments_are_refused_with_what_is_wrong(arguments, said):
    with pytest.raises(BadCall) as raised:
        call(Tool(search), **arguments)
    assert said in str(raised.value)


def test_an_image_comes_back_in_rgb_and_upright():
    result = call(Tool(flip), image="original_image")
    (part,) = result.images
    assert (part.source.mode, part.source.size) == ("RGB", (8, 4))
    assert part.source.getpixel((0, 1)) == (7, 1, 7)


@pytest.mark.parametrize(
    ("returned", "text", "sizes"),
    [
        (4, "4", []),
        ({"a": [1, "é"]}, '{"a": [1, "é"]}', []),
        (["x", 2], '["x", 2]', []),
        (["seen:", Image.new("L", (2, 3)), 5], "seen:\n5", [(2, 3)]),
        (Image.new("RGBA", (2, 3)), "", [(2, 3)]),
        (
            ToolResult(text="two", images=(ImagePart(Image.new("1", (2, 3))), Image.new("P", (3, 2)))),
            "two",
            [(2, 3), (3, 2)],
        ),
        ("x" * 9000, "x" * 8000 + "… (truncated; 9000 characters in total)", []),
        ("half \ud83d", "half ?", []),
        ("", "", []),
    ],
)
def test_what_can_be_returned(returned, text, sizes):
    def show() -> object:
        """Show something."""
        return returned

    result = call(Tool(show))
    assert result.text == text
    assert [(part.source.mode, part.source.size) for part in result.images] == [("RGB", size) for size in sizes]


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (None, "it returned nothing"),
        (object(), "it returned neither text nor an image, but a object"),
        (b"bytes", "it returned neither text nor an image, but a bytes"),
        (Image.new("RGB", (300, 2)), "it returned an image of 300 x 2 pixels, which cannot be shown"),
        (ImagePart("/nowhere/a.png"), "it returned an image that cannot be read"),
        ([Image.new("RGB", (2, 2)), object()], "it returned neither text nor an image, but a object"),
    ],
)
def test_rubbish_is_told_to_the_policy(returned, said):
    def show() -> object:
        """Show something."""
        return returned

    with pytest.raises(ToolFailed) as raised:
        call(Tool(show))
    assert str(raised.value) == said


@pytest.mark.parametrize("kind", ["plain", "async"])
@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("no <|such|> thing"), r"it raised ValueError: no \?\?such\?\? thing"),
        (KeyError(), r"it raised KeyError"),
        (SystemExit(3), r"it raised RuntimeError: SystemExit: 3"),
        (StopIteration(), "it raised .*"),
        (TimeoutError("a server"), r"it raised TimeoutError: a server"),
        (asyncio.CancelledError(), "it raised .*"),
        (RecursionError("deep"), r"it raised RecursionError: deep"),
    ],
)
def test_a_tool_that_raises_has_failed_and_nothing_else_has(kind, error, said):
    def plain() -> str:
        """Raise."""
        raise error

    async def waiting() -> str:
        """Raise."""
        raise error

    with pytest.raises(ToolFailed, match=f"^{said}$"):
        call(Tool(plain if kind == "plain" else waiting))


def test_a_tool_that_hangs_costs_its_own_deadline_only():
    go_on = threading.Event()

    def hang() -> str:
        """Hang in a thread."""
        go_on.wait(60)
        return "late"

    async def sleep() -> str:
        """Hang, and go on when cancelled."""
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            await asyncio.sleep(3)
        return "late"

    async def quick() -> str:
        """Be quick."""
        return "quick"

    async def all_of_them() -> tuple[list[object], float]:
        images = EpisodeImages(ROW, bounds=BOUNDS)
        tools = [Tool(hang, deadline_s=0.2), Tool(sleep, deadline_s=0.2), Tool(quick)]
        before = time.monotonic()
        outcomes = await asyncio.gather(
            *(one.call({}, images=images, row=ROW) for one in tools), return_exceptions=True
        )
        return outcomes, time.monotonic() - before

    (hung, slept, was_quick), seconds = asyncio.run(all_of_them())
    assert 0.2 <= seconds < 2
    go_on.set()
    assert was_quick == ToolResult(text="quick")
    assert [str(hung), str(slept)] == ["it did not answer within 0.2 seconds"] * 2
    assert isinstance(hung, ToolFailed)


def test_an_image_of_the_row_that_cannot_be_read_is_no_fault_of_the_tool(tmp_path):
    missing = image_row(ImagePart(str(tmp_path / "none.png")))
    with pytest.raises(UserError, match="rows.jsonl, line 1: no image file"):
        call(Tool(flip), row=missing, image="original_image")


def without_type(number) -> str:
    """Show."""
    return ""


def without_docstring(number: int) -> str:
    return ""


def with_many(*numbers: int) -> str:
    """Show."""
    return ""


def with_bytes(data: threading.Event) -> str:
    """Show."""
    return ""


def with_default(number: float = float("inf")) -> str:
    """Show."""
    return ""


def unresolved(number: "Nothing") -> str:  # noqa: F821
    """Show."""
    return ""


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (without_type, "tool without_type: parameter number has no type; annotate it"),
        (without_docstring, "tool without_docstring: it has no docstring"),
        (with_many, "tool with_many: parameter numbers has no name in a call"),
        (with_bytes, "tool with_bytes: parameter data: a call cannot contain <class 'threading.Event'>; use str, int"),
        (with_default, "tool with_default: its signature and docstring make no JSON schema .ValueError: Out of range"),
        (unresolved, "tool unresolved: its signature and docstring make no JSON schema .NameError: name .Nothing"),
        (lambda: "x", "tool '<lambda>': a name has only letters, digits, _ and -"),
    ],
)
def test_a_function_that_cannot_be_a_tool_is_refused(function, said):
    with pytest.raises(UserError, match=said):
        Tool(function)


SHOWN_BOUNDS = PixelBounds(min_pixels=100, max_pixels=20_000, side_multiple=28)


def test_an_image_is_read_once_and_only_when_asked_for(tmp_path):
    path = tmp_path / "a.png"
    images = EpisodeImages(image_row(ImagePart(str(path))), bounds=SHOWN_BOUNDS)
    coordinates_image(5, 3).save(path)
    first = images.load("original_image")
    path.unlink()
    assert first.size == (5, 3)
    assert images.load("original_image") is first


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        # sqrt(20,000 / 80,000) = 1/2, and 200 x 100 rounded down to multiples of 28.
        ({}, (196, 84)),
        ({"max_pixels": 5_000}, (84, 28)),
        # A bound of the image itself moves the environment's other one.
        ({"min_pixels": 80_000}, (336, 224)),
        ({"max_pixels": 50}, (28, 28)),
    ],
)
def test_the_size_that_an_image_is_shown_with(part, expected):
    assert SHOWN_BOUNDS.shown_size(ImagePart("a.png", **part), size=(400, 200)) == expected
