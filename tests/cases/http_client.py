"""The client of the case harness: one request on one raw connection, with every way to misbehave.

Rules of this file: headers go out as given; every byte that comes back is kept with its time; a broken or
refused connection is a result, never an exception.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

READ_BYTES = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What to send, and when to stop listening."""

    method: str = "GET"
    path: str = "/"
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes | None = None
    deadline_s: float = 60.0
    abort_after_s: float | None = None
    abort_after_chunks: int | None = None
    abort_kind: str = "fin"


@dataclass(slots=True, kw_only=True)
class Result:
    """What came back; times are `time.monotonic()` seconds, `failure` is `refused`, `reset` or `timeout`."""

    step: str
    index: int
    item: Any = None
    request_json: Any = None
    started: float = 0.0
    ended: float = 0.0
    status: int | None = None
    headers: list[tuple[str, str]] = field(default_factory=list)
    body: bytes = b""
    pieces: list[tuple[float, int]] = field(default_factory=list)
    first_byte_at: float | None = None
    complete: bool = False
    aborted: bool = False
    failure: str | None = None
    reply: Any = None
    starved_s: float = 0.0
    """How long the answering process had to wait for a core meanwhile: that is the machine's latency."""

    def header(self, name: str) -> str | None:
        """Return the first value of a header, whatever its case."""
        return next((value for key, value in self.headers if key.lower() == name.lower()), None)

    @property
    def text(self) -> str:
        """The body as text."""
        return self.body.decode("utf-8", "replace")


async def send(host: str, port: int, request: Request, result: Result) -> Result:
    """Send one request and fill in `result`; never raises for what the other side does."""
    result.started = time.monotonic()
    try:
        async with asyncio.timeout(request.deadline_s), _abort_later(request, result):
            await _exchange(host, port, request, result)
    except TimeoutError:
        result.failure = "timeout"
    except ConnectionRefusedError:
        result.failure = "refused"
    except (ConnectionError, asyncio.IncompleteReadError, OSError):
        result.failure = "reset"
    result.ended = time.monotonic()
    return result


async def send_raw(host: str, port: int, data: bytes, deadline_s: float, result: Result) -> Result:
    """Send bytes as they are and read one response, as far as it comes."""
    return await send(host, port, Request(headers={}, body=data, method="", deadline_s=deadline_s), result)


@contextlib.asynccontextmanager
async def _abort_later(request: Request, result: Result) -> AsyncIterator[None]:
    """Cancel the exchange after `abort_after_s`; leaving by itself is the client's own doing."""
    task = asyncio.current_task()
    assert task is not None
    if request.abort_after_s is None:
        yield
        return

    def abort() -> None:
        result.aborted = True
        task.cancel()

    timer = asyncio.get_running_loop().call_later(request.abort_after_s, abort)
    try:
        yield
    except asyncio.CancelledError:
        if not result.aborted or task.uncancel():
            raise
    finally:
        timer.cancel()


async def _exchange(host: str, port: int, request: Request, result: Result) -> None:
    reader, writer = await asyncio.open_connection(host, port, limit=1 << 20)
    sending = asyncio.create_task(_send(writer, request))
    try:
        await _receive(reader, request, result)
    finally:
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        _close(writer, request.abort_kind if result.aborted else "fin")


async def _send(writer: asyncio.StreamWriter, request: Request) -> None:
    writer.write(request_head(request))
    for start in range(0, len(request.body or b""), READ_BYTES * 16):
        assert request.body is not None
        writer.write(request.body[start : start + READ_BYTES * 16])
        await writer.drain()


def request_head(request: Request) -> bytes:
    """Return the request head; Host, Content-Type and Content-Length are added where they are missing."""
    if not request.method:
        return b""
    given = {name.lower() for name in request.headers}
    lines = [f"{request.method} {request.path} HTTP/1.1"]
    if "host" not in given:
        lines.append("Host: proxy.test")
    if request.body is not None:
        if "content-type" not in given:
            lines.append("Content-Type: application/json")
        if "content-length" not in given and "transfer-encoding" not in given:
            lines.append(f"Content-Length: {len(request.body)}")
    lines += [f"{name}: {value}" for name, value in request.headers.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


async def _receive(reader: asyncio.StreamReader, request: Request, result: Result) -> None:
    while True:
        head = await reader.readuntil(b"\r\n\r\n")
        if result.first_byte_at is None:
            result.first_byte_at = time.monotonic()
        status, result.headers = parse_head(head)
        if status >= 200:
            break
    result.status = status
    pieces = _body_pieces(reader, request, status, result)
    async with contextlib.aclosing(pieces):
        async for piece in pieces:
            result.pieces.append((time.monotonic(), len(piece)))
            result.body += piece
            if request.abort_after_chunks is not None and len(result.pieces) >= request.abort_after_chunks:
                result.aborted = True
                return
    result.complete = True


def parse_head(head: bytes) -> tuple[int, list[tuple[str, str]]]:
    """Return status and headers of a response head."""
    lines = head.decode("latin-1").split("\r\n")
    pairs = [line.partition(":") for line in lines[1:] if line]
    return int(lines[0].split(" ", 2)[1]), [(name, value.strip()) for name, _, value in pairs]


async def _body_pieces(
    reader: asyncio.StreamReader, request: Request, status: int, result: Result
) -> AsyncGenerator[bytes, None]:
    if request.method == "HEAD" or status in (204, 304):
        return
    if "chunked" in (result.header("Transfer-Encoding") or "").lower():
        async for piece in _chunks(reader):
            yield piece
    elif (length := result.header("Content-Length")) is not None:
        left = int(length)
        while left:
            piece = await reader.read(min(left, READ_BYTES))
            if not piece:
                raise ConnectionResetError("cut short")
            left -= len(piece)
            yield piece
    else:
        while piece := await reader.read(READ_BYTES):
            yield piece


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
        yield await reader.readexactly(size)
        await reader.readexactly(2)
    while await reader.readuntil(b"\r\n") != b"\r\n":
        pass


def _close(writer: asyncio.StreamWriter, kind: str) -> None:
    raw = writer.get_extra_info("socket")
    if kind == "rst" and raw is not None:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()
    else:
        writer.close()
