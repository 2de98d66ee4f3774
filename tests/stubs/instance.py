"""A stub vLLM instance on a real socket: right answers by default, misbehaviour on request, calls recorded.

Rules of this file:
- One object is one instance of one role; it lives in the caller's event loop and owns its listener,
  connections and tasks. `async with StubInstance(role) as stub:` frees all of them.
- What it answers is decided in `answers`, `validation` and `behaviour`; here are only sockets and time.
- `calls` holds every request in order of arrival, health probes included; filter with `calls_to`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from epdctl.domain import Role
from tests.stubs.behaviour import Behaviour, parse_behaviour
from tests.stubs.http_wire import BadRequest, Head, read_body, read_head, reset_connection
from tests.stubs.ports import free_port
from tests.stubs.reply import GENERATION_PATHS, Broken, Exchange, respond

_HEAD_LIMIT = 1 << 20


@dataclass(slots=True, kw_only=True)
class Call:
    """One recorded request and what became of it; times are `time.monotonic()` seconds."""

    method: str
    path: str
    target: str
    headers: tuple[tuple[str, str], ...]
    connection: int
    at: float
    body: bytes = b""
    sent: bytes = b""
    first_sent_at: float | None = None
    ended_at: float | None = None
    client_left_at: float | None = None
    completed: bool = False

    @property
    def json(self) -> Any:
        """The body as JSON; raises ValueError when it is none."""
        return json.loads(self.body)

    def header(self, name: str) -> str | None:
        """Return the first value of a header, whatever its case."""
        return next((value for key, value in self.headers if key.lower() == name.lower()), None)


@dataclass(slots=True)
class _Counters:
    connections: int = 0
    accepted: int = 0
    chats: int = 0
    health: int = 0
    health_now: int = 0
    health_most: int = 0
    open_writers: set[asyncio.StreamWriter] = field(default_factory=set)


class StubInstance:
    """A vLLM instance of one role that does what `behaviour` says (see `behaviour.py`)."""

    def __init__(
        self,
        role: Role | str,
        behaviour: Mapping[str, Any] | Behaviour | None = None,
        *,
        port: int | None = None,
        name: str = "",
        fill: Callable[[str], str] = str,
    ) -> None:
        self.role = Role(role)
        self.name = name or self.role.value
        self.port = port if port is not None else free_port()
        self.calls: list[Call] = []
        self.fill = fill
        self.behaviour = Behaviour()
        self._initial = behaviour if isinstance(behaviour, Behaviour) else parse_behaviour(behaviour or {})
        self._server: asyncio.Server | None = None
        self._plug: list[socket.socket] = []
        self._counters = _Counters()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def host(self) -> str:
        """The address it listens on."""
        return self._initial.bind

    @property
    def hostport(self) -> str:
        """`host:port`."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        """The URL to register, base path included."""
        return f"http://{self.hostport}{self.behaviour.base_path or self._initial.base_path}"

    @property
    def chats(self) -> list[Call]:
        """Calls of generation routes."""
        return [call for call in self.calls if call.path in self.generation_paths]

    @property
    def generation_paths(self) -> tuple[str, ...]:
        """The generation routes under this stub's base path."""
        return tuple(self.behaviour.base_path + path for path in GENERATION_PATHS)

    @property
    def most_concurrent_health(self) -> int:
        """The largest number of health probes under way at once."""
        return self._counters.health_most

    @property
    def connections_accepted(self) -> int:
        """How many connections were ever accepted."""
        return self._counters.accepted

    @property
    def open_connections(self) -> int:
        """How many connections are open now."""
        return len(self._counters.open_writers)

    def calls_to(self, path: str) -> list[Call]:
        """Calls whose path, without the base path, is `path`."""
        return [call for call in self.calls if call.path == self.behaviour.base_path + path]

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        """Listen, and behave as told at construction."""
        await self.set_behaviour(self._initial)

    async def set_behaviour(self, behaviour: Mapping[str, Any] | Behaviour) -> None:
        """Change what it does from now on; a sequence starts from its first entry."""
        new = behaviour if isinstance(behaviour, Behaviour) else parse_behaviour(behaviour)
        self.behaviour = new
        self._counters.chats = self._counters.health = 0
        if new.listen_backlog_full:
            await self._close_listener(drop_connections=True)
            self._plug_listener()
        elif new.accepts_connections:
            self._unplug_listener()
            await self._open_listener()
        else:
            self._unplug_listener()
            await self._close_listener(drop_connections=True)

    async def stop(self) -> None:
        """Close the listener and all connections, and end all tasks."""
        self._unplug_listener()
        await self._close_listener(drop_connections=True)
        # A connection that was accepted a moment ago gets its task only in the next turns of the loop.
        for _ in range(3):
            await asyncio.sleep(0)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def drop_connections(self) -> None:
        """Reset every open connection; the listener stays."""
        for writer in list(self._counters.open_writers):
            reset_connection(writer)

    async def _open_listener(self) -> None:
        if self._server is None:
            loop = asyncio.get_running_loop()
            self._server = await loop.create_server(
                lambda: _Protocol(asyncio.StreamReader(limit=_HEAD_LIMIT), self._accept),
                self.host,
                self.port,
                backlog=1024,
                reuse_address=True,
            )

    async def _close_listener(self, *, drop_connections: bool) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        if drop_connections:
            await self.drop_connections()

    def _plug_listener(self) -> None:
        """Listen without ever accepting, with a full queue: a new connection gets no answer at all."""
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((self.host, self.port))
        listener.listen(0)
        self._plug.append(listener)
        for _ in range(4):
            filler = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            filler.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                filler.connect((self.host, self.port))
            self._plug.append(filler)

    def _unplug_listener(self) -> None:
        for plugged in self._plug:
            plugged.close()
        self._plug.clear()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self._counters.connections += 1
        self._counters.accepted += 1
        self._counters.open_writers.add(writer)
        try:
            await self._serve(reader, writer, self._counters.connections)
        except (ConnectionError, asyncio.IncompleteReadError, BadRequest, ValueError):
            writer.transport.abort()
        except asyncio.CancelledError:
            writer.transport.abort()
        finally:
            self._counters.open_writers.discard(writer)
            with contextlib.suppress(ConnectionError):
                writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        while True:
            head = await self._next_head(reader)
            if head is None:
                return
            call = Call(
                method=head.method,
                path=head.path,
                target=head.target,
                headers=head.headers,
                connection=number,
                at=time.monotonic(),
            )
            self.calls.append(call)
            try:
                await self._exchange(reader, writer, head, call)
            except Broken:
                return
            finally:
                call.ended_at = time.monotonic()
            if self._closes_after(head):
                return

    def _closes_after(self, head: Head) -> bool:
        """Whether this response was the connection's last; with a keep-alive time the idle timer decides."""
        told = self.behaviour.chat.headers.get("Connection", "").lower() == "close"
        silently = self.behaviour.close_silently and self.behaviour.keepalive_s is None
        return not head.keeps_alive or told or silently

    async def _next_head(self, reader: asyncio.StreamReader) -> Head | None:
        try:
            async with asyncio.timeout(self.behaviour.keepalive_s):
                return await read_head(reader)
        except TimeoutError:
            return None

    async def _exchange(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: Head, call: Call
    ) -> None:
        exchange = Exchange(
            role=self.role,
            behaviour=self.behaviour,
            host=self.host,
            head=head,
            call=call,
            writer=writer,
            fill=self.fill,
        )
        if head.path in self.generation_paths and head.method == "POST":
            exchange.chat = self.behaviour.chat.for_call(self._counters.chats)
            self._counters.chats += 1
        if exchange.chat is not None and exchange.chat.fail == "reset_before_body":
            exchange.reset()
        if (head.get("Expect") or "").lower() == "100-continue":
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        call.body = await read_body(reader, head, self._pace())
        with self._watch_client(writer, call), self._count_health(head, exchange):
            await respond(exchange)

    def _pace(self) -> Any:
        speed = self.behaviour.read_bytes_per_s
        if speed is None:
            return None

        async def pace(size: int) -> None:
            await asyncio.sleep(size / speed)

        return pace

    @contextlib.contextmanager
    def _count_health(self, head: Head, exchange: Exchange) -> Iterator[None]:
        if head.path != self.behaviour.base_path + "/health":
            yield
            return
        exchange.health_status = self.behaviour.health.status_of(self._counters.health)
        self._counters.health += 1
        self._counters.health_now += 1
        self._counters.health_most = max(self._counters.health_most, self._counters.health_now)
        try:
            yield
        finally:
            self._counters.health_now -= 1

    @contextlib.contextmanager
    def _watch_client(self, writer: asyncio.StreamWriter, call: Call) -> Iterator[None]:
        """End the exchange when the client leaves before its answer is out, and note when that was."""
        answering = asyncio.current_task()
        protocol = writer.transport.get_protocol()
        assert answering is not None and isinstance(protocol, _Protocol)

        def left() -> None:
            if call.client_left_at is None:
                call.client_left_at = time.monotonic()
                answering.cancel()

        if protocol.is_gone:
            left()
        protocol.on_left = left
        try:
            yield
        finally:
            protocol.on_left = None


class _Protocol(asyncio.StreamReaderProtocol):
    """A stream protocol that tells when the client ended or broke its side, as uvicorn takes it."""

    on_left: Callable[[], None] | None = None
    is_gone = False

    def eof_received(self) -> bool | None:
        self._tell()
        return super().eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self._tell()
        super().connection_lost(exc)

    def _tell(self) -> None:
        self.is_gone = True
        if self.on_left is not None:
            self.on_left()
