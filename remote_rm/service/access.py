"""Who may send requests to a server, and how much: its address, its key, the names it answers to, and limits of bodies."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOCAL_NAMES = frozenset(("localhost", "ip6-localhost", "ip6-loopback"))
"""Names of this machine that no name server answers for; `NAME.localhost` is one as well (RFC 6761)."""
OPEN_PATH = "/health"
"""Answered without a token, so that whatever watches over the service needs none."""


def is_local(host: str) -> bool:
    """Return whether only processes of this machine reach an address: `localhost`, 127.0.0.0/8 or ::1."""
    name = host.lower().rstrip(".")
    if name in LOCAL_NAMES or name.endswith(".localhost"):
        return True
    if name.startswith("[") and name.endswith("]"):
        name = name[1:-1]
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return address.is_loopback if mapped is None else mapped.is_loopback


def check_access(host: str, *, token: str | None, is_insecure: bool) -> None:
    """Raise ValueError if a server would answer everyone on the network.

    Args:
        is_insecure: the operator accepts that.
    """
    if token is None and not is_insecure and not is_local(host):
        raise ValueError(
            f"--host {host} opens the server to the network, and requests need no key; give --token-env NAME with a key "
            "in that environment variable, for example NAME=$(openssl rand -hex 16), or accept it with --insecure"
        )


class HostGate:
    """Answers 403 to a request for another host than this machine: a web page that renames its own host to 127.0.0.1
    (DNS rebinding) could otherwise send requests through the browser of whoever looks at it.

    `Origin` is checked as well, because a page may also post to 127.0.0.1 under that name.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        hosts = [_host_of(value) for value in headers.getlist("host")]
        origins = [_host_of(value.partition("://")[2]) for value in headers.getlist("origin")]
        if len(hosts) <= 1 and all(map(is_local, [*hosts, *origins])):
            await self._app(scope, receive, send)
            return
        detail = "this server answers requests for localhost only; ask for http://127.0.0.1 with its port"
        await JSONResponse({"detail": detail}, status_code=403, headers={"Connection": "close"})(scope, receive, send)


def _host_of(authority: str) -> str:
    """Return the host of `host:port` or `[address]:port`, without the port."""
    if authority.startswith("["):
        address, closed, _ = authority.partition("]")
        return address + closed
    return authority.rpartition(":")[0] if authority.rpartition(":")[2].isdecimal() else authority


class RequestGuard:
    """Answers 401 without the key, 413 to a body that is too large and 408 to one that is too slow.

    The application gets a body as a whole, and is cancelled if its client disconnects.
    """

    body_seconds = 60.0
    """From the head of a request to the end of its body."""

    def __init__(self, app: ASGIApp, *, token: str | None, max_bytes: int) -> None:
        self._app = app
        self._key = None if token is None else token.encode()
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        refusal: JSONResponse | None = None
        body: bytes | None = None
        if scope["path"] != OPEN_PATH and not self._is_known(headers.get("authorization", "")):
            detail = "this service wants a token: send the header `Authorization: Bearer TOKEN`"
            refusal = JSONResponse({"detail": detail}, status_code=401, headers={"WWW-Authenticate": "Bearer"})
        else:
            try:
                announced = headers.get("content-length", "")
                body = await asyncio.wait_for(self._body(announced, receive), timeout=self.body_seconds)
            except ClientDisconnect:
                return
            except asyncio.TimeoutError:
                detail = f"the body did not come in within {self.body_seconds:g} s; send fewer samples at once"
                refusal = JSONResponse({"detail": detail}, status_code=408, headers={"Connection": "close"})
        if body is not None:
            await self._answer(body, scope, receive, send)
            return
        detail = f"the request is larger than {self._max_bytes / 2**20:g} MiB; send fewer samples at once"
        await (refusal or JSONResponse({"detail": detail}, status_code=413))(scope, receive, send)

    def _is_known(self, authorization: str) -> bool:
        if self._key is None:
            return True
        scheme, _, token = authorization.partition(" ")
        # Headers come as latin-1, so that they can be turned back into the bytes that were sent.
        return hmac.compare_digest(token.strip().encode("latin-1"), self._key) and scheme.lower() == "bearer"

    async def _body(self, announced: str, receive: Receive) -> bytes | None:
        """Return the body, or None as soon as it is known to be too large."""
        if announced.isdecimal() and int(announced[:20]) > self._max_bytes:
            return None
        body, more = bytearray(), True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            body += message.get("body", b"")
            if len(body) > self._max_bytes:
                return None
            more = message.get("more_body", False)
        return bytes(body)

    async def _answer(self, body: bytes, scope: Scope, receive: Receive, send: Send) -> None:
        messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return messages.pop() if messages else await receive()

        answering = asyncio.ensure_future(self._app(scope, replay, send))
        leaving = asyncio.ensure_future(receive())
        try:
            await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
            if not answering.done():
                answering.cancel()
        await asyncio.wait((answering,))
        if not answering.cancelled():
            answering.result()
