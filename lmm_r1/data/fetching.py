"""Fetches images by their URLs: from public addresses, within a size, a time and a number of redirects."""

from __future__ import annotations

import base64
import http.client
import ipaddress
import socket
import ssl
import threading
import time
import urllib.request
from contextlib import closing, suppress
from dataclasses import dataclass
from urllib.parse import quote, unquote, urljoin, urlsplit

import tenacity

from lmm_r1.data.media_access import media_limits

MAX_BYTES = 64 * 2**20
MAX_REDIRECTS = 5
DEADLINE_S = 30.0
"""For the whole of a download, with redirects and further attempts."""
_ATTEMPTS = 3
_REDIRECTS = (301, 302, 303, 307, 308)
_PORTS = {"http": 80, "https": 443}
# Azure answers its metadata at an address that is public otherwise.
_METADATA = frozenset((ipaddress.ip_address("168.63.129.16"),))
# Gateways translate such an address to the IPv4 address in its last four bytes.
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class RefusedURL(OSError):
    """A URL that is not fetched, or a reply that is not taken; another attempt would end alike."""


class _BrokenDownload(OSError):
    """A failure of a server or a connection, which may not come again."""


def fetch(url: str) -> bytes:
    """Return what a URL serves.

    Connection errors, server errors and 429 are tried again. Raises OSError, and RefusedURL if the URL, a redirect or the
    reply is not acceptable.
    """
    deadline = time.monotonic() + DEADLINE_S
    attempts = tenacity.Retrying(
        retry=tenacity.retry_if_exception_type(_BrokenDownload),
        stop=tenacity.stop_after_attempt(_ATTEMPTS) | tenacity.stop_after_delay(DEADLINE_S),
        wait=tenacity.wait_exponential(multiplier=0.5),
        reraise=True,
    )
    return attempts(_followed, url, deadline)


def _followed(url: str, deadline: float) -> bytes:
    for _ in range(MAX_REDIRECTS + 1):
        body, location = _get(url, deadline)
        if location is None:
            return body
        try:
            url = urljoin(url, location)
        except ValueError as error:
            raise RefusedURL(f"it redirects to no URL ({error})") from error
    raise RefusedURL(f"it redirects more than {MAX_REDIRECTS} times")


def _get(url: str, deadline: float) -> tuple[bytes, str | None]:
    """Return what one server replies, and where a redirect leads; raises OSError."""
    target = _Target.of(url)
    late = threading.Event()
    try:
        with closing(target.connection(timeout=_left(deadline))) as connection:
            connection.connect()
            # The connection forgets it before the reply is read, if no other request may follow.
            connected = connection.sock

            def cut() -> None:
                late.set()
                with suppress(OSError):
                    connected.shutdown(socket.SHUT_RDWR)

            # The timeout of a socket is for each of its reads, and a server may send byte by byte.
            clock = threading.Timer(_left(deadline), cut)
            clock.daemon = True
            clock.start()
            try:
                reply = _asked(connection, target)
            finally:
                clock.cancel()
            if late.is_set():
                # Of a reply without a length, the cut looks like the end.
                raise TimeoutError
            return reply
    except RefusedURL:
        raise
    except ssl.SSLCertVerificationError as error:
        raise RefusedURL(f"the certificate of {target.host} is not valid ({error.verify_message})") from error
    except (OSError, http.client.HTTPException) as error:
        if late.is_set() or isinstance(error, TimeoutError):
            raise RefusedURL(f"it took longer than {DEADLINE_S:g} s") from error
        if isinstance(error, http.client.HTTPException):
            raise _BrokenDownload(f"the download broke off ({type(error).__name__}: {error})") from error
        raise _BrokenDownload(error.strerror or str(error)) from error


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise RefusedURL(f"it took longer than {DEADLINE_S:g} s")
    return left


def _asked(connection: http.client.HTTPConnection, target: _Target) -> tuple[bytes, str | None]:
    headers = {"User-Agent": "lmm-r1", "Accept": "image/*", "Host": target.authority}
    connection.request("GET", target.path, headers=headers | (target.proxy_headers if target.scheme == "http" else {}))
    reply = connection.getresponse()
    location = reply.headers.get("location")
    if reply.status in _REDIRECTS and location:
        return b"", location
    if reply.status >= 500 or reply.status == 429:
        raise _BrokenDownload(f"HTTP Error {reply.status}: {reply.reason}")
    if reply.status != 200:
        raise RefusedURL(f"HTTP Error {reply.status}: {reply.reason}")
    announced = reply.headers.get("content-length", "")
    expected = int(announced[:20]) if announced.isdecimal() else 0
    body = b"" if expected > MAX_BYTES else reply.read(MAX_BYTES + 1)
    if max(expected, len(body)) > MAX_BYTES:
        raise RefusedURL(f"it is larger than {MAX_BYTES // 2**20} MiB")
    if len(body) < expected:
        raise _BrokenDownload(f"the download broke off after {len(body)} of {expected} bytes")
    return body, None


@dataclass(frozen=True, kw_only=True)
class _Target:
    """The server of a URL, and what it is asked for."""

    scheme: str
    host: str
    port: int
    path: str
    """Of the request; the whole URL if a proxy is asked."""
    authority: str
    proxy: str | None

    @classmethod
    def of(cls, url: str) -> _Target:
        """Return the target; raises RefusedURL for a URL that is not fetched, whatever its server is."""
        try:
            parts = urlsplit(url)
            scheme, port = parts.scheme, parts.port
            host = (parts.hostname or "").encode("idna").decode("ascii")
        except (ValueError, UnicodeError) as error:
            raise RefusedURL(f"it is not a valid URL ({error})") from error
        if scheme not in _PORTS:
            raise RefusedURL(f"only http and https are fetched, not {scheme or 'a text without a scheme'}")
        if not host or parts.username is not None or any(character <= " " or character == "\x7f" for character in url):
            raise RefusedURL("it is not a valid URL: it needs a host, and must have no user name and no blanks")
        proxy = urllib.request.getproxies().get(scheme)
        if proxy is not None and urllib.request.proxy_bypass(host):
            proxy = None
        path = quote(parts.path or "/", safe="/%:@!$&'()*+,;=~-._") + (
            f"?{quote(parts.query, safe='/%:@!$&()*+,;=~-._?[]')}" if parts.query else ""
        )
        name = f"[{host}]" if ":" in host else host
        authority = name if port in (None, _PORTS[scheme]) else f"{name}:{port}"
        return cls(
            scheme=scheme,
            host=host,
            port=port or _PORTS[scheme],
            path=f"http://{authority}{path}" if proxy is not None and scheme == "http" else path,
            authority=authority,
            proxy=proxy,
        )

    def connection(self, *, timeout: float) -> http.client.HTTPConnection:
        """Return a connection, not yet made, that can only reach an address that is allowed."""
        kind = http.client.HTTPSConnection if self.scheme == "https" else http.client.HTTPConnection
        if self.proxy is None:
            made = kind(self.host, self.port, timeout=timeout)
            addresses = _addresses(self.host, self.port)
            # What was checked is what is connected to: a name server may give another address the next time.
            made._create_connection = lambda place, timeout, source: _connected(addresses, self.port, timeout)  # type: ignore[attr-defined]
            return made
        # The proxy looks up the name, and only an address can be checked here.
        if (literal := _literal(self.host)) is not None:
            _check_address(literal, host=self.host)
        proxy = urlsplit(self.proxy if "://" in self.proxy else f"http://{self.proxy}")
        made = kind(proxy.hostname or "", proxy.port or 80, timeout=timeout)
        if self.scheme == "https":
            made.set_tunnel(self.host, self.port, headers=self.proxy_headers)
        return made

    @property
    def proxy_headers(self) -> dict[str, str]:
        """The headers that the proxy asks for; none without a user in its address."""
        parts = urlsplit(self.proxy or "")
        if parts.username is None:
            return {}
        user = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        return {"Proxy-Authorization": f"Basic {base64.b64encode(user.encode()).decode()}"}


def _addresses(host: str, port: int) -> list[str]:
    """Return the addresses of a host; raises RefusedURL if one of them is not public."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise _BrokenDownload(f"no address of {host} is known ({error.strerror or error})") from error
    addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
    for address in addresses:
        _check_address(ipaddress.ip_address(address.partition("%")[0]), host=host)
    return addresses


def _literal(host: str) -> Address | None:
    try:
        return ipaddress.ip_address(socket.inet_ntoa(socket.inet_aton(host)))
    except OSError:
        pass
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return ipaddress.ip_address("127.0.0.1") if host == "localhost" or host.endswith(".localhost") else None


def _check_address(address: Address, *, host: str) -> None:
    if not media_limits().allow_private_urls and not is_public(address):
        raise RefusedURL(
            f"{host} is at {address}, which is this machine or a private network; allow such addresses with "
            "LMM_R1_ALLOW_PRIVATE_URLS=1, or keep the image as a file"
        )


def is_public(address: Address) -> bool:
    """Return whether an address is that of a server on the internet, also one that is written inside of another."""
    if isinstance(address, ipaddress.IPv6Address):
        inner = [address.ipv4_mapped, address.sixtofour, *(address.teredo or ())]
        if address in _NAT64:
            inner.append(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
        if any(one is not None and not is_public(one) for one in inner):
            return False
        if address.ipv4_mapped is not None:
            return True
    return address.is_global and not address.is_multicast and address not in _METADATA


def _connected(addresses: list[str], port: int, timeout: float) -> socket.socket:
    for address in addresses[:-1]:
        try:
            return socket.create_connection((address, port), timeout)
        except OSError:
            continue
    return socket.create_connection((addresses[-1], port), timeout)
