"""The client for instances: pooled HTTP/1.1 connections, deadlines, and failures in our words.

    client = UpstreamClient(connect_timeout_s=5.0, ca_file=None)
    answer = await client.call(url, Call(path="/v1/chat/completions", ...), timeout_s=60.0)
    answer = await client.open(url, call, timeout_s=300.0)  # then: read or relay, and always close
    await client.close()

Rules of this file:
- An idle connection is given up before the server does so: `IDLE_S`, or what its Keep-Alive header allows.
  One that was reset all the same is replaced and the request sent once more, which is no evidence against
  anybody.
- Connections are not limited in number: a stream may hold one for minutes.
- Every wait has a deadline; a cancelled or failed exchange closes its connection at once.
"""

from __future__ import annotations

import asyncio
import ssl
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from epdctl.domain import InstanceUrl
from epdctl.proxy.connection import READ_BYTES, CallFailed, Connection, Sink
from epdctl.proxy.cut import Body, body_length
from epdctl.proxy.headers import RawHeaders, encode_headers, header_of, parse_keep_alive
from epdctl.proxy.retry import FailureKind

IDLE_S = 0.8
"""Shorter than the keep-alive of any server we know of (1 s is the shortest, vLLM's is 5 s)."""

MAX_ANSWER_BYTES = 64 * 1024 * 1024
_KEEP_ALIVE_SHARE = 0.8
_MAX_IDLE_S = 30.0
_MAX_TARGETS = 4096


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """One request to an instance; `headers` is ready header text, each line ended."""

    path: str
    body: Body = ()
    headers: bytes = b""
    method: str = "POST"


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """A whole answer."""

    status: int
    headers: RawHeaders
    body: bytes

    @property
    def content_type(self) -> str:
        """The content type, JSON when none was named."""
        return (header_of(self.headers, b"content-type") or b"application/json").decode("latin-1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where an instance URL leads: the parts of a request that are the same each time."""

    host: str
    port: int
    is_tls: bool
    base_path: str
    fixed_headers: bytes


class OpenAnswer:
    """An answer whose body is still to come; read or relay it, and `close` it in any case.

    Closing gives the connection back to the pool when the answer was read to its end, and drops it otherwise.
    """

    __slots__ = ("_client", "_connection", "_target", "headers", "status")

    def __init__(self, connection: Connection, client: UpstreamClient, target: Target) -> None:
        self._connection = connection
        self._client = client
        self._target = target
        self.status = connection.status
        self.headers = connection.headers

    def close(self) -> None:
        """Let go of the connection; closing twice does nothing."""
        self._client.give_back(self._target, self._connection)

    @property
    def is_event_stream(self) -> bool:
        """Whether the body is server-sent events."""
        kind = header_of(self.headers, b"content-type") or b""
        return kind.lower().startswith(b"text/event-stream")

    async def read(self, *, timeout_s: float, limit: int = MAX_ANSWER_BYTES) -> Answer:
        """Return the whole answer; raises CallFailed."""
        connection = self._connection
        if connection.is_complete:
            body = await connection.read_body(limit)
        else:
            timer = asyncio.get_running_loop().call_later(timeout_s, connection.expire)
            try:
                body = await connection.read_body(limit)
            finally:
                timer.cancel()
        return Answer(status=self.status, headers=self.headers, body=body)

    async def relay(self, sink: Sink, *, idle_s: float) -> None:
        """Push the body into `sink` to its end; raises CallFailed, and what `sink` raises."""
        await self._connection.relay(sink, idle_s)


class UpstreamClient:
    """Talks to instances; make it inside a running event loop. `ca_file` verifies https instances."""

    def __init__(self, *, connect_timeout_s: float, ca_file: Path | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._connect_timeout_s = connect_timeout_s
        self._ca_file = ca_file
        self._tls: ssl.SSLContext | None = None
        self._buffer = memoryview(bytearray(READ_BYTES))
        self._targets: dict[str, Target] = {}
        self._idle: dict[tuple[str, int, bool], list[Connection]] = {}
        self._in_use: set[Connection] = set()
        self._sweep: asyncio.TimerHandle | None = None

    @property
    def connection_count(self) -> int:
        """How many connections are open, idle ones included."""
        return len(self._in_use) + sum(map(len, self._idle.values()))

    @property
    def open_count(self) -> int:
        """How many of them can still carry something."""
        every = [*self._in_use, *(one for idle in self._idle.values() for one in idle)]
        return sum(connection.is_open for connection in every)

    async def call(
        self, url: InstanceUrl, call: Call, *, timeout_s: float, limit: int = MAX_ANSWER_BYTES
    ) -> Answer:
        """Return the answer to `call` within `timeout_s`, body included; raises CallFailed."""
        deadline = self._loop.time() + timeout_s
        answer = await self.open(url, call, timeout_s=timeout_s)
        try:
            return await answer.read(limit=limit, timeout_s=max(0.0, deadline - self._loop.time()))
        finally:
            answer.close()

    async def open(self, url: InstanceUrl, call: Call, *, timeout_s: float) -> OpenAnswer:
        """Send `call` and return its answer once the headers are there; raises CallFailed."""
        target = self._targets.get(url) or self._target(url)
        connection = self._take_idle(target)
        if connection is not None:
            try:
                await self._ask(connection, target, call, timeout_s)
                return OpenAnswer(connection, self, target)
            except CallFailed as failure:
                if failure.kind is not FailureKind.UNREACHABLE:
                    raise
        connection = await self._connect(target)
        await self._ask(connection, target, call, timeout_s)
        return OpenAnswer(connection, self, target)

    async def close(self) -> None:
        """Close all connections, also those in use."""
        if self._sweep is not None:
            self._sweep.cancel()
        for connection in [*self._in_use, *(one for idle in self._idle.values() for one in idle)]:
            connection.abort()
        self._in_use.clear()
        self._idle.clear()

    async def _ask(self, connection: Connection, target: Target, call: Call, timeout_s: float) -> None:
        """Send the request and wait for the head; the connection is dropped when that fails."""
        self._in_use.add(connection)
        timer = self._loop.call_later(timeout_s, connection.expire)
        try:
            connection.start()
            length = body_length(call.body)
            await connection.send(_head(target, call, length), call.body, length)
            await connection.read_head()
        except BaseException:
            self._in_use.discard(connection)
            connection.abort()
            raise
        finally:
            timer.cancel()

    async def _connect(self, target: Target) -> Connection:
        tls = self._tls_context() if target.is_tls else None
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _, connection = await self._loop.create_connection(
                    lambda: Connection(self._buffer), target.host, target.port, ssl=tls
                )
        except (OSError, TimeoutError, UnicodeError) as error:
            raise CallFailed(FailureKind.UNREACHABLE) from error
        return connection

    def _tls_context(self) -> ssl.SSLContext:
        if self._tls is None:
            self._tls = ssl.create_default_context(cafile=self._ca_file)
        return self._tls

    def _target(self, url: InstanceUrl) -> Target:
        target = self._targets.get(url)
        if target is None:
            if len(self._targets) >= _MAX_TARGETS:
                self._targets.clear()
            target = self._targets[url] = _parse_target(url)
        return target

    def _take_idle(self, target: Target) -> Connection | None:
        idle = self._idle.get((target.host, target.port, target.is_tls), [])
        now = self._loop.time()
        while idle:
            connection = idle.pop()
            if connection.is_open and now < connection.idle_until:
                return connection
            connection.abort()
        return None

    def give_back(self, target: Target, connection: Connection) -> None:
        """Take a connection back after its answer; drop it unless the answer was read to its end."""
        if connection not in self._in_use:
            return
        self._in_use.discard(connection)
        if not connection.is_reusable:
            connection.abort()
            return
        connection.idle_until = self._loop.time() + _idle_time(connection.headers)
        connection.finish()
        self._idle.setdefault((target.host, target.port, target.is_tls), []).append(connection)
        if self._sweep is None:
            self._sweep = self._loop.call_later(IDLE_S, self._sweep_idle)

    def _sweep_idle(self) -> None:
        """Close what has been idle for too long; runs only while something is idle."""
        now = self._loop.time()
        for key, idle in list(self._idle.items()):
            kept = []
            for connection in idle:
                if connection.is_open and now < connection.idle_until:
                    kept.append(connection)
                else:
                    connection.abort()
            self._idle[key] = kept
            if not kept:
                del self._idle[key]
        self._sweep = self._loop.call_later(IDLE_S, self._sweep_idle) if self._idle else None


def _idle_time(headers: RawHeaders) -> float:
    allowed = parse_keep_alive(headers)
    return IDLE_S if allowed is None else min(_MAX_IDLE_S, allowed * _KEEP_ALIVE_SHARE)


def _parse_target(url: InstanceUrl) -> Target:
    parts = urlsplit(url)
    is_tls = parts.scheme == "https"
    host = parts.hostname or ""
    fixed = f"Host: {parts.netloc}\r\nAccept: */*\r\nUser-Agent: epdctl\r\n"
    return Target(
        host=host,
        port=parts.port or (443 if is_tls else 80),
        is_tls=is_tls,
        base_path=parts.path.rstrip("/"),
        fixed_headers=fixed.encode("latin-1"),
    )


def _head(target: Target, call: Call, length: int) -> bytes:
    line = f"{call.method} {target.base_path}{call.path} HTTP/1.1\r\n".encode("latin-1")
    framing = b"" if call.method == "GET" else b"Content-Length: %d\r\n" % length
    return b"".join((line, target.fixed_headers, call.headers, framing, b"\r\n"))


def json_headers(request_id: str, more: list[tuple[str, str]]) -> bytes:
    """Return the header lines of a JSON request."""
    lines = encode_headers([("X-Request-ID", request_id), *more])
    return b"Content-Type: application/json\r\n" + lines
