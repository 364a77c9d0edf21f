"""Who may send requests to a server: the key that a network address requires, and the names it answers to."""

from __future__ import annotations

import ipaddress

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

LOCAL_NAMES = frozenset(("localhost", "ip6-localhost", "ip6-loopback"))
"""Names of this machine that no name server answers for; `NAME.localhost` is one as well (RFC 6761)."""


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
