"""As much of the Hugging Face hub's protocol as making a repository and uploading small files takes, on this machine."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import huggingface_hub.constants
import pytest

from lmm_r1 import hub


@dataclass(kw_only=True)
class Uploads:
    """What a hub was asked."""

    posts: list[tuple[str, bytes]] = field(default_factory=list)

    @property
    def made(self) -> dict[str, object]:
        """The repository that was asked for first."""
        path, body = self.posts[0]
        assert path == "/api/repos/create"
        return json.loads(body)

    @property
    def files(self) -> list[str]:
        """The files of the last commit."""
        path, lines = self.posts[-1]
        assert path.startswith("/api/models/")
        assert path.endswith("/commit/main")
        return [json.loads(line)["value"].get("path") for line in lines.splitlines()][1:]


@contextmanager
def hub_server(*, token: str | None = "hf_token") -> Iterator[Uploads]:
    """A hub that takes everything, which the libraries of this process take for the real one."""
    uploads = Uploads()

    class Hub(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer({})

        def do_GET(self) -> None:
            self._answer({"id": "me/model", "sha": "0" * 40, "siblings": []})

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            uploads.posts.append((self.path, body))
            address = f"http://127.0.0.1:{self.server.server_port}/me/model"
            if self.path.endswith("/preupload/main"):
                files = [
                    {**file, "uploadMode": "regular", "shouldIgnore": False} for file in json.loads(body)["files"]
                ]
                self._answer({"files": files})
            else:
                self._answer({"url": address, "commitUrl": f"{address}/commit/1", "commitOid": "1", "id": "me/model"})

        def _answer(self, record: dict[str, object]) -> None:
            content = json.dumps(record).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server, pytest.MonkeyPatch.context() as patch:
        Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        patch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        patch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        patch.setattr(huggingface_hub, "get_token", lambda: token)
        if token is not None:
            patch.setenv("HF_TOKEN", token)
        hub.is_reachable.cache_clear()
        try:
            yield uploads
        finally:
            server.shutdown()
            hub.is_reachable.cache_clear()
