"""What `crop` and `zoom` cut out, by hand: the pixel at x, y of a picture is (x, y, 7)."""

import asyncio
import io

import pytest
from helpers.episodes import coordinates_image, image_row
from PIL import Image

from lmm_r1.agents.calls import BadCall
from lmm_r1.agents.tool_environment import crop_tool, zoom_tool
from lmm_r1.agents.tools import EpisodeImages, PixelBounds
from lmm_r1.data.messages import ImagePart
from lmm_r1.data.sample import Cut

BOUNDS = PixelBounds(min_pixels=1, max_pixels=20_000, side_multiple=1)


def episode(*images):
    return EpisodeImages(image_row(*images), bounds=BOUNDS)


def cut(images, tool=None, **arguments):
    """The part that a call shows."""
    tool = tool or crop_tool()
    called = tool.call({"source": "original_image"} | arguments, images=images, row=image_row())
    (part,) = asyncio.run(called).images
    return part


def corners(part):
    """The size of a part, its first and its last pixel."""
    image = part.source
    return image.size, image.getpixel((0, 0)), image.getpixel((image.width - 1, image.height - 1))


@pytest.mark.parametrize(
    ("size", "box", "expected"),
    [
        # Landscape: x 10 to 50 of 100, y 10 to 30 of 50.
        ((100, 50), [0.1, 0.2, 0.5, 0.6], ((40, 20), (10, 10, 7), (49, 29, 7))),
        # Portrait: x 10 to 30 of 40, y 60 to 90 of 120.
        ((40, 120), [0.25, 0.5, 0.75, 0.75], ((20, 30), (10, 60, 7), (29, 89, 7))),
        # A pixel that a box touches belongs to it: x 1.5 to 2.5 of 10 is 1 to 3.
        ((10, 10), [0.15, 0, 0.25, 1], ((2, 10), (1, 0, 7), (2, 9, 7))),
        # 0.29 * 100 is 28.999999999999996, and 0.55 * 100 is 55.00000000000001.
        ((100, 100), [0.29, 0.29, 0.55, 0.55], ((26, 26), (29, 29, 7), (54, 54, 7))),
        ((1, 1), [0.2, 0.2, 0.3, 0.3], ((1, 1), (0, 0, 7), (0, 0, 7))),
        ((1, 1), [0, 0, 1, 1], ((1, 1), (0, 0, 7), (0, 0, 7))),
        ((10, 10), [1 - 1e-9, 0.5, 1, 0.6], ((1, 1), (9, 5, 7), (9, 5, 7))),
        ((10, 10), [0, 0, 1e-9, 1e-9], ((1, 1), (0, 0, 7), (0, 0, 7))),
    ],
)
def test_relative_boxes(size, box, expected):
    assert corners(cut(episode(coordinates_image(*size)), bbox_2d=box)) == expected


def test_a_part_says_where_it_was_cut_out():
    images = episode(coordinates_image(60, 60), coordinates_image(100, 50))
    part = cut(images, source="original_image_2", bbox_2d=[0.1, 0.2, 0.5, 0.6])
    assert part.cut == Cut(picture=1, name="original_image_2", box=(10, 10, 50, 30), size=(100, 50))
    images.add(part)
    again = cut(images, source=" Observation 1", bbox_2d=[0, 0.5, 0.25, 1])
    assert again.cut == Cut(picture=2, name="observation_1", box=(0, 10, 10, 20), size=(40, 20))


def test_boxes_in_thousandths():
    part = cut(episode(coordinates_image(40, 40)), crop_tool(coordinates="thousandths"), bbox_2d=[250, 500, 750, 1000])
    assert corners(part) == ((20, 20), (10, 20, 7), (29, 39, 7))


def test_absolute_boxes_are_of_the_image_as_it_is_shown():
    # 240 x 120 within 7,200 pixels is shown with 120 x 60: half of its size.
    images = EpisodeImages(
        image_row(coordinates_image(240, 120)), bounds=PixelBounds(min_pixels=1, max_pixels=7_200, side_multiple=1)
    )
    tool = crop_tool(coordinates="absolute")
    assert corners(cut(images, tool, bbox_2d=[50, 25, 100, 50])) == ((100, 50), (100, 50, 7), (199, 99, 7))
    with pytest.raises(BadCall, match="extends beyond the image: x must lie between 0 and 120$"):
        cut(images, tool, bbox_2d=[50, 25, 121, 50])


def test_a_part_of_a_part_has_the_full_resolution():
    images = episode(coordinates_image(200, 200))
    first = cut(images, bbox_2d=[0.1, 0.1, 0.6, 0.6])
    assert corners(first) == ((100, 100), (20, 20, 7), (119, 119, 7))
    # However small it is shown.
    name = images.add(ImagePart(first.source, max_pixels=100))
    second = cut(images, bbox_2d=[0.25, 0.5, 0.5, 0.75], source=name)
    assert corners(second) == ((25, 25), (45, 70, 7), (69, 94, 7))


def test_a_box_is_of_the_upright_image():
    stored, exif = coordinates_image(100, 50), Image.Exif()
    exif[274] = 6  # to be turned clockwise: the pixel at x, y of the upright image is stored at y, 49 - x
    buffer = io.BytesIO()
    stored.save(buffer, "PNG", exif=exif)
    part = cut(episode(ImagePart(buffer.getvalue())), bbox_2d=[0.2, 0.1, 0.4, 0.3])
    assert corners(part) == ((10, 20), (10, 39, 7), (29, 30, 7))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"bbox_2d": [0.5, 0.2, 0.1, 0.6]}, "x0 is larger than x1"),
        ({"bbox_2d": [0.1, 0.6, 0.5, 0.2]}, "y0 is larger than y1"),
        ({"bbox_2d": [0.1, 0.2, 0.1, 0.6]}, "x0 and x1 are equal"),
        ({"bbox_2d": [-0.1, 0.2, 0.5, 0.6]}, "x must lie between 0 and 1"),
        ({"bbox_2d": [10, 0.2, 0.5, 0.6]}, "x must lie between 0 and 1"),
        ({"bbox_2d": [0.1, 0.2, 0.5, 60]}, "y must lie between 0 and 1"),
        ({"bbox_2d": [0, 0.5, 1, 0.501]}, "300 x 1 pixels, and the longer side may be at most 100 times"),
        ({"bbox_2d": [0.1, 0.2, 0.5]}, "at least 4 items, not 3"),
        ({"bbox_2d": [0.1, float("nan"), 0.5, 1]}, "[1] is wrong: should be a finite number; it is NaN"),
        ({"source": 1}, "is missing; crop takes bbox_2d, source"),
        ({"bbox_2d": [0, 0, 1, 1], "source": "observation_1"}, "the images are: original_image"),
    ],
)
def test_a_wrong_box_is_refused_with_what_is_wrong(arguments, said):
    with pytest.raises(BadCall) as raised:
        cut(episode(coordinates_image(300, 200)), **arguments)
    assert said in str(raised.value)


@pytest.mark.parametrize(
    ("keypoint", "expected"),
    [
        ([0.5, 0.5], ((40, 40), (80, 30, 7), (119, 69, 7))),
        # Moved inside at the edges.
        ([0.0, 0.0], ((40, 40), (0, 0, 7), (39, 39, 7))),
        ([1.0, 0.95], ((40, 40), (160, 60, 7), (199, 99, 7))),
    ],
)
def test_zoom_shows_the_surroundings_of_a_point(keypoint, expected):
    assert corners(cut(episode(coordinates_image(200, 100)), zoom_tool(side=40), keypoint=keypoint)) == expected


@pytest.mark.parametrize(
    ("box", "rounding", "expected"),
    [
        # x -10 to 60 of 100 is 0 to 60; y 40 to 75 of 50 is 40 to 50.
        ([-0.1, 0.8, 0.6, 1.5], "touched", ((60, 10), (0, 40, 7), (59, 49, 7))),
        # x 10.5 to 21.5 of 100 and y 2.5 to 7.5 of 50: down, and halves to the even number.
        ([0.105, 0.05, 0.215, 0.15], "touched", ((12, 6), (10, 2, 7), (21, 7, 7))),
        ([0.105, 0.05, 0.215, 0.15], "down", ((11, 5), (10, 2, 7), (20, 6, 7))),
        ([0.105, 0.05, 0.215, 0.15], "even", ((12, 6), (10, 2, 7), (21, 7, 7))),
        ([0.115, 0.07, 0.205, 0.13], "even", ((8, 2), (12, 4, 7), (19, 5, 7))),
    ],
)
def test_a_box_is_clamped_and_rounded_as_the_options_say(box, rounding, expected):
    tool = crop_tool(edges="clamp", rounding=rounding)
    assert corners(cut(episode(coordinates_image(100, 50)), tool, bbox_2d=box)) == expected
