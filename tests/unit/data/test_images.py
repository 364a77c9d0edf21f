import base64
import functools
import io
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
from PIL import ExifTags, Image, ImageFile

from lmm_r1.data.images import check_image_exists, image_size, load_image
from lmm_r1.data.messages import ImagePart
from lmm_r1.errors import UserError

pytestmark = pytest.mark.unit

LOCATION = "rows.jsonl line 7"


def encoded(image, *, kind="PNG", **options):
    buffer = io.BytesIO()
    image.save(buffer, format=kind, **options)
    return buffer.getvalue()


def load(source):
    return load_image(ImagePart(source), location=LOCATION)


@pytest.fixture
def picture():
    """2 x 3 pixels, every one of another colour."""
    return Image.fromarray(np.arange(18, dtype=np.uint8).reshape(3, 2, 3) * 10)


@pytest.fixture
def web(tmp_path, monkeypatch: pytest.MonkeyPatch):
    """The address of a server of `tmp_path`."""
    monkeypatch.setenv("LMM_R1_ALLOW_PRIVATE_URLS", "1")
    handler = functools.partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize("form", ["path", "file", "http", "data", "base64", "wrapped", "bytes", "pil"])
def test_every_source_form_gives_the_same_rgb_pixels(form, picture, tmp_path, web):
    data = encoded(picture)
    (tmp_path / "a.png").write_bytes(data)
    text = base64.b64encode(data).decode()
    source = {
        "path": str(tmp_path / "a.png"),
        "file": f"file://{tmp_path}/a.png",
        "http": f"{web}/a.png",
        "data": f"data:image/png;base64,{text}",
        "base64": text,
        "wrapped": "\n".join(text[start : start + 76] for start in range(0, len(text), 76)),
        "bytes": data,
        "pil": picture,
    }[form]
    image = load(source)
    assert image.mode == "RGB"
    assert np.array_equal(np.asarray(image), np.arange(18).reshape(3, 2, 3) * 10)


def test_the_loaded_image_is_not_the_one_the_row_holds(picture):
    load(picture).putpixel((0, 0), (255, 255, 255))
    assert picture.getpixel((0, 0)) == (0, 10, 20)


def test_exif_orientation_is_applied():
    # Orientation 6: the camera lay on its side; the upright image is the stored one turned 90 degrees clockwise.
    stored = Image.new("RGB", (2, 1), "red")
    stored.putpixel((1, 0), (0, 0, 255))
    exif = Image.Exif()
    exif[0x0112] = 6
    image = load(encoded(stored, exif=exif))
    assert image.size == (1, 2)
    assert [image.getpixel((0, 0)), image.getpixel((0, 1))] == [(255, 0, 0), (0, 0, 255)]


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_transparent_pixels_become_white(mode):
    image = Image.new("RGBA", (2, 1), (0, 0, 0, 0))
    image.putpixel((1, 0), (0, 0, 0, 255))
    loaded = load(encoded(image.convert(mode)) if mode != "P" else encoded(image.quantize(2)))
    assert [loaded.getpixel((0, 0)), loaded.getpixel((1, 0))] == [(255, 255, 255), (0, 0, 0)]


def test_sixteen_bit_grey_keeps_its_shades():
    image = Image.fromarray(np.array([[0, 32768, 65535]], dtype=np.uint16))
    loaded = load(encoded(image))
    assert [loaded.getpixel((column, 0))[0] for column in range(3)] == [0, 128, 255]


def test_a_png_cut_short_anywhere_is_an_error_with_row_and_file(tmp_path):
    rng = np.random.default_rng(0)
    data = encoded(Image.fromarray(rng.integers(0, 255, (40, 40, 3), dtype=np.uint8)))
    file = tmp_path / "cut.png"
    for length in [0, 1, 8, 20, 33, 40, 60, len(data) // 2, len(data) - 40]:
        file.write_bytes(data[:length])
        with pytest.raises(UserError) as raised:
            load(str(file))
        assert str(raised.value).startswith(f"rows.jsonl line 7: cannot read the image {file}: ")


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("/nowhere/a.png", "no image file /nowhere/a.png; relative paths start at the row file's folder"),
        (b"not an image", "cannot read the image <image, 12 bytes>: it has none of the formats PNG, "),
        ("data:image/png;base64,AAAA", "cannot read the image <image, 3 bytes>"),
        ("data:image/png;base64,???", "the text is not base64"),
        ("data:image/png,raw", "the data URI is not of the form data:image/...;base64,..."),
        ("a\0.png", "cannot read the image a␀.png: embedded null byte"),
        ("x" * 300 + ".png", "File name too long"),
        ("*" * 5000, "the text is not base64"),
        ("http://127.0.0.1:99999999/a.png", "cannot read the image http://127.0.0.1:99999999/a.png"),
    ],
)
def test_an_image_that_cannot_be_had_is_an_error_with_its_row(source, sentence):
    with pytest.raises(UserError, match="^rows.jsonl line 7: ") as raised:
        load(source)
    assert sentence in str(raised.value)
    assert len(str(raised.value)) < 600


def test_a_page_that_is_not_there_is_an_error_with_its_address(web):
    with pytest.raises(UserError, match=f"cannot read the image {web}/no.png: HTTP Error 404"):
        load(f"{web}/no.png")


def test_the_cheap_check_finds_missing_files_and_files_that_are_no_images(picture, tmp_path):
    (tmp_path / "text.png").write_text("no image")
    (tmp_path / "a.png").write_bytes(encoded(picture))
    check_image_exists(ImagePart(str(tmp_path / "a.png")), location=LOCATION)
    with pytest.raises(UserError, match="rows.jsonl line 7: no image file .*missing.png"):
        check_image_exists(ImagePart(str(tmp_path / "missing.png")), location=LOCATION)
    with pytest.raises(UserError, match="rows.jsonl line 7: cannot read the image .*text.png"):
        check_image_exists(ImagePart(str(tmp_path / "text.png")), location=LOCATION)
    with pytest.raises(UserError, match="rows.jsonl line 7: cannot read the image"):
        check_image_exists(ImagePart(str(tmp_path)), location=LOCATION)


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_the_cheap_check_finds_files_that_were_cut_short(kind, tmp_path):
    rng = np.random.default_rng(0)
    data = encoded(Image.fromarray(rng.integers(0, 255, (40, 40, 3), dtype=np.uint8)), kind=kind)
    file = tmp_path / "cut"
    for length in [0, 1, 8, 20, len(data) // 2, len(data) - 100]:
        file.write_bytes(data[:length])
        with pytest.raises(UserError, match="rows.jsonl line 7: cannot read the image .*cut: .*; replace it or drop"):
            check_image_exists(ImagePart(str(file)), location=LOCATION)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "BMP"])
def test_the_cheap_check_takes_whole_files_whatever_follows_them(kind, picture, tmp_path):
    for rest in (b"", b"\0" * 100):
        (tmp_path / "whole").write_bytes(encoded(picture, kind=kind) + rest)
        check_image_exists(ImagePart(str(tmp_path / "whole")), location=LOCATION)


def test_the_cheap_check_fetches_nothing():
    check_image_exists(ImagePart("http://127.0.0.1:1/a.png"), location=LOCATION)


# Orientations of EXIF: upright, mirrored, and lying.
@pytest.mark.parametrize("orientation", [1, 2, 3, 6, 8])
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "TIFF", "GIF", "BMP", "PPM"])
def test_the_size_is_that_of_the_image_upright_whatever_holds_it(kind, orientation, picture, tmp_path):
    tag = Image.Exif()
    tag[ExifTags.Base.Orientation] = orientation
    data = encoded(picture, kind=kind, **({"exif": tag} if kind in ("PNG", "JPEG", "WEBP", "TIFF") else {}))
    (tmp_path / "a").write_bytes(data)
    text = base64.b64encode(data).decode()
    for source in (str(tmp_path / "a"), data, f"data:image/x;base64,{text}", Image.open(io.BytesIO(data))):
        assert image_size(ImagePart(source), location=LOCATION) == load(source).size


def test_no_pixels_are_read_for_a_size_and_nothing_is_fetched(picture, monkeypatch):
    data = encoded(picture)

    def refuse(*given):
        raise AssertionError("an image was decoded")

    monkeypatch.setattr(ImageFile.ImageFile, "load", refuse)
    assert image_size(ImagePart(data), location=LOCATION) == (2, 3)
    assert image_size(ImagePart("http://127.0.0.1:1/a.png"), location=LOCATION) is None


@pytest.mark.parametrize(
    "source",
    [b"no image", encoded(Image.new("RGB", (9, 9)))[:-30], "data:image/png;base64,AAAA", Image.new("F", (9, 9))],
)
def test_an_image_that_a_row_holds_and_that_is_none_is_an_error_with_its_row(source):
    with pytest.raises(UserError, match="^rows.jsonl line 7: cannot read the image .*; replace it or drop the row"):
        image_size(ImagePart(source), location=LOCATION)
