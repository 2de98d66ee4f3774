"""The life of an HTTP server process: bind, serve, leave politely.

Rules of this file:
- Leaving has four steps: not ready (load balancers look away) -> `drain_delay_s` -> no new connections, and
  new requests on open ones are refused -> running requests end, at most `shutdown_grace_s`. Exit code 0.
- A second signal ends the steps: what still runs is cancelled. Exit code 1.
- It knows nothing of routing or instances; both the proxy and the workers' fronts may use it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import structlog
import uvloop
from aiohttp import web
from aiohttp.typedefs import Middleware

from epdctl.errors import ShuttingDown
from epdctl.http_errors import Handler, JsonRunner
from epdctl.logs import LogFormat
from epdctl.wire import encode_json

_ALWAYS_ANSWERED = frozenset({"/health", "/ready", "/metrics"})
_BACKLOG = 1024
# Longer than what clients and load balancers keep an idle connection open, so that they close first.
_KEEPALIVE_TIMEOUT_S = 75.0

# From glibc's malloc.h. 32 MiB is the largest mmap threshold glibc takes on 64 bits.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
_MMAP_THRESHOLD_BYTES = 32 << 20
_TRIM_THRESHOLD_BYTES = 512 << 20
_TOP_PAD_BYTES = 64 << 20


class CannotListen(Exception):
    """The address cannot be bound; the message names it and the flag."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeavePolicy:
    """Times of the way out, in seconds."""

    drain_delay_s: float
    shutdown_grace_s: float


class Presence:
    """Whether the process is staying, and how many requests it is working on."""

    def __init__(self) -> None:
        self._leaving = False
        self._refusing = False
        self._running = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def is_leaving(self) -> bool:
        """Say whether a shutdown has begun."""
        return self._leaving

    def leave(self) -> None:
        """Begin to leave: `/ready` says no from now on."""
        self._leaving = True

    def refuse(self) -> None:
        """Take no new requests from now on."""
        self._refusing = True

    def running(self) -> int:
        """Return how many requests are being worked on."""
        return self._running

    async def wait_idle(self) -> None:
        """Wait until no request is being worked on."""
        await self._idle.wait()

    def middleware(self) -> Middleware:
        """Return the aiohttp middleware that counts requests and refuses new ones at the end."""

        @web.middleware
        async def count_requests(request: web.Request, handler: Handler) -> web.StreamResponse:
            if request.path in _ALWAYS_ANSWERED:
                return await handler(request)
            if self._refusing:
                raise ShuttingDown("this proxy is shutting down: send the request to another one")
            self._running += 1
            self._idle.clear()
            try:
                response = await handler(request)
            finally:
                self._running -= 1
                if not self._running:
                    self._idle.set()
            if self._leaving and not response.prepared:
                response.force_close()
            return response

        return count_requests


def keep_freed_memory() -> bool:
    """Tell glibc to keep freed blocks of megabytes instead of giving them back to the kernel.

    Otherwise each copy of a large body faults its pages in again, the largest single cost of large bodies.
    Returns False where the C library is not glibc: nothing is changed then.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    settings = (
        (_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES),
        (_M_TRIM_THRESHOLD, _TRIM_THRESHOLD_BYTES),
        (_M_TOP_PAD, _TOP_PAD_BYTES),
    )
    taken = [mallopt(name, value) for name, value in settings]
    return all(taken)


def bind_socket(host: str, port: int) -> socket.socket:
    """Return a listening socket; raise CannotListen naming the address and the cause."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError):
        raise CannotListen(f"cannot listen on {host}: no such address (--host)") from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        # Two processes can bind before either listens; only listening tells who has the port.
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise CannotListen(f"cannot listen on {host}:{port}: {_why(error)}") from None
    listener.setblocking(False)
    return listener


def _why(error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return "the port is in use (choose another one with --port)"
    if error.errno == errno.EACCES:
        return "not permitted (ports below 1024 need rights; choose another one with --port)"
    return f"{error.strerror} (--host, --port)"


def url_of(listener: socket.socket, host: str) -> str:
    """Return the URL under which `listener` can be reached from this machine."""
    port = listener.getsockname()[1]
    name = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "[::1]"}.get(host, host)  # noqa: S104
    return f"http://[{name}]:{port}" if ":" in name and not name.startswith("[") else f"http://{name}:{port}"


def run_loop(main: Callable[[], Coroutine[Any, Any, int]]) -> int:
    """Run `main` on uvloop and return its exit code."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main())


async def serve_until_signal(
    app: web.Application,
    listener: socket.socket,
    presence: Presence,
    policy: LeavePolicy,
    say_ready: Callable[[], None],
) -> int:
    """Serve `app` on `listener` until a signal has come and the way out has ended; return the exit code.

    The application's own clean-up runs before this returns. Raises what its start-up raises.
    """
    signals = _Signals()
    # An own handler for disconnects: aiohttp's default leaves a handler running when its client is gone.
    runner = JsonRunner(
        app,
        handle_signals=False,
        handler_cancellation=True,
        access_log=None,
        keepalive_timeout=_KEEPALIVE_TIMEOUT_S,
        shutdown_timeout=0.1,
    )
    try:
        await runner.setup()
        site = web.SockSite(runner, listener, backlog=_BACKLOG)
        await site.start()
        with signals.caught():
            say_ready()
            await signals.first.wait()
            return await _leave(site, presence, policy, signals)
    finally:
        await runner.cleanup()
        listener.close()


async def _leave(site: web.SockSite, presence: Presence, policy: LeavePolicy, signals: _Signals) -> int:
    log = structlog.get_logger()
    presence.leave()
    log.info("leaving", running=presence.running(), drain_delay_s=policy.drain_delay_s)
    await _unless(signals.second, asyncio.sleep(policy.drain_delay_s))
    await site.stop()
    presence.refuse()
    await _unless(signals.second, _within(policy.shutdown_grace_s, presence.wait_idle()))
    log.info("stopped", cut=presence.running(), forced=signals.second.is_set())
    return 1 if signals.second.is_set() else 0


async def _within(limit_s: float, wait: Awaitable[None]) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            await wait


async def _unless(stop: asyncio.Event, wait: Coroutine[Any, Any, None]) -> None:
    """Wait for `wait`, or for `stop` if that comes first."""
    tasks = {asyncio.ensure_future(wait), asyncio.ensure_future(stop.wait())}
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Signals:
    """The first and the second SIGTERM or SIGINT."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()

    @contextlib.contextmanager
    def caught(self) -> Any:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    def _on_signal(self) -> None:
        (self.second if self.first.is_set() else self.first).set()


def announce_ready(program: str, url: str, log_format: LogFormat) -> None:
    """Say on stderr that `program` serves at `url`, whatever the log level, in the form of the log."""
    if log_format == "json":
        say(encode_json({"event": "ready", "program": program, "url": url}).decode())
    else:
        say(f"{program}: ready on {url}")


def say(text: str) -> None:
    """Write one line to stderr at once."""
    print(text, file=sys.stderr, flush=True)  # noqa: T201 - stderr is where a server speaks to its starter
