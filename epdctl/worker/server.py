"""The HTTP edge that all bundled workers share: `/health`, `/v1/models`, `/version`, `/metrics`, and the run.

Rules of this file: `/health` tells the truth about the engine and answers from memory, at once, under any
load; generation routes belong to the worker kinds. A worker that got SIGTERM says so in `/health`, takes no
new request, and ends when the accepted ones have ended, or at the end of its grace with an explicit failure
for each.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import structlog
import zmq.asyncio
from aiohttp import web

from epdctl import __version__, garbage
from epdctl.errors import ShuttingDown, UnsupportedEndpoint
from epdctl.http_errors import (
    REQUEST_ID,
    Handler,
    JsonRunner,
    error_middleware,
    error_response,
    refuse_other_methods,
)
from epdctl.metrics import CONTENT_TYPE, WorkerMetrics
from epdctl.wire import encode_json
from epdctl.worker.duties import repeated
from epdctl.worker.engine import StartFailed
from epdctl.worker.samples import merge, render, snapshot
from epdctl.worker.supervisor import EngineState, EngineStatus, Supervisor

JSON = "application/json"
_GENERATION_ROUTES = frozenset({"/v1/chat/completions", "/v1/completions"})


class InFlight:
    """Counts the accepted requests, so that a drain knows when the last one has ended."""

    def __init__(self) -> None:
        self.count = 0
        self.draining = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self._empty = asyncio.Event()
        self._empty.set()

    def begin(self) -> None:
        """Count one accepted request; raises ShuttingDown while draining."""
        if self.draining:
            raise ShuttingDown("this worker is shutting down", retry_after_s=1)
        self.count += 1
        self._empty.clear()
        if (task := asyncio.current_task()) is not None:
            self._tasks.add(task)

    def end(self) -> None:
        """Count one accepted request as ended."""
        self.count -= 1
        if (task := asyncio.current_task()) is not None:
            self._tasks.discard(task)
        if self.count == 0:
            self._empty.set()

    async def drain(self, grace_s: float) -> int:
        """Take no more, wait for the accepted ones; return how many were left when `grace_s` was over."""
        self.draining = True
        with suppress(TimeoutError):
            await asyncio.wait_for(self._empty.wait(), grace_s)
        return self.count

    async def abort(self) -> None:
        """Cancel what is left; each request answers 503 `shutting_down`."""
        for task in list(self._tasks):
            task.cancel()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._empty.wait(), 2.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerEdge:
    """What the common routes show: the names served, the engines behind, the numbers."""

    model_name: str
    model_root: str
    max_model_len: int | None
    engines: Sequence[Supervisor]
    metrics: WorkerMetrics
    in_flight: InFlight
    trouble: Callable[[], str | None]
    """Reason of the worker kind itself why it is not healthy, or None."""
    loads: Callable[[], Sequence[int]]
    """What each engine has to do now, in requests or items."""
    transport: str
    """What carries embeddings and KV, for the log."""
    one_engine_is_enough: bool = False
    """Whether any engine can do another one's work; else the worker is as healthy as its worst engine."""


def health_of(edge: WorkerEdge) -> str | None:
    """Return why the worker is not healthy, or None."""
    if edge.in_flight.draining:
        return "shutting down"
    reasons = [_reason(engine.status()) for engine in edge.engines]
    wrong = [reason for reason in reasons if reason is not None]
    if wrong and not (edge.one_engine_is_enough and len(wrong) < len(reasons)):
        return wrong[0]
    return edge.trouble()


def _reason(status: EngineStatus) -> str | None:
    """Return why an engine does not serve as it should, or None."""
    if status.state is EngineState.READY:
        return status.reason
    return status.reason or status.state.value


def _json(body: object, status: int = 200) -> web.Response:
    return web.Response(status=status, body=encode_json(body), content_type=JSON)


def add_common_routes(app: web.Application, edge: WorkerEdge) -> None:
    """Add `/health`, `/v1/models`, `/version` and `/metrics`; other `/v1/` paths are 501."""
    created = int(time.time())

    async def health(_: web.Request) -> web.Response:
        reason = health_of(edge)
        statuses = [engine.status() for engine in edge.engines]
        engines = [
            {"state": s.state.value, "restarts": s.restarts, "reason": s.reason, "in_flight": load}
            for s, load in zip(statuses, edge.loads(), strict=True)
        ]
        status = "ok" if reason is None else "unavailable"
        body = {"status": status, "reason": reason, "in_flight": edge.in_flight.count, "engines": engines}
        return _json(body, 200 if reason is None else 503)

    async def models(_: web.Request) -> web.Response:
        model = {
            "id": edge.model_name,
            "object": "model",
            "created": created,
            "owned_by": "epdctl",
            "root": edge.model_root,
            "parent": None,
            "max_model_len": edge.max_model_len,
        }
        return _json({"object": "list", "data": [model]})

    async def version(_: web.Request) -> web.Response:
        return _json({"version": __version__})

    async def metrics(_: web.Request) -> web.Response:
        engines = await asyncio.gather(*(engine.families() for engine in edge.engines))
        text = render(merge([snapshot(edge.metrics.registry), *engines]))
        return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE})

    async def unsupported(request: web.Request) -> web.Response:
        await refuse_other_methods(request)
        raise UnsupportedEndpoint("this worker does not serve this endpoint")

    # A specific path is found before this one, whatever the order they are added in.
    app.router.add_route("*", "/v1/{tail:.*}", unsupported)
    app.router.add_get("/health", health)
    app.router.add_get("/v1/models", models)
    app.router.add_get("/version", version)
    app.router.add_get("/metrics", metrics)


def counting_middleware(edge: WorkerEdge, topology: str) -> Callable[..., Awaitable[web.StreamResponse]]:
    """Return the middleware that counts generation requests by outcome, and refuses while draining."""

    @web.middleware
    async def count(request: web.Request, handler: Handler) -> web.StreamResponse:
        resource = request.match_info.route.resource
        route = resource.canonical if resource is not None else ""
        if route not in _GENERATION_ROUTES:
            return await handler(request)
        edge.in_flight.begin()
        outcome = "aborted"
        try:
            response = await handler(request)
            outcome = "ok" if response.status < 400 else "error"
            return response
        except asyncio.CancelledError:
            if not edge.in_flight.draining:
                raise
            outcome = "shutting_down"
            return error_response(ShuttingDown("this worker is shutting down"), request[REQUEST_ID])
        except Exception as error:
            outcome = getattr(error, "code", "internal")
            raise
        finally:
            edge.in_flight.end()
            edge.metrics.requests.labels(route, topology, outcome).inc()

    return count


def bind_socket(host: str, port: int) -> socket.socket:
    """Return a listening socket, before anything slow is started; raises OSError (the port is taken)."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(1024)
    except OSError:
        listener.close()
        raise
    listener.setblocking(False)
    return listener


@asynccontextmanager
async def worker_sockets() -> AsyncIterator[tuple[zmq.asyncio.Context, Path]]:
    """Give a ZMQ context, closed afterwards, and the folder in which supervisors make their private ones."""
    context = zmq.asyncio.Context()
    try:
        yield context, Path(tempfile.gettempdir())
    finally:
        context.destroy(linger=0)


class Announcer(Protocol):
    """Self-registration, see `worker.announce`."""

    async def run(self) -> None:
        """Register and keep alive until cancelled."""
        ...

    async def withdraw(self) -> None:
        """Remove the registration; never raises."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRun:
    """Everything one worker process runs, in the order it is started."""

    app: web.Application
    listener: socket.socket
    edge: WorkerEdge
    announcer: Announcer | None
    grace_s: float
    prepare: Callable[[], Awaitable[None]] | None = None
    """What the front itself must load; runs while the engines start. Raises StartFailed."""


async def run_worker(run: WorkerRun) -> int:
    """Serve until SIGTERM or SIGINT, then drain; a second signal ends at once. Return the exit code."""
    log = structlog.get_logger()
    stop, now = asyncio.Event(), asyncio.Event()
    _on_signals(stop, now)
    runner = JsonRunner(run.app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
    await runner.setup()
    await web.SockSite(runner, run.listener).start()
    host, port = run.listener.getsockname()[:2]
    log.info("worker_listening", host=host, port=port)
    announcing: asyncio.Task[None] | None = None
    try:
        if not await _start_engines(run, stop):
            return 0 if stop.is_set() else 1
        garbage.collect_seldom(garbage.ENGINE)
        log.info("worker_ready", model=run.edge.model_name, transport=run.edge.transport)
        if run.announcer is not None:
            announcing = asyncio.create_task(repeated(run.announcer.run, name="registration"))
        await stop.wait()
        await _drain(run, announcing, now)
        return 0
    finally:
        if announcing is not None:
            announcing.cancel()
        await asyncio.gather(*(engine.stop(0.0) for engine in run.edge.engines))
        await runner.cleanup()


def _on_signals(stop: asyncio.Event, now: asyncio.Event) -> None:
    def on_signal() -> None:
        (now if stop.is_set() else stop).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)


async def _start_all(run: WorkerRun) -> None:
    async with asyncio.TaskGroup() as group:
        for engine in run.edge.engines:
            group.create_task(engine.start())
        if run.prepare is not None:
            group.create_task(_awaited(run.prepare()))


async def _awaited(work: Awaitable[None]) -> None:
    await work


async def _start_engines(run: WorkerRun, stop: asyncio.Event) -> bool:
    """Start all engines; False when one cannot start (its reason is logged) or a signal came first."""
    starting = asyncio.create_task(_start_all(run))
    stopped = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((starting, stopped), return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            return False
        starting.result()
    except* StartFailed as failures:
        for failure in failures.exceptions:
            structlog.get_logger().error("worker_start_failed", reason=str(failure))
        failed = True
    else:
        failed = False
    finally:
        stopped.cancel()
        starting.cancel()
    return not failed


async def _drain(run: WorkerRun, announcing: asyncio.Task[None] | None, now: asyncio.Event) -> None:
    log = structlog.get_logger()
    log.info("worker_draining", in_flight=run.edge.in_flight.count)
    run.edge.in_flight.draining = True
    if announcing is not None and run.announcer is not None:
        announcing.cancel()
        await run.announcer.withdraw()
    drain = asyncio.create_task(run.edge.in_flight.drain(run.grace_s))
    hurry = asyncio.create_task(now.wait())
    await asyncio.wait([drain, hurry], return_when=asyncio.FIRST_COMPLETED)
    for task in (drain, hurry):
        task.cancel()
    if left := run.edge.in_flight.count:
        log.warning("worker_drain_incomplete", in_flight=left)
        await run.edge.in_flight.abort()
    await asyncio.gather(*(engine.stop(0.0 if now.is_set() else 5.0) for engine in run.edge.engines))
    log.info("worker_drained", in_flight=run.edge.in_flight.count)


def build_app(edge: WorkerEdge, topology: str, max_body_bytes: int) -> web.Application:
    """Return the application with middlewares and common routes; the worker kind adds its own routes."""
    app = web.Application(
        middlewares=[error_middleware, counting_middleware(edge, topology)], client_max_size=max_body_bytes
    )
    add_common_routes(app, edge)
    return app
