"""Writes an answer to the client: status and headers once, then bytes as they come, then one true end.

Rules of this file:
- Writes go straight to the connection's transport: aiohttp's response path costs more than all the rest of a
  relay. `Delivered` tells aiohttp afterwards that the response is out; nothing else may write in between.
- Nothing is written before `begin`; after it an error is an event in the stream, or the loss of the
  connection, never a second status line.
- A client that reads too slowly pauses the instance; one that reads nothing for `idle_s` is given up.
"""

from __future__ import annotations

import asyncio
from functools import lru_cache
from http import HTTPStatus

from aiohttp import web
from aiohttp.http import HttpVersion11

from epdctl.errors import EpdError
from epdctl.http_errors import RESPONSE_STARTED
from epdctl.proxy.connection import WRITE_BYTES, bounded_groups
from epdctl.proxy.headers import RawHeaders, relayed_headers
from epdctl.proxy.sse import StreamTail, error_event

_JOIN_BYTES = 16 * 1024
_REASONS = {status.value: status.phrase.encode() for status in HTTPStatus}


class ClientGone(Exception):
    """The client has left, or reads nothing any more."""


class Delivered(web.StreamResponse):
    """A response that was written already; aiohttp only learns whether the connection lives on."""

    def __init__(self, status: int, *, lives_on: bool) -> None:
        super().__init__(status=status)
        self._lives_on = lives_on

    @property
    def prepared(self) -> bool:
        """Always: its headers are out."""
        return True

    @property
    def keep_alive(self) -> bool:
        """Whether another request may follow on the connection."""
        return self._lives_on

    async def prepare(self, request: web.BaseRequest) -> None:
        """Write nothing."""

    async def write_eof(self, data: bytes = b"") -> None:
        """Write nothing."""


@lru_cache(maxsize=256)
def delivered(status: int, *, lives_on: bool) -> Delivered:
    """Return the response that says so; it holds nothing of a request, so one serves all."""
    return Delivered(status, lives_on=lives_on)


class Delivery:
    """One answer to one client; a `Sink` for the body of an instance's answer."""

    def __init__(self, request: web.Request, request_id: str, *, idle_s: float) -> None:
        self._request = request
        self._protocol = request.protocol
        self._transport: asyncio.Transport | None = None
        self._request_id = request_id
        self._idle_s = idle_s
        self._is_chunked = False
        self._status = 0
        self._tail: StreamTail | None = None
        self._lives_on = True

    @property
    def is_started(self) -> bool:
        """Whether status and headers are out."""
        return self._status != 0

    @property
    def is_finished(self) -> bool:
        """Whether the stream said that it is done."""
        return self._tail is not None and self._tail.is_done

    @property
    def is_client_there(self) -> bool:
        """Whether the client's connection is open."""
        transport = self._request.transport
        return transport is not None and not transport.is_closing()

    def begin_stream(self, status: int, headers: RawHeaders) -> None:
        """Send status and headers of an event stream, whose length nobody knows."""
        self._is_chunked = self._request.version >= HttpVersion11
        self._tail = StreamTail()
        self._lives_on = self._is_chunked and bool(self._request.keep_alive)
        framing = b"transfer-encoding: chunked\r\n" if self._is_chunked else b""
        self._transport = self._open_transport()
        self._transport.write(self._head(status, headers, framing))

    async def send_whole(self, status: int, headers: RawHeaders, body: bytes) -> Delivered:
        """Send a whole answer, a bounded piece at a time; raises ClientGone."""
        self._lives_on = bool(self._request.keep_alive)
        head = self._head(status, headers, b"content-length: %d\r\n" % len(body))
        if len(head) + len(body) <= _JOIN_BYTES:
            self._open_transport().write(head + body)
        else:
            for group in bounded_groups((head, body), WRITE_BYTES):
                self._open_transport().writelines(group)
                await self.drained()
        return delivered(status, lives_on=self._lives_on)

    def write(self, pieces: list[bytes]) -> bool:
        """Send a part of the body, as one chunk; say whether the client keeps up."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return False
        data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        if not self._is_chunked:
            transport.write(data)
        elif len(data) <= _JOIN_BYTES:
            transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        else:
            transport.writelines((b"%x\r\n" % len(data), data, b"\r\n"))
        if self._tail is not None:
            self._tail.feed(data)
        return not self._protocol.writing_paused

    async def drained(self) -> None:
        """Wait until the client has taken what was written; raise ClientGone when it does not."""
        if self._request.transport is None:
            raise ClientGone
        try:
            async with asyncio.timeout(self._idle_s):
                await self._request.writer.drain()
        except (TimeoutError, ConnectionError) as error:
            raise ClientGone from error

    def end(self) -> Delivered:
        """End a stream."""
        if self._is_chunked:
            self._open_transport().write(b"0\r\n\r\n")
        return delivered(self._status, lives_on=self._lives_on)

    def fail(self, error: EpdError) -> Delivered:
        """End a started answer that cannot be completed: by an error event, or by cutting the connection."""
        if self._tail is not None and self.is_client_there:
            self.write([error_event(error, self._tail)])
            self.end()
        else:
            self.cut()
        return delivered(self._status, lives_on=False)

    def cut(self) -> None:
        """Close the connection at once: the client sees that the answer is not whole."""
        if self._request.transport is not None:
            self._request.transport.abort()

    def _open_transport(self) -> asyncio.Transport:
        transport = self._request.transport
        if transport is None:
            raise ClientGone
        return transport

    def _head(self, status: int, headers: RawHeaders, framing: bytes) -> bytes:
        self._status = status
        self._request[RESPONSE_STARTED] = True
        lines = [b"%b: %b\r\n" % header for header in relayed_headers(headers)]
        return b"".join(
            (
                b"HTTP/1.1 %d %b\r\n" % (status, _REASONS.get(status, b"")),
                *lines,
                b"server: epdctl\r\nx-request-id: ",
                self._request_id.encode("ascii"),
                b"\r\n",
                framing,
                self._connection_line(),
                b"\r\n",
            )
        )

    def _connection_line(self) -> bytes:
        if not self._lives_on:
            return b"connection: close\r\n"
        return b"" if self._request.version >= HttpVersion11 else b"connection: keep-alive\r\n"
