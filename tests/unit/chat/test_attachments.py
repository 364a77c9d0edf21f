import functools
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from helpers.tables import table
from PIL import Image

from lmm_r1.chat.session import dragged_image, read_image, read_video, sources_of
from lmm_r1.data.messages import ImagePart
from lmm_r1.errors import UserError


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("a.png", "my picture.png", "Anna's.png"):
        Image.new("RGB", (30, 20)).save(tmp_path / name)
    return tmp_path


@pytest.mark.parametrize(
    ("typed", "sources"), table("chat/attachments", "paths_and_urls_as_they_are_typed_or_dragged")
)
def test_paths_and_urls_as_they_are_typed_or_dragged(folder, typed, sources):
    assert sources_of(typed) == sources


def test_a_home_folder_is_expanded(folder):
    assert sources_of("~/a.png") == [f"{folder}/a.png"]


def test_nothing_is_no_path():
    with pytest.raises(UserError, match="give the path or the URL"):
        sources_of("  ")


@pytest.mark.parametrize(("line", "source"), table("chat/attachments", "a_line_that_is_the_path_of_an_image"))
def test_a_line_that_is_the_path_of_an_image(folder, line, source):
    assert dragged_image(line.format(folder)) == (source and source.format(folder))


def test_an_image_has_its_name_and_size_and_stays_a_path(folder):
    image = read_image("a.png")
    assert str(image) == "a.png (30x20)"
    assert image.part == ImagePart(str(folder / "a.png"))
    assert read_image("a.png", max_pixels=784).part == ImagePart(str(folder / "a.png"), max_pixels=784)


@pytest.fixture
def url(folder, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Where the folder is served on loopback."""
    monkeypatch.setenv("LMM_R1_ALLOW_PRIVATE_URLS", "1")
    handler = functools.partial(SimpleHTTPRequestHandler, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_an_image_from_a_url_is_kept_as_it_was(url):
    image = read_image(f"{url}/a.png")
    assert str(image) == f"{url}/a.png (30x20)"
    assert image.part.source.size == (30, 20)
    with pytest.raises(UserError, match=r"^cannot read the image http://.*/nowhere\.png: HTTP Error 404"):
        read_image(f"{url}/nowhere.png")


def test_broken_and_missing_images_are_told_in_a_sentence(folder):
    (folder / "text.png").write_text("not an image")
    (folder / "cut.png").write_bytes((folder / "a.png").read_bytes()[:50])
    for source, sentence in {
        "nowhere.png": "no image file nowhere.png; check the path",
        "text.png": "cannot read the image text.png: it has none of the formats PNG, JPEG, WEBP, GIF, BMP, TIFF, PPM",
        ".": "cannot read the image .: it is a folder, not a file",
        "\x1b[2J.png": "no image file ␛[2J.png; check the path",
    }.items():
        with pytest.raises(UserError) as caught:
            read_image(source)
        assert str(caught.value) == sentence
    with pytest.raises(UserError, match=r"^cannot read the image cut\.png: "):
        read_image("cut.png")


def test_a_video_that_is_not_there(folder):
    with pytest.raises(UserError, match=r"^no video file clip\.mp4; check the path$"):
        read_video("clip.mp4")
    with pytest.raises(UserError, match="a video must be a file on this machine"):
        read_video("http://host/clip.mp4")
