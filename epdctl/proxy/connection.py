"""One HTTP/1.1 connection to an instance: sends a request in bounded pieces, parses the answer with llhttp.

Rules of this file:
- One exchange at a time; whoever started it either reads the answer to its end or calls `abort`.
- No call writes or reads more than a bounded number of bytes in one turn of the event loop, so that a large
  picture never holds up the streams beside it.
- Nothing waits without somebody who wakes it: the end of the answer, the loss of the connection, or `expire`.
- Failures leave as `CallFailed`; no exception of asyncio or httptools does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Protocol, cast

import httptools

from epdctl.proxy.cut import Body, Piece
from epdctl.proxy.headers import RawHeaders, header_of
from epdctl.proxy.retry import FailureKind

WRITE_BYTES = 256 * 1024
"""The most that one call writes to a socket."""

READ_BYTES = 128 * 1024
"""The most that one call reads from a socket; also what is read ahead of a slow reader."""

MAX_HEAD_BYTES = 64 * 1024


class CallFailed(Exception):
    """An exchange did not end with a whole answer.

    UNREACHABLE: refused, or lost before the first byte. BROKEN: lost inside the answer. TIMEOUT: the deadline
    was over. PROTOCOL: what came is not an HTTP answer.
    """

    def __init__(self, kind: FailureKind) -> None:
        super().__init__(kind.value)
        self.kind = kind


class Sink(Protocol):
    """Where the body of an answer goes while it arrives."""

    def write(self, pieces: list[bytes]) -> bool:
        """Take what arrived in one read; say whether more may come at once."""
        ...

    async def drained(self) -> None:
        """Return when more may come; raise when that takes too long or the other side is gone."""
        ...


class Connection(asyncio.BufferedProtocol):
    """One connection; `buffer` is shared by all connections of a loop, because a read is used up at once."""

    def __init__(self, buffer: memoryview) -> None:
        self._loop = asyncio.get_running_loop()
        self._buffer = buffer
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._writable: asyncio.Future[None] | None = None
        self._is_write_paused = False
        self._is_busy = False
        self._lost = False
        self.idle_until = 0.0
        self.exchanges = 0
        self._reset()

    def _reset(self) -> None:
        self.status = 0
        self.headers: RawHeaders = []
        self._pieces: list[bytes] = []
        self._buffered = 0
        self._head_bytes = 0
        self._sink: Sink | None = None
        self._failure: FailureKind | None = None
        self._got_bytes = self._has_head = self._is_complete = self._is_sent = False
        self._is_reading_paused = self._is_blocked = self._wakes_on_head = False
        self._keeps_alive = self._is_spoilt = False
        self._last_read_at = 0.0
        self._idle_watch: asyncio.TimerHandle | None = None
        self._body_limit: int | None = None

    # --- asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the transport; asyncio and uvloop have set TCP_NODELAY already."""
        self._transport = cast(asyncio.Transport, transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Hand out the shared buffer."""
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Parse one read and pass on what it completed."""
        if not self._is_busy or self._is_complete:
            self._spoil()  # an answer that nobody asked for
            return
        self._got_bytes = True
        self._last_read_at = self._loop.time()
        try:
            self._parser.feed_data(self._buffer[:nbytes])
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._spoil()
        if self._has_head:
            self._pass_on()
            return
        self._head_bytes += nbytes
        if self._head_bytes > MAX_HEAD_BYTES:
            self._spoil()

    def eof_received(self) -> None:
        """End an answer that has no length; any other is cut off and handled as lost."""
        if self._is_busy and self._has_head and self._ends_with_connection():
            self._is_complete = True
            self._pass_on()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wake whoever waits; what is missing is missing for good."""
        self._lost = True
        self._transport = None
        if self._is_busy and not self._is_complete and self._failure is None:
            self._failure = FailureKind.BROKEN if self._got_bytes else FailureKind.UNREACHABLE
        self.resume_writing()
        self._wake()

    def pause_writing(self) -> None:
        """Note that the socket takes no more for now."""
        self._is_write_paused = True

    def resume_writing(self) -> None:
        """Note that it does again."""
        self._is_write_paused = False
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)

    # --- llhttp's side

    def on_header(self, name: bytes, value: bytes) -> None:
        """Collect one header; trailers after the body are dropped."""
        if not self._has_head:
            self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """Take the status; a 1xx is not the answer yet."""
        if self._has_head:
            return
        self.status = self._parser.get_status_code()
        if self.status < 200:
            self.headers = []
        else:
            self._has_head = True

    def on_body(self, body: bytes) -> None:
        """Collect a piece of the body."""
        if self._is_complete:
            return
        self._pieces.append(body)
        self._buffered += len(body)

    def on_message_begin(self) -> None:
        """Notice a second answer behind the first; it belongs to nobody."""
        if self._has_head:
            self._is_spoilt = True

    def on_message_complete(self) -> None:
        """End the answer, unless it was an interim one."""
        if self._has_head and not self._is_complete:
            self._is_complete = True
            self._keeps_alive = self._parser.should_keep_alive()

    # --- the client's side

    @property
    def is_open(self) -> bool:
        """Whether the connection can still carry something."""
        return not self._lost and self._transport is not None and not self._transport.is_closing()

    @property
    def is_reusable(self) -> bool:
        """Whether another exchange may follow: answer read, request sent, nothing left over."""
        is_done = self._is_complete and self._is_sent and self._failure is None
        return self.is_open and is_done and self._keeps_alive and not self._is_spoilt

    @property
    def is_complete(self) -> bool:
        """Whether the answer has arrived to its end."""
        return self._is_complete

    def start(self) -> None:
        """Begin an exchange; on a connection that was lost while idle it fails when it is waited for."""
        self._reset()
        self._is_busy = True
        self.exchanges += 1
        if self._lost:
            self._failure = FailureKind.UNREACHABLE

    def finish(self) -> None:
        """End an exchange whose answer was read; the connection is idle now."""
        self._is_busy = False
        self._sink = None
        self._pieces = []

    async def send(self, head: bytes, body: Body, length: int) -> None:
        """Write head and body (of `length` bytes), at most `WRITE_BYTES` in a turn of the loop.

        Stops early when the request is answered before it is out.
        """
        if len(head) + length <= WRITE_BYTES:
            if self._transport is not None:
                self._transport.writelines((head, *body))
                self._is_sent = True
            return
        for number, group in enumerate(bounded_groups((head, *body), WRITE_BYTES)):
            if number:
                await self._next_turn()
            if self._is_sent_enough():
                return
            assert self._transport is not None
            self._transport.writelines(group)
        self._is_sent = True

    def _is_sent_enough(self) -> bool:
        return self._has_head or self._failure is not None or not self.is_open

    async def _next_turn(self) -> None:
        if not self._is_write_paused:
            await asyncio.sleep(0)
            return
        self._writable = self._loop.create_future()
        try:
            await self._writable
        finally:
            self._writable = None

    async def read_head(self) -> None:
        """Wait for status and headers."""
        self._wakes_on_head = True
        while not self._has_head:
            await self._wait()
        self._wakes_on_head = False

    async def read_body(self, limit: int) -> bytes:
        """Wait for the rest of the answer and return its body; PROTOCOL when it is above `limit` bytes."""
        self._body_limit = limit
        self._resume_reading()
        self._pass_on()
        while not self._is_complete:
            await self._wait()
        if self._buffered > limit:
            raise CallFailed(FailureKind.PROTOCOL)
        return self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)

    async def relay(self, sink: Sink, idle_s: float) -> None:
        """Push the body into `sink` as it arrives; TIMEOUT after `idle_s` of silence."""
        self._sink = sink
        self._last_read_at = self._loop.time()
        self._idle_watch = self._loop.call_later(idle_s, self._watch_idle, idle_s)
        try:
            self._resume_reading()
            self._pass_on()
            while not (self._is_complete and not self._pieces):
                if self._is_blocked:
                    await sink.drained()
                    self._is_blocked = False
                    self._resume_reading()
                    self._pass_on()
                else:
                    await self._wait()
        finally:
            self._idle_watch.cancel()
            self._sink = None

    def abort(self) -> None:
        """Drop the connection at once; the instance sees a reset and stops its work."""
        if self._transport is not None:
            self._transport.abort()

    def expire(self) -> None:
        """End the exchange because its deadline is over."""
        self._fail(FailureKind.TIMEOUT)

    # --- inside

    def _pass_on(self) -> None:
        if self._sink is not None and not self._is_blocked and self._pieces:
            pieces, self._pieces, self._buffered = self._pieces, [], 0
            self._is_blocked = not self._sink.write(pieces)
        if self._body_limit is not None:
            if self._buffered > self._body_limit:
                self._fail(FailureKind.PROTOCOL)
        elif self._is_blocked or self._buffered > READ_BYTES:
            self._pause_reading()
        if self._is_complete or self._is_blocked or self._wakes_on_head or self._failure is not None:
            self._wake()

    def _watch_idle(self, idle_s: float) -> None:
        """Look again when the silence could be too long; a slow client is not the instance's silence."""
        quiet_for = 0.0 if self._is_blocked else self._loop.time() - self._last_read_at
        if quiet_for >= idle_s:
            self._fail(FailureKind.TIMEOUT)
        else:
            self._idle_watch = self._loop.call_later(idle_s - quiet_for, self._watch_idle, idle_s)

    def _ends_with_connection(self) -> bool:
        has_length = header_of(self.headers, b"content-length") is not None
        return not has_length and header_of(self.headers, b"transfer-encoding") is None

    def _pause_reading(self) -> None:
        if not self._is_reading_paused and self.is_open:
            assert self._transport is not None
            self._transport.pause_reading()
            self._is_reading_paused = True

    def _resume_reading(self) -> None:
        if self._is_reading_paused and self.is_open:
            assert self._transport is not None
            self._transport.resume_reading()
            self._is_reading_paused = False

    def _fail(self, kind: FailureKind) -> None:
        if self._failure is None:
            self._failure = kind
        self.abort()
        self._wake()

    def _spoil(self) -> None:
        """Give the connection up for what came that is no answer; an answer that is whole stays one."""
        self._is_spoilt = True
        if not self._is_complete:
            self._fail(FailureKind.PROTOCOL)
        elif not self._is_busy:
            self.abort()

    async def _wait(self) -> None:
        if self._failure is not None:
            raise CallFailed(self._failure)
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None
        if self._failure is not None:
            raise CallFailed(self._failure)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def bounded_groups(pieces: tuple[Piece, ...], limit: int) -> Iterator[list[Piece]]:
    """Return `pieces` in groups of at most `limit` bytes, long pieces cut into slices, nothing copied."""
    group: list[Piece] = []
    room = limit
    for piece in pieces:
        if len(piece) <= room:
            group.append(piece)
            room -= len(piece)
            continue
        view, at = memoryview(piece), 0
        while at < len(view):
            if room == 0:
                yield group
                group, room = [], limit
            part = view[at : at + room]
            group.append(part)
            at += len(part)
            room -= len(part)
    if group:
        yield group
