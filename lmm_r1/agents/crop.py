"""Looking closer as tools: `crop` cuts a box out of an image, `zoom` a square around a point, in full resolution."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Literal, get_args

from PIL import Image
from pydantic import Field

from lmm_r1.agents.calls import CROP, BadCall, quoted
from lmm_r1.agents.images import MOST_ASPECT, EpisodeImages, is_too_thin
from lmm_r1.agents.tools import Tool, ToolResult
from lmm_r1.data.sample import Cut, CutImage
from lmm_r1.errors import UserError

Coordinates = Literal["relative", "thousandths", "absolute"]
"""What an image's right and lower edge have as coordinates: 1.0, or 1000, or its width and height as it is shown."""
UNITS: dict[Coordinates, str] = {
    "relative": "as fractions of the image's width and height, from 0.0 to 1.0",
    "thousandths": "in thousandths of the image's width and height, from 0 to 1000",
    "absolute": "in pixels of the image as it is shown",
}
ZOOM_SIDE = 400
_SOURCE = (
    "The image to look at: original_image, or observation_1, observation_2 and so on. Of several original images: "
)
_SOURCE += "original_image_1, original_image_2 and so on."
# Products such as 0.29 * 100 miss a whole number by rounding; no image is so large that this hides a part of a pixel.
_DIGITS = 6


def box_in_pixels(
    box: Sequence[float], *, limits: tuple[float, float], size: tuple[int, int]
) -> tuple[int, int, int, int]:
    """Return left, upper, right, lower of the pixels that a box touches, right and lower being outside.

    Args:
        box: x0, y0, x1, y1: its top-left and its bottom-right corner.
        limits: the coordinates of the image's bottom-right corner.
        size: the image's width and height.

    Raises:
        BadCall: it reaches out of the image, is swapped, empty or too thin.
    """
    x0, y0, x1, y1 = box
    said = f"bbox_2d {quoted(list(box))}"
    _check_inside((x0, x1), (y0, y1), limits=limits, said=said)
    for axis, low, high in (("x", x0, x1), ("y", y0, y1)):
        if low > high:
            raise BadCall(
                f"{said} has swapped corners: {axis}0 is larger than {axis}1; write the top-left corner first, then the "
                "bottom-right one"
            )
        if low == high:
            raise BadCall(f"{said} is empty: {axis}0 and {axis}1 are equal")
    left, right = _span(x0, x1, limit=limits[0], pixels=size[0])
    upper, lower = _span(y0, y1, limit=limits[1], pixels=size[1])
    _check_thin((right - left, lower - upper), said=said)
    return left, upper, right, lower


def crop_tool(*, coordinates: Coordinates = "relative") -> Tool:
    """Return the tool `crop`; raises UserError for coordinates that are none."""
    unit = _unit(coordinates)

    def crop(
        bbox_2d: Annotated[list[float], Field(min_length=4, max_length=4)], source: str, images: EpisodeImages
    ) -> ToolResult:
        """Cut a part out of an image, to see it larger."""
        source = images.known(source)
        image = images.load(source)
        limits = _limits(images, source, coordinates=coordinates)
        box = box_in_pixels(bbox_2d, limits=limits, size=image.size)
        return _part(image, Cut(picture=images.number(source), name=source, box=box, size=image.size))

    described = f"The part's top-left and bottom-right corner as [x0, y0, x1, y1], {unit}."
    return Tool(crop, name=CROP, descriptions={"bbox_2d": described, "source": _SOURCE})


def zoom_tool(*, coordinates: Coordinates = "relative", side: int = ZOOM_SIDE) -> Tool:
    """Return the tool `zoom`, which shows the surroundings of a point as large as the whole image was.

    Args:
        side: width and height of what is cut out, in pixels of the full resolution. Near an edge it is moved inside; an image
            with a smaller side is cut in the other direction only.

    Raises:
        UserError: for coordinates, or a side, that are none.
    """
    unit = _unit(coordinates)
    if side < 1:
        raise UserError(f"zoom: side must be at least 1 pixel, not {side}")

    def zoom(
        keypoint: Annotated[list[float], Field(min_length=2, max_length=2)],
        images: EpisodeImages,
        source: str = "original_image",
    ) -> ToolResult:
        """Show the surroundings of a point of an image larger."""
        source = images.known(source)
        image = images.load(source)
        limits = _limits(images, source, coordinates=coordinates)
        said = f"keypoint {quoted(keypoint)}"
        _check_inside(keypoint[:1], keypoint[1:], limits=limits, said=said)
        left, width = _window(keypoint[0] / limits[0], side=side, pixels=image.width)
        upper, height = _window(keypoint[1] / limits[1], side=side, pixels=image.height)
        _check_thin((width, height), said=said)
        scale = max(1.0, max(images.shown_size(source)) / max(width, height))
        wanted = max(int(width * height * scale**2), images.bounds.min_pixels)
        cut = Cut(
            picture=images.number(source),
            name=source,
            box=(left, upper, left + width, upper + height),
            size=image.size,
            keypoint=(keypoint[0] / limits[0] * image.width, keypoint[1] / limits[1] * image.height),
        )
        return _part(image, cut, min_pixels=min(wanted, images.bounds.max_pixels))

    point = f"The point to look at as [x, y], {unit}."
    return Tool(zoom, descriptions={"keypoint": point, "source": _SOURCE})


def _unit(coordinates: Coordinates) -> str:
    if coordinates not in UNITS:
        raise UserError(f"coordinates {coordinates!r} is none of {', '.join(get_args(Coordinates))}")
    return UNITS[coordinates]


def _limits(images: EpisodeImages, source: str, *, coordinates: Coordinates) -> tuple[float, float]:
    if coordinates == "absolute":
        return images.shown_size(source)
    return (1.0, 1.0) if coordinates == "relative" else (1000.0, 1000.0)


def _check_inside(xs: Sequence[float], ys: Sequence[float], *, limits: tuple[float, float], said: str) -> None:
    for axis, values, limit in (("x", xs, limits[0]), ("y", ys, limits[1])):
        if min(values) < 0 or max(values) > limit:
            raise BadCall(f"{said} reaches out of the image: {axis} must lie between 0 and {limit:g}")


def _check_thin(size: tuple[int, int], *, said: str) -> None:
    if is_too_thin(size):
        raise BadCall(
            f"{said} is too thin: it has {size[0]} x {size[1]} pixels, and the longer side may be at most {MOST_ASPECT} "
            "times the shorter one"
        )


def _span(low: float, high: float, *, limit: float, pixels: int) -> tuple[int, int]:
    """Return the first pixel that an interval touches, and the one behind the last; at least one pixel lies between."""
    first = min(math.floor(round(low / limit * pixels, _DIGITS)), pixels - 1)
    return first, min(max(math.ceil(round(high / limit * pixels, _DIGITS)), first + 1), pixels)


def _window(center: float, *, side: int, pixels: int) -> tuple[int, int]:
    """Return the first pixel of a window and its width; it is moved inside."""
    width = min(side, pixels)
    return min(max(round(center * pixels - width / 2), 0), pixels - width), width


def _part(image: Image.Image, cut: Cut, *, min_pixels: int | None = None) -> ToolResult:
    left, upper, right, lower = cut.box
    return ToolResult(
        text=f"A part of {cut.name}, cut from {right - left} x {lower - upper} pixels of its full resolution.",
        images=(CutImage(image.crop(cut.box), min_pixels=min_pixels, cut=cut),),
    )
