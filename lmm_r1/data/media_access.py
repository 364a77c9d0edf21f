"""Images and files that rows name: how large they may be, which files and addresses are allowed, and how URLs are fetched."""

from __future__ import annotations

import asyncio
import functools
import ipaddress
import math
import os
import socket
import stat
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING
from urllib.parse import urljoin, urlsplit

from lmm_r1.errors import UserError

if TYPE_CHECKING:
    import aiohttp
    from aiohttp.abc import AbstractResolver

MEGAPIXELS = 64.0
"""The largest image that is decoded if no flag says otherwise; 8,000 x 8,000 pixels need 190 MB in RGB."""
_MOST_MEGAPIXELS = "LMM_R1_MAX_IMAGE_MEGAPIXELS"
_PRIVATE_URLS = "LMM_R1_ALLOW_PRIVATE_URLS"
VARIABLES = (_MOST_MEGAPIXELS, _PRIVATE_URLS)


@dataclass(frozen=True, kw_only=True)
class MediaLimits:
    """Limits that all processes of a run find in their environment."""

    max_megapixels: float = MEGAPIXELS
    """Images with more pixels are refused before they are decoded."""
    allow_private_urls: bool = False
    """Whether images are fetched from this machine and from private networks."""

    @property
    def max_pixels(self) -> int:
        return round(self.max_megapixels * 1_000_000)

    def apply(self) -> None:
        """Let them hold for this process, and for those that get its environment."""
        changed = {
            _MOST_MEGAPIXELS: None if self.max_megapixels == MEGAPIXELS else repr(self.max_megapixels),
            _PRIVATE_URLS: "1" if self.allow_private_urls else None,
        }
        for name, value in changed.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def media_limits() -> MediaLimits:
    """Return the limits of this process; raises UserError for a number of megapixels that is none."""
    given = os.environ.get(_MOST_MEGAPIXELS) or MEGAPIXELS
    try:
        megapixels = float(given)
    except ValueError:
        megapixels = math.nan
    if not 0 < megapixels < math.inf:
        raise UserError(f"{_MOST_MEGAPIXELS}={given} must be a number above 0; correct or unset it")
    return MediaLimits(
        max_megapixels=megapixels,
        allow_private_urls=os.environ.get(_PRIVATE_URLS) == "1",
    )


def limits_environment() -> dict[str, str]:
    """Return the variables with which another process has the same limits."""
    return {name: os.environ[name] for name in VARIABLES if os.environ.get(name)}


_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def _check_regular(mode: int) -> None:
    if not stat.S_ISREG(mode):
        kind = next((name for is_kind, name in _KINDS if is_kind(mode)), "something else")
        raise OSError(f"it is {kind}, not a file")


def open_file(path: Path) -> IO[bytes]:
    """Return a regular file, opened for reading; raises OSError for a pipe, a device and the like, at once.

    It is looked at before it is opened, because opening a device may have an effect, and afterwards, because it may have
    been replaced in between.
    """
    _check_regular(os.stat(path).st_mode)
    # Opening a pipe does not wait for a writer then.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _check_regular(os.fstat(descriptor).st_mode)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def media_roots(base_dir: Path, *, image_dir: Path | None = None) -> tuple[Path, ...] | None:
    """Return the folders below which rows may name files; None if they may name all, because the user has written them.

    Rows of a downloaded dataset are somebody else's: one could show a private file to a model, or to who reads its answers.

    Args:
        base_dir: the folder of the row file.
        image_dir: the folder of images that the user has named.
    """
    dataset = downloaded_folder(base_dir)
    if dataset is None:
        return None
    return (dataset,) if image_dir is None else (dataset, image_dir)


def downloaded_folder(base_dir: Path) -> Path | None:
    """Return the folder of the dataset if a row file's folder was downloaded from the Hugging Face hub, else None.

    These are the folders of its caches, and those that `hf download --local-dir` has filled.
    """
    return _downloaded(os.path.abspath(base_dir), *_caches())


def hub_folder(name: str) -> Path:
    """Return a folder that stands for a dataset on the hub whose rows are read by its name."""
    return Path(_caches()[1]) / name.replace("/", "___")


def _caches() -> tuple[str, str, str]:
    """Return the folders of Hugging Face: of the hub's files, of prepared datasets, and of both."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    home = os.path.expanduser(os.environ.get("HF_HOME") or os.path.join(cache, "huggingface"))
    hub = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE") or os.path.join(home, "hub")
    prepared = os.environ.get("HF_DATASETS_CACHE") or os.path.join(home, "datasets")
    return os.path.abspath(hub), os.path.abspath(prepared), os.path.abspath(home)


@functools.lru_cache(maxsize=1024)
def _downloaded(base_dir: str, hub: str, prepared: str, home: str) -> Path | None:
    path = Path(base_dir)
    for cache in (Path(hub), Path(prepared)):
        if path.is_relative_to(cache) and path != cache:
            return cache / path.relative_to(cache).parts[0]
    for folder in (path, *path.parents):
        kept = folder / ".cache" / "huggingface"
        if kept != Path(home) and (kept / "download").is_dir():
            return folder
    return None


def is_below(path: str, roots: Sequence[Path]) -> bool:
    """Return whether a path is below one of the folders when links are followed."""
    try:
        found = Path(path).resolve()
        return any(found.is_relative_to(root.resolve()) for root in roots)
    except (OSError, ValueError, RuntimeError):
        # A null byte, or a loop of links.
        return False


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
