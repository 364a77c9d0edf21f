import base64
import functools
import io
import struct
import threading
import zlib
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
from PIL import ExifTags, Image, ImageFile, ImageOps

from lmm_r1.data.images import check_image_exists, image_size, load_image
from lmm_r1.data.messages import ImagePart
from lmm_r1.errors import UserError

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


# Orientation 6: the camera lay on its side; the upright image is the stored one turned 90 degrees clockwise.
LYING = (0x0112, 3, 1, b"\6\0\0\0")


def exif_of(*entries: tuple[int, int, int, bytes]) -> bytes:
    """Return EXIF with one directory of these entries: tag, type, count and value."""
    listed = b"".join(struct.pack("<HHI4s", *entry) for entry in sorted((*entries, LYING)))
    return b"Exif\0\0II*\0\x08\0\0\0" + struct.pack("<H", len(entries) + 1) + listed + bytes(4)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
@pytest.mark.parametrize(
    "broken",
    [
        (),
        ((0x011A, 2, 4, b"abc\0"), (0x0128, 3, 1, b"\2\0\0\0")),  # the resolution is text
        ((0x011A, 5, 1, b"\xff\xff\xff\x7f"),),  # a value behind the end
        ((0x010F, 2, 0x7FFFFFFF, bytes(4)),),  # two gigabytes
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_a_picture_is_turned_upright_whatever_else_its_exif_holds(kind, broken):
    stored = Image.new("RGB", (16, 8), "red")
    stored.paste((0, 0, 255), (8, 0, 16, 8))
    data = encoded(stored, kind=kind, exif=exif_of(*broken))
    assert image_size(ImagePart(data), location=LOCATION) == (8, 16)
    image = load(data)
    assert image.size == (8, 16)
    assert [image.getpixel((4, row)).index(max(image.getpixel((4, row)))) for row in (2, 13)] == [0, 2]
    # Nothing turns it a second time.
    assert ImageOps.exif_transpose(image).size == (8, 16)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_every_orientation_is_turned_as_pillow_does(kind, orientation, picture):
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(picture, kind=kind, exif=exif)
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    np.testing.assert_array_equal(np.asarray(load(data)), np.asarray(upright))


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


@pytest.mark.parametrize(
    ("kind", "metadata"),
    [
        ("PNG", chunk(b"eXIf", b"\0")),
        ("PNG", chunk(b"eXIf", b"junk")),
        ("JPEG", b"\xff\xe1\0\x0cExif\0\0MM\0\0"),
    ],
)
def test_a_broken_orientation_damages_no_picture_and_a_cut_one_is_still_refused(kind, metadata, picture):
    data = encoded(picture, kind=kind)
    place = 33 if kind == "PNG" else 2
    broken = data[:place] + metadata + data[place:]
    assert image_size(ImagePart(broken), location=LOCATION) == (2, 3)
    np.testing.assert_array_equal(np.asarray(load(broken)), np.asarray(load(data)))
    with pytest.raises(UserError, match="cannot read the image"):
        load(broken[:-30])


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


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("/nowhere/a.png", "no image file /nowhere/a.png; relative paths start at the row file's folder"),
        (b"not an image", "cannot read the image <image, 12 bytes>: it has none of the formats PNG, "),
        ("data:image/png;base64,AAAA", "cannot read the image <image, 3 bytes>"),
        ("data:image/png;base64,???", "the text is not base64"),
        ("data:image/png,raw", "the data URI is not of the form data:image/...;base64,..."),
        ("a\0.png", "cannot read the image a␀.png: embedded null byte"),
        ("http://127.0.0.1:99999999/a.png", "cannot read the image http://127.0.0.1:99999999/a.png"),
    ],
)
def test_an_image_that_cannot_be_had_is_an_error_with_its_row(source, sentence):
    with pytest.raises(UserError, match="^rows.jsonl line 7: ") as raised:
        load(source)
    assert sentence in str(raised.value)
    assert len(str(raised.value)) < 600


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
