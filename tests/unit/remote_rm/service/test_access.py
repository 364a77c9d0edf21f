"""Which requests a server answers: by its address, its key, and the host that a request asks for; and JSON it refuses."""

import json

import pytest
from fastapi.testclient import TestClient
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from remote_rm.math_verifier import MathVerifier
from remote_rm.protocol import MAX_DEPTH, MAX_DIGITS, check_json
from remote_rm.registry import build_parser, parse_flags
from remote_rm.service import server
from remote_rm.service.access import HostGate, check_access, is_local
from remote_rm.service.app import INLINE_BYTES, create_app


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
    made: list[Starlette] = []

    def make_app(token: str | None) -> Starlette:
        app = create_app(MathVerifier(), workers=1, item_timeout_seconds=1.0, token=token)
        made.append(app)
        return app

    monkeypatch.setattr(server, "_open_access_log", lambda *given: None)
    monkeypatch.setattr(server, "_server", lambda *given, **named: _Ended())
    args = parse_flags(build_parser("math", prog="p"), ["--host", host, "--port", "0", "--insecure"])
    monkeypatch.setattr(server.signal, "signal", lambda *given: None)
    server.serve_app(make_app, options=server.ServingOptions.from_arguments(args))
    assert any(one.cls is HostGate for one in made[0].user_middleware) is gated


class _Ended:
    started = True
    has_failed = False

    def fail(self, error: BaseException) -> None:
        pass

    def run(self, sockets: object) -> None:
        pass


def test_json_is_refused_for_its_depth_and_its_digits_and_strings_may_hold_anything():
    check_json("[" * MAX_DEPTH + "]" * MAX_DEPTH)
    check_json(json.dumps(["[" * 1000, '"\\' * 1000, "9" * 10_000]))
    with pytest.raises(ValueError, match="more than 64 levels deep"):
        check_json("[" * (MAX_DEPTH + 1))
    with pytest.raises(ValueError, match="more than 64 levels deep"):
        check_json('{"a":' * (MAX_DEPTH + 1))
    check_json("9" * MAX_DIGITS)
    with pytest.raises(ValueError, match="more than 400 digits"):
        check_json("9" * (MAX_DIGITS + 1))


@pytest.mark.parametrize("padding", [0, INLINE_BYTES])
@pytest.mark.parametrize(
    "value", ["9" * 5000, "-" + "9" * 5000, "1." + "9" * 5000, "[" * 100_000, '{"a":' * 100_000, "[" * 65 + "]" * 65]
)
def test_a_reward_request_with_such_json_is_a_422(value, padding):
    client = TestClient(create_app(MathVerifier(), workers=1, item_timeout_seconds=1.0), raise_server_exceptions=False)
    body = f'{{"query": ["q"], "prompts": ["p"], "labels": ["1"], "more": {value}, "pad": "{"x" * padding}"}}'
    reply = client.post("/get_reward", content=body, headers={"content-type": "application/json"})
    assert reply.status_code == 422, reply.text
