"""Fetches the bytes of a media part: `data:`, `http(s):` and `file:` URLs, under limits.

Rules of this file:
- Every limit holds while reading, not after: bytes, redirects, time. Bytes are counted before they are kept.
- A name is looked up once per hop; what was checked is what is connected to (the session's resolver hands out
  nothing else), so a name that changes its address between check and use gains nothing.
- Foreign exceptions end here; messages name no address, no path and no query.
- Nothing slow runs on the event loop: base64, files and name look-ups go to `threads`.
"""

from __future__ import annotations

import asyncio
import binascii
import os
import socket
import stat
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit

import aiohttp
import pybase64
from aiohttp.abc import AbstractResolver, ResolveResult

from epdctl.errors import InvalidRequest, MediaUnavailable, UnsupportedMedia
from epdctl.worker.media_address import (
    REFUSAL,
    FetchRules,
    MediaTarget,
    check_addresses,
    check_host,
    parse_media_url,
)

Lookup = Callable[[str, int], Awaitable[Sequence[str]]]
"""`lookup(host, port)` returns the addresses of a host name; raises OSError when it has none."""
Take = Callable[[int], None]
"""Called with a number of bytes before they are kept; raises what refuses them. Called on threads, too."""

_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_CHUNK_BYTES = 256 * 1024
_HEADERS = {"User-Agent": "epdctl", "Accept": "image/*,video/*,*/*;q=0.5", "Accept-Encoding": "identity"}


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaLimits:
    """What a fetch may cost, and where it may go."""

    max_bytes: int
    timeout_s: float
    max_redirects: int = 3
    rules: FetchRules = field(default_factory=FetchRules)
    local_path: Path | None = None
    """Folder that `file:` URLs may name files in; None refuses them."""


async def lookup_addresses(host: str, port: int) -> list[str]:
    """Return the addresses of `host` from the system's resolver."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


class _CheckedResolver(AbstractResolver):
    """Looks names up, refuses those that may not be fetched, and hands out exactly what it checked."""

    def __init__(self, rules: FetchRules, lookup: Lookup) -> None:
        self._rules = rules
        self._lookup = lookup

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        addresses = await self._lookup(host, port)
        check_addresses(
            self._rules, MediaTarget(url="", scheme="", host=host.rstrip("."), port=port), addresses
        )
        return [_resolved(host, port, address) for address in addresses]

    async def close(self) -> None:
        """Nothing to close."""


def _resolved(host: str, port: int, address: str) -> ResolveResult:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    flags = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
    return ResolveResult(hostname=host, host=address, port=port, family=family, proto=0, flags=flags)


class MediaFetcher:
    """Fetches media; owns its HTTP session. Make it inside a running event loop, close it there."""

    def __init__(self, limits: MediaLimits, threads: Executor, *, lookup: Lookup = lookup_addresses) -> None:
        self._limits = limits
        self._threads = threads
        connector = aiohttp.TCPConnector(
            resolver=_CheckedResolver(limits.rules, lookup), use_dns_cache=False, limit=64, force_close=True
        )
        self._session = aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            trust_env=False,
            headers=_HEADERS,
        )

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()

    async def fetch(self, url: str, take: Take = lambda _: None) -> bytes:
        """Return the bytes that `url` names, each counted by `take` before it is kept.

        Raises what `take` raises, and
            MediaUnavailable: refused, not there, too large, too slow, or not base64.
            UnsupportedMedia: a scheme that is not served.
            InvalidRequest: a malformed URL.
        """
        scheme = url[:5].lower()
        if scheme == "data:":
            return await self._run(decode_data_url, url, self._limits.max_bytes, take)
        if scheme == "file:":
            path, most = self._limits.local_path, self._limits.max_bytes
            return await self._run(read_local_file, url, path, most, take)
        try:
            async with asyncio.timeout(self._limits.timeout_s):
                return await self._fetch_http(url, take)
        except TimeoutError as error:
            text = f"the media was not there within {self._limits.timeout_s:g} s (--media-timeout)"
            raise MediaUnavailable(text) from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise MediaUnavailable("the media URL could not be fetched") from error

    async def _run(self, function: Callable[..., bytes], *arguments: object) -> bytes:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)

    async def _fetch_http(self, url: str, take: Take) -> bytes:
        for _ in range(self._limits.max_redirects + 1):
            target = self._checked(url)
            async with self._session.get(target.url, allow_redirects=False) as response:
                location = response.headers.get("Location")
                if response.status in _REDIRECTS and location:
                    url = urljoin(url, location)
                    continue
                return await self._read(response, take)
        text = f"the media URL redirects more than {self._limits.max_redirects} times (--media-redirects)"
        raise MediaUnavailable(text)

    def _checked(self, url: str) -> MediaTarget:
        target = parse_media_url(url)
        check_host(self._limits.rules, target)
        try:
            literal = str(ip_address(target.host))
        except ValueError:
            return target
        # An address instead of a name is never looked up, so the resolver does not see it.
        check_addresses(self._limits.rules, target, [literal])
        return target

    async def _read(self, response: aiohttp.ClientResponse, take: Take) -> bytes:
        if response.status != 200:
            raise MediaUnavailable(f"the media URL answered with status {response.status}")
        if response.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise MediaUnavailable("the media URL answered with a compressed body, which was not asked for")
        if (response.content_length or 0) > self._limits.max_bytes:
            raise _too_large(self._limits.max_bytes)
        body = bytearray()
        async for chunk in response.content.iter_chunked(_CHUNK_BYTES):
            if len(body) + len(chunk) > self._limits.max_bytes:
                raise _too_large(self._limits.max_bytes)
            take(len(chunk))
            body += chunk
        return bytes(body)


def _too_large(max_bytes: int) -> MediaUnavailable:
    return MediaUnavailable(f"the media is larger than {max_bytes} bytes (--max-media-bytes)")


def decode_data_url(url: str, max_bytes: int, take: Take = lambda _: None) -> bytes:
    """Return the bytes of a base64 data URL; raises InvalidRequest, MediaUnavailable or UnsupportedMedia."""
    head, comma, payload = url.partition(",")
    if not comma:
        raise InvalidRequest("the data URL has no comma")
    if not head.lower().endswith(";base64"):
        raise UnsupportedMedia("data URLs must be base64 encoded (data:<type>;base64,...)")
    if len(payload) // 4 * 3 - 2 > max_bytes:
        raise _too_large(max_bytes)
    take(len(payload) // 4 * 3)
    try:
        data = bytes(pybase64.b64decode(payload, validate=True))
    except (binascii.Error, ValueError) as error:
        raise MediaUnavailable("the data URL is not valid base64") from error
    if len(data) > max_bytes:
        raise _too_large(max_bytes)
    return data


def read_local_file(url: str, root: Path | None, max_bytes: int, take: Take = lambda _: None) -> bytes:
    """Return the bytes of the file that a `file:` URL names; raises MediaUnavailable or InvalidRequest.

    The path is resolved, symlinks included, before it is compared with `root`, and compared again once the
    file is open: a link that is swapped in between is refused as well.
    """
    parts = urlsplit(url)
    path = unquote(parts.path)
    if (
        parts.netloc.lower() not in ("", "localhost")
        or parts.query
        or not path.startswith("/")
        or "\0" in path
    ):
        raise InvalidRequest("a file URL must look like file:///folder/name")
    if root is None:
        raise MediaUnavailable(REFUSAL.replace("--allowed-media-domains", "--allowed-local-media-path"))
    try:
        descriptor = os.open(Path(path).resolve(strict=True), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            opened = Path(f"/proc/self/fd/{descriptor}").resolve()
            if not opened.is_relative_to(root.resolve()):
                raise _no_such_file()
            facts = os.fstat(descriptor)
            if not stat.S_ISREG(facts.st_mode):
                raise _no_such_file()
            if facts.st_size > max_bytes:
                raise _too_large(max_bytes)
            take(facts.st_size)
            return file.read(facts.st_size)  # what is appended meanwhile was not counted
    except (OSError, ValueError, RuntimeError) as error:
        raise _no_such_file() from error


def _no_such_file() -> MediaUnavailable:
    return MediaUnavailable("the file URL names no readable file under --allowed-local-media-path")
