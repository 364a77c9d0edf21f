"""Attacks that must end in one sentence; what is tried is a table, tests/data/tables/contracts/attacks.yaml."""

import argparse
import http.server
import importlib
import os
import resource
import socket
import subprocess
import sys
import threading
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from fastapi.testclient import TestClient
from helpers.chats import reward_client
from helpers.commands import write_rows
from helpers.hostile_images import IMAGES
from helpers.tables import table
from PIL import Image
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from lmm_r1.data import fetching
from lmm_r1.data.fetching import RefusedURL, fetch
from lmm_r1.data.files import read_row_file
from lmm_r1.data.images import check_image_exists, image_size, load_image
from lmm_r1.data.media_access import MediaLimits
from lmm_r1.data.messages import ImagePart, images_of
from lmm_r1.data.row_parser import parse_row
from lmm_r1.errors import UserError
from lmm_r1.supervised import kept
from remote_rm.redaction import neutral
from remote_rm.service.access import HostGate

ROOT = Path(__file__).parents[2]


def attacks(door: str) -> list[Any]:
    return table("contracts/attacks", door)


@pytest.fixture(autouse=True)
def without_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching.urllib.request, "getproxies", dict)


@pytest.mark.parametrize(("url", "told"), attacks("urls"))
def test_a_url_is_refused_before_anything_is_connected(url, told, monkeypatch):
    monkeypatch.setattr(aiohttp.TCPConnector, "connect", lambda *given, **named: pytest.fail("it was connected"))
    with pytest.raises(RefusedURL) as refused:
        fetch(url)
    assert told in str(refused.value)


@pytest.mark.parametrize(("url", "told"), attacks("urls"))
def test_a_url_is_refused_where_a_proxy_would_look_it_up(url, told, monkeypatch):
    monkeypatch.setattr(
        fetching.urllib.request, "getproxies", lambda: dict.fromkeys(("http", "https"), "http://proxy:1")
    )
    monkeypatch.setattr(fetching.urllib.request, "proxy_bypass", lambda host: False)
    monkeypatch.setattr(aiohttp.TCPConnector, "connect", lambda *given, **named: pytest.fail("it was connected"))
    with pytest.raises(RefusedURL) as refused:
        fetch(url)
    assert told in str(refused.value)


def _drip(handler: http.server.BaseHTTPRequestHandler, pause: threading.Event) -> None:
    while not pause.wait(0.05):
        handler.wfile.write(b"x")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A server at an address that is allowed; `replies[path]` writes its reply, and `asked` lists the paths."""
    ended = threading.Event()

    class Images(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            made.asked.append(self.path)
            try:
                made.replies[self.path](self)
            except OSError:
                pass

        def log_message(self, *_: object) -> None:
            pass

    made = argparse.Namespace(asked=[], replies={}, ended=ended)
    monkeypatch.setattr(fetching, "is_public", lambda address: str(address) == "127.0.0.1")
    monkeypatch.setattr(fetching, "MAX_BYTES", 2**20)
    monkeypatch.setattr(fetching, "WAITS_S", (0.0, 0.0))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Images) as listening:
        listening.daemon_threads = True
        threading.Thread(target=listening.serve_forever, args=(0.02,), daemon=True).start()
        made.url = f"http://127.0.0.1:{listening.server_port}"
        yield made
        ended.set()
        listening.shutdown()


def _redirect(to: str) -> Callable[[Any], None]:
    def reply(handler: http.server.BaseHTTPRequestHandler) -> None:
        handler.send_response(302)
        handler.send_header("Location", to)
        handler.end_headers()

    return reply


@pytest.mark.parametrize(("location", "told"), attacks("redirects"))
def test_each_hop_is_checked(location, told, server):
    server.replies = {"/a.png": _redirect(location), "/loop": _redirect("/loop")}
    with pytest.raises(RefusedURL) as refused:
        fetch(f"{server.url}/a.png")
    assert told in str(refused.value)
    assert server.asked == ["/a.png"] or server.asked == ["/a.png"] + ["/loop"] * 5


def _behaviours(server: Any) -> dict[str, Callable[[Any], None]]:
    def head(handler: Any, status: int = 200, **headers: str) -> None:
        handler.send_response(status)
        for name, value in headers.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()

    def announces(handler: Any) -> None:
        head(handler, content_length=str(65 * 2**20))

    def endless(handler: Any) -> None:
        head(handler)
        while not server.ended.is_set():
            handler.wfile.write(bytes(2**16))

    def dripping(handler: Any) -> None:
        head(handler)
        _drip(handler, server.ended)

    def dripping_head(handler: Any) -> None:
        handler.wfile.write(b"HTTP/1.1 200 OK\r\nX-A: ")
        _drip(handler, server.ended)

    return {
        "announces 65 MiB": announces,
        "sends without end": endless,
        "sends byte by byte": dripping,
        "sends its head byte by byte": dripping_head,
        "says nothing": lambda handler: server.ended.wait(),
        "has a line without end": lambda handler: handler.wfile.write(b"HTTP/1.1 200 OK\r\nX-A: " + b"a" * 100_000),
        "breaks off": lambda handler: (head(handler, content_length="1000"), handler.wfile.write(b"abc")),
        "is no HTTP": lambda handler: handler.wfile.write(b"SSH-2.0-OpenSSH\r\n\r\n"),
        **{
            f"answers {status}": lambda handler, status=status: head(handler, status)
            for status in (404, 403, 204, 500)
        },
    }


# What may be better at another attempt.
AGAIN = ("has a line without end", "breaks off", "is no HTTP", "answers 500")


@pytest.mark.parametrize(("behaviour", "told"), attacks("replies"))
def test_a_reply_has_a_size_and_a_time_and_what_is_refused_is_not_asked_for_again(
    behaviour, told, server, monkeypatch
):
    monkeypatch.setattr(fetching, "DEADLINE_S", 0.7 if "took" in told else 20.0)
    server.replies = {"/a.png": _behaviours(server)[behaviour]}
    with pytest.raises(OSError, match=told.replace("64 MiB", "1 MiB")):
        fetch(f"{server.url}/a.png")
    assert len(server.asked) == (3 if behaviour in AGAIN else 1)


def test_what_is_allowed_is_fetched_also_after_a_redirect_and_after_an_error(server):
    def image(handler: Any) -> None:
        handler.send_response(200)
        handler.end_headers()
        handler.wfile.write(b"an image")

    server.replies = {"/a.png": _redirect("b/c.png?x=1"), "/b/c.png?x=1": image}
    assert fetch(f"{server.url}/a.png") == b"an image"
    first = iter([True])
    server.replies = {"/a.png": lambda handler: handler.send_error(503) if next(first, False) else image(handler)}
    assert fetch(f"{server.url}/a.png") == b"an image"


def test_a_proxy_is_asked_with_its_user_for_a_name_that_it_looks_up(server, monkeypatch):
    monkeypatch.setattr(
        fetching.urllib.request, "getproxies", lambda: {"http": server.url.replace("//", "//me:p%40w@")}
    )
    monkeypatch.setattr(fetching.urllib.request, "proxy_bypass", lambda host: False)
    seen = []

    def reply(handler: Any) -> None:
        seen.append((handler.headers["Proxy-Authorization"], handler.headers["Host"]))
        handler.wfile.write(b"HTTP/1.1 200 OK\r\n\r\nhere")

    server.replies = {"http://images.example/a.png": reply}
    assert fetch("http://images.example/a.png") == b"here"
    assert seen == [("Basic bWU6cEB3", "images.example")]


def test_private_addresses_are_fetched_if_the_user_allows_them(server, monkeypatch):
    monkeypatch.setattr(fetching, "is_public", lambda address: False)
    server.replies = {"/a.png": lambda handler: handler.wfile.write(b"HTTP/1.1 200 OK\r\n\r\nhere")}
    with pytest.raises(RefusedURL, match="this machine or a private network"):
        fetch(f"{server.url}/a.png")
    monkeypatch.setenv("LMM_R1_ALLOW_PRIVATE_URLS", "1")
    assert fetch(f"{server.url}/a.png") == b"here"


def refused_image(source: str | bytes) -> str:
    """What is said of an image after its place; empty if it is decoded."""
    try:
        load_image(ImagePart(source), location="rows.jsonl line 1")
    except UserError as error:
        return str(error).partition("rows.jsonl line 1: ")[2]
    return ""


@pytest.mark.parametrize(("name", "told"), attacks("images"))
def test_an_image_is_refused_or_decoded(name, told, tmp_path):
    content = IMAGES[name]()
    found = refused_image(content)
    assert told in found
    assert bool(found) or not told
    (tmp_path / "a.png").write_bytes(content)
    assert bool(refused_image(str(tmp_path / "a.png"))) is bool(found)
    if told.startswith("more than"):
        with pytest.raises(UserError, match=told):
            image_size(ImagePart(content), location="rows.jsonl line 1")


def refuse_all_images() -> None:
    """For a process of its own: how much memory refusing all of them takes, in MiB."""
    made = {name: IMAGES[name]() for name in IMAGES}
    refused_image(made["svg"])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for content in made.values():
        refused_image(content)
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)  # noqa: T201


def test_no_image_takes_100_mib_to_refuse():
    code = "import sys; sys.path.insert(0, 'tests'); sys.path.insert(0, 'tests/contracts'); import test_attacks; test_attacks.refuse_all_images()"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[-1]) < 100


def test_the_limit_of_pixels_is_a_setting(monkeypatch):
    picture = ImagePart(IMAGES["png of 8001 x 8000"]())
    with pytest.raises(UserError, match="64 megapixels"):
        image_size(picture, location="a")
    monkeypatch.setenv("LMM_R1_MAX_IMAGE_MEGAPIXELS", "")
    MediaLimits(max_megapixels=64.1).apply()
    assert image_size(picture, location="a") == (8001, 8000)
    MediaLimits().apply()
    with pytest.raises(UserError, match="64 megapixels"):
        image_size(picture, location="a")


@pytest.mark.parametrize(("name", "told"), attacks("files"))
def test_only_regular_files_are_read_and_nothing_waits(name, told, tmp_path):
    (tmp_path / "a folder").mkdir()
    os.mkfifo(tmp_path / "a pipe")
    (tmp_path / "a link to itself").symlink_to(tmp_path / "a link to itself")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "a socket"))
        path = name if name.startswith("/") else str(tmp_path / name)
        found = refused_image(path)
        assert told in found
        assert found
        with pytest.raises(UserError):
            check_image_exists(ImagePart(path), location="rows.jsonl line 1")


def row_with(image: str, folder: Path) -> Any:
    record = {"messages": [{"role": "user", "content": [{"type": "image", "image": image}]}], "answer": "1"}
    (part,) = images_of(parse_row(record, location="rows.jsonl line 1", base_dir=folder).messages)
    return part.source


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    """A folder that `hf download --local-dir` has filled, next to a file that is not its own."""
    folder = tmp_path / "dataset"
    (folder / ".cache" / "huggingface" / "download").mkdir(parents=True)
    (folder / "images").mkdir()
    for file in (folder / "images" / "1.png", tmp_path / "secret.png"):
        Image.new("RGB", (28, 28)).save(file)
    (folder / "images" / "link.png").symlink_to(tmp_path / "secret.png")
    (folder / "images" / "folder_link").symlink_to(tmp_path)
    return folder


@pytest.mark.parametrize(("path", "told"), attacks("paths"))
def test_a_row_of_a_downloaded_dataset_reads_only_its_own_files(path, told, dataset):
    with pytest.raises(UserError, match=told):
        row_with(path, dataset)
    record = {"messages": [{"role": "user", "content": "<video>"}], "videos": [path], "answer": "1"}
    with pytest.raises(UserError, match=told):
        parse_row(record, location="rows.jsonl line 1", base_dir=dataset)


def test_its_own_files_may_be_named_in_every_way_and_rows_of_the_user_name_all(dataset, tmp_path, monkeypatch):
    own = str(dataset / "images" / "1.png")
    for path in ("images/1.png", "./images/../images/1.png", own, f"file://{own}"):
        assert row_with(path, dataset) == own
    local = tmp_path / "mine"
    local.mkdir()
    for path in (own, "../secret.png", f"file://{tmp_path}/secret.png", "/etc/passwd"):
        assert os.path.isabs(row_with(path, local))
    # In the hub's cache, files of a snapshot are links to the dataset's blobs.
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    snapshot = tmp_path / "hub" / "datasets--a--b" / "snapshots" / "c0ffee"
    (snapshot.parents[1] / "blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    Image.new("RGB", (28, 28)).save(snapshot.parents[1] / "blobs" / "0.png")
    (snapshot / "1.png").symlink_to("../../blobs/0.png")
    assert row_with("1.png", snapshot) == str(snapshot / "1.png")
    with pytest.raises(UserError, match="rows of a downloaded dataset"):
        row_with("../../../datasets--other--one/x.png", snapshot)


@pytest.mark.parametrize(("headers", "told"), attacks("hosts"))
def test_a_server_on_the_loopback_answers_for_this_machine_only(headers, told):
    app = Starlette(routes=[Route("/", lambda request: PlainTextResponse("here"))])
    app.add_middleware(HostGate)
    reply = TestClient(app).get("/", headers=headers)
    assert (reply.status_code, told in reply.text) == (403, True)


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    with reward_client(item_timeout_seconds=1.0) as made:
        yield made


@pytest.mark.parametrize("written", attacks("bodies"))
def test_a_body_is_refused_as_the_clients_fault(written, client):
    body = eval(written)
    reply = client.post("/get_reward", content=body, headers={"content-type": "application/json"})
    assert 400 <= reply.status_code < 500, reply.text
    assert "Traceback" not in reply.text
    assert len(reply.content) < 10_000


class _Bad:
    """An object that calls something when it is unpickled."""

    def __init__(self, call: Callable[..., object], argument: str) -> None:
        self.call, self.argument = call, argument

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call, (self.argument,)


@pytest.mark.parametrize("place", ["mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"])
@pytest.mark.parametrize(("name", "told"), attacks("pickles"))
def test_a_checkpoint_that_would_run_code_is_refused_by_merge(name, told, place, tmp_path):
    from lmm_r1.checkpoints.merging import read_weights

    module, function = name.split(":")
    folder = tmp_path / "run" / "global_step1"
    folder.mkdir(parents=True)
    sign = tmp_path / "sign"
    for file in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"):
        bad = _Bad(getattr(importlib.import_module(module), function), f"touch {sign}")
        # What DeepSpeed looks for in the first of the two.
        content = {"module": {}, "buffer_names": [], "param_shapes": [], "ds_version": "0", "shared_params": {}}
        torch.save(content | ({"bad": bad} if file == place else {}), folder / file)
    with pytest.raises(UserError) as refused:
        read_weights(folder)
    assert told in str(refused.value)
    assert "--trust_checkpoint" in str(refused.value)
    assert not sign.exists()


@pytest.mark.parametrize("text", attacks("texts"))
def test_a_row_that_is_left_out_does_not_steer_the_terminal(text, tmp_path, capsys):
    asked = {"role": "user", "content": "1 + 1?"}
    bad = {"messages": [{"role": "user", "content": [{"type": "image", "image": f"{text}.png"}]}], "answer": "2"}
    path = write_rows(tmp_path, {"messages": [asked], "answer": "2"}, bad)
    file = read_row_file(str(path), bad_rows="skip")
    kept(file)
    printed = capsys.readouterr().out
    # Lines are broken at any character.
    assert "".join(neutral(text).split()) in "".join(printed.split())
    assert {character for character in printed if unicodedata.category(character) in ("Cc", "Cs")} == {"\n"}
    assert "\u202e" not in printed
