"""Fetches images by their URLs: from public addresses, within a size, a time and a number of redirects."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING
from urllib.parse import urljoin, urlsplit

from lmm_r1.data.media_access import media_limits

if TYPE_CHECKING:
    import aiohttp
    from aiohttp.abc import AbstractResolver

MAX_BYTES = 64 * 2**20
MAX_REDIRECTS = 5
DEADLINE_S = 30.0
"""For the whole of a download, with redirects and further attempts."""
WAITS_S = (0.5, 1.0)
"""Before each further attempt."""
_REDIRECTS = (301, 302, 303, 307, 308)
_PORTS = {"http": 80, "https": 443}
_HEADERS = {"User-Agent": "lmm-r1", "Accept": "image/*", "Accept-Encoding": "identity"}
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
    # In its own thread, because the caller may run in an event loop.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, _tried(url, deadline)).result()


async def _tried(url: str, deadline: float) -> bytes:
    for wait_s in WAITS_S:
        try:
            return await _followed(url, deadline)
        except _BrokenDownload:
            await asyncio.sleep(wait_s)
    return await _followed(url, deadline)


async def _followed(url: str, deadline: float) -> bytes:
    for _ in range(MAX_REDIRECTS + 1):
        try:
            body, location = await asyncio.wait_for(_get(url), deadline - time.monotonic())
        except asyncio.TimeoutError as error:
            raise RefusedURL(f"it took longer than {DEADLINE_S:g} s") from error
        if location is None:
            return body
        try:
            url = urljoin(url, location)
        except ValueError as error:
            raise RefusedURL(f"it redirects to no URL ({error})") from error
    raise RefusedURL(f"it redirects more than {MAX_REDIRECTS} times")


async def _get(url: str) -> tuple[bytes, str | None]:
    """Return what one server replies, and where a redirect leads; raises OSError."""
    import aiohttp

    scheme, host, port = _checked(url)
    proxy = urllib.request.getproxies().get(scheme)
    resolver = None
    if proxy is None or urllib.request.proxy_bypass(host):
        resolver, proxy = _pinned(await _addresses(host, port)), None
    else:
        # The proxy looks up the name; only an address in the URL was checked.
        proxy = proxy if "://" in proxy else f"http://{proxy}"
    try:
        connector = aiohttp.TCPConnector(resolver=resolver, use_dns_cache=False)
        async with aiohttp.ClientSession(
            connector=connector, timeout=aiohttp.ClientTimeout(), auto_decompress=False
        ) as session:
            async with session.get(url, proxy=proxy, headers=_HEADERS, allow_redirects=False) as reply:
                return await _read(reply)
    except aiohttp.ClientConnectorCertificateError as error:
        raise RefusedURL(f"the certificate of {host} is not valid ({error.certificate_error})") from error
    except aiohttp.ClientOSError as error:
        raise _BrokenDownload(error.strerror or str(error)) from error
    except aiohttp.ClientError as error:
        raise _BrokenDownload(f"the download broke off ({type(error).__name__}: {error})") from error


def _pinned(addresses: list[str]) -> AbstractResolver:
    """Return a resolver to addresses that were checked: a name server may give another address the next time."""
    from aiohttp.abc import AbstractResolver, ResolveResult

    class Pinned(AbstractResolver):
        async def resolve(
            self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
        ) -> list[ResolveResult]:
            families = [socket.AF_INET6 if ":" in address else socket.AF_INET for address in addresses]
            return [
                ResolveResult(
                    hostname=host, host=address, port=port, family=kind, proto=0, flags=socket.AI_NUMERICHOST
                )
                for address, kind in zip(addresses, families, strict=True)
            ]

        async def close(self) -> None:
            pass

    return Pinned()


async def _read(reply: aiohttp.ClientResponse) -> tuple[bytes, str | None]:
    location = reply.headers.get("location")
    if reply.status in _REDIRECTS and location:
        return b"", location
    if reply.status >= 500 or reply.status == 429:
        raise _BrokenDownload(f"HTTP Error {reply.status}: {reply.reason}")
    if reply.status != 200:
        raise RefusedURL(f"HTTP Error {reply.status}: {reply.reason}")
    body = bytearray()
    while (reply.content_length or 0) <= MAX_BYTES and len(body) <= MAX_BYTES:
        if not (chunk := await reply.content.readany()):
            return bytes(body), None
        body += chunk
    raise RefusedURL(f"it is larger than {MAX_BYTES // 2**20} MiB")


def _checked(url: str) -> tuple[str, str, int]:
    """Return the scheme, host and port of a URL; raises RefusedURL if it is not fetched, whatever its server is."""
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
    if (literal := _literal(host)) is not None:
        _check_address(literal, host=host)
    return scheme, host, port or _PORTS[scheme]


async def _addresses(host: str, port: int) -> list[str]:
    """Return the addresses of a host; raises RefusedURL if one of them is not public."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
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
