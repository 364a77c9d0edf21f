"""Which requests a server answers: by its address, its key, and the host that a request asks for."""

import pytest
import uvicorn
from fastapi.testclient import TestClient
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from remote_rm.math_verifier import MathVerifier
from remote_rm.registry import build_parser, parse_flags
from remote_rm.service import app
from remote_rm.service.access import HostGate, check_access, is_local


@pytest.mark.parametrize(
    ("host", "local"),
    [
        *(
            (host, True)
            for host in ("127.0.0.1", "127.9.9.9", "::1", "[::1]", "localhost", "LOCALHOST.", "a.localhost")
        ),
        ("::ffff:127.0.0.1", True),
        *((host, False) for host in ("0.0.0.0", "::", "192.0.2.2", "", "evil.example", "localhost.evil.example")),
        *(
            (host, False)
            for host in ("127.0.0.1.nip.io", "2130706433", "0x7f.1", "169.254.169.254", "::ffff:10.0.0.1")
        ),
    ],
)
def test_an_address_is_local_if_only_this_machine_reaches_it(host, local):
    assert is_local(host) is local


def test_a_server_on_the_network_requires_a_key_unless_the_operator_says_insecure():
    with pytest.raises(ValueError, match="--host 0.0.0.0 opens the server to the network.*--token-env.*--insecure"):
        check_access("0.0.0.0", token=None, is_insecure=False)
    check_access("0.0.0.0", token="key", is_insecure=False)
    check_access("0.0.0.0", token=None, is_insecure=True)
    check_access("127.0.0.1", token=None, is_insecure=False)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        *(
            ({"host": host}, 200)
            for host in ("127.0.0.1:5000", "localhost", "LOCALHOST:1", "[::1]:5000", "x.localhost:80")
        ),
        *(
            ({"host": host}, 403)
            for host in ("evil.example", "evil.example:5000", "192.0.2.2:5000", "", ":5000", "[::2]:1")
        ),
        *(
            ({"host": host}, 403)
            for host in ("localhost@evil.example", "127.0.0.1.evil.example", "127.0.0.1 evil", "[::1")
        ),
        *(
            ({"host": "localhost", "origin": origin}, 403)
            for origin in ("http://evil.example", "null", "https://a.b:1")
        ),
        *(({"host": "localhost", "origin": origin}, 200) for origin in ("http://localhost:3000", "http://[::1]:1")),
    ],
)
def test_a_server_of_this_machine_answers_requests_for_this_machine_only(headers, status):
    app = Starlette(routes=[Route("/", lambda request: PlainTextResponse("here"))])
    app.add_middleware(HostGate)
    assert TestClient(app).get("/", headers=headers).status_code == status


@pytest.mark.parametrize(("host", "gated"), [("127.0.0.1", True), ("0.0.0.0", False)])
def test_the_gate_is_there_if_the_server_listens_on_the_loopback(host, gated, monkeypatch):
    served: list[uvicorn.Server] = []

    def run(self: uvicorn.Server, **_given: object) -> None:
        self.started = True
        served.append(self)

    monkeypatch.setattr(app.AnnouncingServer, "run", run)
    monkeypatch.setattr(app.signal, "signal", lambda *given: None)
    args = parse_flags(build_parser("math", prog="p"), ["--host", host, "--port", "0", "--insecure"])
    app.serve(MathVerifier(), args)
    assert any(one.cls is HostGate for one in served[0].config.app.user_middleware) is gated
