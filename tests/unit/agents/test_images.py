import pytest
from helpers.episodes import coordinates_image, image_row

from lmm_r1.agents.calls import BadCall
from lmm_r1.agents.tools import EpisodeImages, PixelBounds
from lmm_r1.data.messages import ImagePart

BOUNDS = PixelBounds(min_pixels=100, max_pixels=20_000, side_multiple=28)


def test_an_only_image_has_the_bare_name_and_its_number():
    images = EpisodeImages(image_row(coordinates_image(2, 2)), bounds=BOUNDS)
    assert images.names == ("original_image",)
    assert [images.known(name) for name in ("original_image", "Original image ", "original_image_1")] == [
        "original_image"
    ] * 3


def test_several_images_have_numbers_and_the_bare_name_is_refused():
    images = EpisodeImages(image_row(coordinates_image(2, 2), coordinates_image(3, 2)), bounds=BOUNDS)
    assert [images.load(f"original_image_{number}").size for number in (1, 2)] == [(2, 2), (3, 2)]
    with pytest.raises(
        BadCall, match="^there is no image 'original_image'; the images are: original_image_1, original_im"
    ):
        images.known("original_image")


def test_observations_are_numbered_as_they_are_added():
    images = EpisodeImages(image_row(coordinates_image(2, 2)), bounds=BOUNDS)
    assert [images.add(ImagePart(coordinates_image(1, side))) for side in (3, 4)] == ["observation_1", "observation_2"]
    assert images.load("observation_2").size == (1, 4)
    assert images.names == ("original_image", "observation_1", "observation_2")


def test_a_row_without_images_has_none():
    images = EpisodeImages(image_row(), bounds=BOUNDS)
    with pytest.raises(BadCall, match="^there is no image 'original_image'; the images are: none$"):
        images.load("original_image")


def test_an_image_is_read_once_and_only_when_asked_for(tmp_path):
    path = tmp_path / "a.png"
    images = EpisodeImages(image_row(ImagePart(str(path))), bounds=BOUNDS)
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
    assert BOUNDS.shown_size(ImagePart("a.png", **part), size=(400, 200)) == expected


def test_bounds_never_cross():
    low = BOUNDS.of(ImagePart("a.png", max_pixels=50))
    assert (low.min_pixels, low.max_pixels) == (50, 50)
    high = BOUNDS.of(ImagePart("a.png", min_pixels=30_000))
    assert (high.min_pixels, high.max_pixels) == (30_000, 30_000)
