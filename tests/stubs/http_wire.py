"""The least HTTP/1.1 a stub needs, on asyncio streams, so that it can break any rule on purpose.

Rules of this file: it parses what a well-behaved client sends and raises BadRequest for the rest; it never
adds a header that the caller did not name.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

REASONS = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    500: "Internal Server Error",
}


class BadRequest(Exception):
    """The client does not speak HTTP/1.1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """Request line and headers, names as they came."""

    method: str
    target: str
    version: str
    headers: tuple[tuple[str, str], ...]

    def get(self, name: str, default: str | None = None) -> str | None:
        """Return the first value of header `name`, whatever its case."""
        for key, value in self.headers:
            if key.lower() == name.lower():
                return value
        return default

    @property
    def path(self) -> str:
        """The target without its query."""
        return self.target.partition("?")[0]

    @property
    def keeps_alive(self) -> bool:
        """Whether the client wants the connection to stay."""
        return "close" not in (self.get("Connection") or "").lower() and self.version == "HTTP/1.1"


async def read_head(reader: asyncio.StreamReader) -> Head | None:
    """Return the next request's head, or None when the client closed between requests."""
    try:
        raw = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    except asyncio.LimitOverrunError as error:
        raise BadRequest("head too long") from error
    lines = raw.decode("latin-1").split("\r\n")
    words = lines[0].split(" ")
    if len(words) != 3:
        raise BadRequest(lines[0])
    headers: list[tuple[str, str]] = []
    for line in lines[1:-2]:
        name, colon, value = line.partition(":")
        if not colon:
            raise BadRequest(line)
        headers.append((name, value.strip()))
    return Head(method=words[0], target=words[1], version=words[2], headers=tuple(headers))


async def read_body(
    reader: asyncio.StreamReader, head: Head, pace: Callable[[int], Awaitable[None]] | None = None
) -> bytes:
    """Return the request's body; `pace` is awaited with the size of every piece, to read slowly."""
    if "chunked" in (head.get("Transfer-Encoding") or "").lower():
        return await _read_chunked(reader)
    left = int(head.get("Content-Length") or 0)
    pieces = bytearray()
    while left:
        piece = await reader.read(min(left, 65_536 if pace is None else 4096))
        if not piece:
            raise ConnectionResetError("the client left within its body")
        pieces += piece
        left -= len(piece)
        if pace is not None:
            await pace(len(piece))
    return bytes(pieces)


async def _read_chunked(reader: asyncio.StreamReader) -> bytes:
    pieces: list[bytes] = []
    while True:
        size = int((await reader.readline()).split(b";")[0], 16)
        if size == 0:
            while (await reader.readline()) not in (b"\r\n", b""):
                pass
            return b"".join(pieces)
        pieces.append(await reader.readexactly(size))
        await reader.readexactly(2)


def head_bytes(status: int, headers: list[tuple[str, str]]) -> bytes:
    """Return a response head."""
    lines = [f"HTTP/1.1 {status} {REASONS.get(status, 'Status')}"]
    lines += [f"{name}: {value}" for name, value in headers]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def chunk_bytes(piece: bytes) -> bytes:
    """Return one chunk of a chunked body; an empty piece ends it."""
    return b"%x\r\n%s\r\n" % (len(piece), piece)


def reset_connection(writer: asyncio.StreamWriter) -> None:
    """Close with a TCP reset rather than an end of stream."""
    raw = writer.get_extra_info("socket")
    if raw is not None and raw.fileno() >= 0:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
