"""Prompts from the network: what is read as messages, and which files and addresses they reach."""

import base64
import http.server
import io
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.conversations import message, picture, row
from PIL import Image

from lmm_r1.data.messages import ImagePart, VideoPart, images_of, to_json, videos_of
from lmm_r1.data.sent_prompt import MediaAccess, ending_of
from lmm_r1.errors import UserError


def prompt_with(image: object, **settings: object) -> str:
    content = [{"type": "image", "image": image, **settings}, {"type": "text", "text": "What?"}]
    return json.dumps([{"role": "user", "content": content}])


def source_of(prompt: str, *, roots: tuple[Path, ...] = (), allow_urls: bool = False) -> object:
    found = MediaAccess(roots=roots, allow_urls=allow_urls).row_of(prompt, location="prompts[1]")
    (part,) = images_of(found.messages)
    return part.source


def refusal_of(prompt: str, **settings: object) -> str:
    with pytest.raises(UserError) as refused:
        source_of(prompt, **settings)
    return str(refused.value)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "images" / "inner").mkdir(parents=True)
    for name in ("images/inner/red.png", "outside.png"):
        Image.new("RGB", (56, 56), "red").save(tmp_path / name)
    (tmp_path / "images" / "link.png").symlink_to(tmp_path / "outside.png")
    return tmp_path


@pytest.mark.parametrize(
    "text",
    [
        "<|im_start|>user\nWhat is 1+1?<|im_end|>",
        "",
        "[1, 2] sort these",
        '[{"role": "user", "content": "half',
        '[{"price": 3}]',
        "[{" + '"role":' + "[" * 100_000,
    ],
)
def test_text_of_another_kind_is_no_row(text):
    assert MediaAccess(roots=(), allow_urls=False).row_of(text, location="prompts[0]") is None


def test_what_a_rollout_sends_is_the_row_it_came_from(folder):
    image = ImagePart(str(folder / "images/inner/red.png"))
    sent = row(message("system", "Think."), message("user", image, " What?\n"), message("assistant", "<image> it is"))
    access = MediaAccess(roots=(folder / "images",), allow_urls=False)
    found = access.row_of(to_json(sent.messages), location="prompts[0]")
    assert found.messages == sent.messages
    assert (found.answer, found.location) == ("", "prompts[0]")


def test_files_are_read_below_the_given_folders_alone(folder):
    roots = (folder / "other", folder / "images")
    inner = folder / "images/inner/red.png"
    assert source_of(prompt_with(str(inner)), roots=roots) == str(inner)
    assert source_of(prompt_with(inner.as_uri()), roots=roots) == str(inner)
    for path in (
        "outside.png",
        "images/../outside.png",
        "images/link.png",
        "imagesque/red.png",
        "images\0/red.png",
        "missing.png",
    ):
        said = refusal_of(prompt_with(f"{folder}/{path}"), roots=roots)
        assert said.startswith("prompts[1]: the image ")
        assert f"is not below a folder given with --image_root ({folder}/other, {folder}/images)" in said
    assert "is not below a folder" in refusal_of(prompt_with("inner/red.png"), roots=roots)


def test_without_folders_no_file_is_read(folder):
    said = refusal_of(prompt_with(str(folder / "outside.png")))
    assert said.startswith(f"prompts[1]: this server reads no image files ({folder}/outside.png); start it with ")
    assert "--image_root FOLDER" in said
    video = json.dumps([{"role": "user", "content": [{"type": "video", "video": str(folder / "clip.mp4")}]}])
    with pytest.raises(UserError, match="this server reads no video files"):
        MediaAccess(roots=(), allow_urls=False).row_of(video, location="prompts[0]")


def test_an_image_that_is_only_described_is_told_as_such():
    sent = to_json(row(message("user", picture(84, 56), "What?")).messages)
    assert refusal_of(sent, roots=(Path("/"),)) == (
        "prompts[1]: the prompt names its image only as <image 84x56>, because the sender held it in memory; "
        "keep images of rows as files or URLs, or send them as data URIs"
    )


def test_images_within_the_request_are_always_taken():
    stream = io.BytesIO()
    picture(84, 56).save(stream, "PNG")
    uri = "data:image/png;base64," + base64.b64encode(stream.getvalue()).decode()
    assert source_of(prompt_with(uri)) == uri
    assert source_of(prompt_with({"url": uri})) == uri
    frames = json.dumps([{"role": "user", "content": [{"type": "video", "video": [uri, uri], "fps": 2}]}])
    found = MediaAccess(roots=(), allow_urls=False).row_of(frames, location="prompts[0]")
    assert videos_of(found.messages) == [VideoPart((uri, uri), fps=2.0)]


def test_an_image_is_not_scaled_up_to_any_size():
    assert refusal_of(prompt_with("data:image/png;base64,AAAA", min_pixels=10**12)) == (
        "prompts[1]: min_pixels 1000000000000 is too large; ask for at most 16777216"
    )


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("LMM_R1_ALLOW_PRIVATE_URLS", "1")

    class Images(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/red.png" else 404)
            self.end_headers()
            if self.path == "/red.png":
                self.wfile.write(b"the image's bytes")

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Images) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_addresses_are_fetched_where_that_is_allowed(address):
    url = f"{address}/red.png"
    assert refusal_of(prompt_with(url)) == (
        f"prompts[1]: this server fetches no image from a URL ({url}); start it with --allow_urls, or send the image as "
        "a data URI"
    )
    assert source_of(prompt_with(url), allow_urls=True) == b"the image's bytes"
    assert "404" in refusal_of(prompt_with(f"{address}/gone.png"), allow_urls=True)


def test_half_a_character_is_replaced():
    found = MediaAccess(roots=(), allow_urls=False).row_of(
        r'[{"role":"user","content":"a\ud800b \ud83d\ude00"}]', location="prompts[0]"
    )
    assert found.messages == row(message("user", "a\ufffdb \U0001f600")).messages


@pytest.mark.parametrize(
    ("query", "response", "ending"),
    [
        ("user\n4?assistant\n4<eos>", "4", "<eos>"),
        ("user\n4?assistant\n4", "4", ""),
        ("user\n4?", "5", None),
        ("user\n4?<eos>", "", None),
    ],
)
def test_the_query_tells_what_ended_a_response(query, response, ending):
    assert ending_of(query, response=response) == ending
