"""The engine process's side of the worker: launch, channel, heart-beat, orderly end.

An engine kind is one module whose `main()` calls `run_engine(Kind)`. The front starts it as
`python -m MODULE` and writes one JSON line (`Launch`) to its standard input, which it keeps open: when that
pipe ends, the front is gone and the engine ends too.

Rules of this file: the event loop only passes messages; loading and computing run on the kind's own thread.
An engine of which a part has ended unexpectedly ends as a whole, so that the front answers and restarts it.
Metrics are those of the process's `WorkerMetrics`; the front asks for them.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec
import structlog
import zmq.asyncio

from epdctl import garbage
from epdctl.errors import EngineUnavailable, EpdError, InternalFailure
from epdctl.logs import LogFormat, LogLevel, configure_logs
from epdctl.metrics import WorkerMetrics
from epdctl.worker.channel import (
    Channel,
    Endpoints,
    MalformedMessage,
    Message,
    connect_channel,
    error_message,
    message,
)
from epdctl.worker.duties import Duties
from epdctl.worker.leave import leave
from epdctl.worker.native_pipe import divert
from epdctl.worker.samples import Family, snapshot
from epdctl.worker.socket_folder import remove_folder

BEAT_INTERVAL_S = 1.0
NEWS_INTERVAL_S = 0.05
"""Numbers that change go out with the answers, at most this often (a beat takes a third of a millisecond); so
this is also how much of its counts an engine that is killed can take along."""
_HAND_OVER_S = 0.2
"""In which the socket's thread passes the last message on before the process ends."""


class Launch(msgspec.Struct):
    """What the front tells a new engine process, as one JSON line on its standard input."""

    to_engine: str
    to_front: str
    log_format: LogFormat
    log_level: LogLevel
    settings: dict[str, Any]
    native_output: int
    """Descriptor for what libraries write on stderr by themselves, see `native_pipe`."""


class Failed(msgspec.Struct):
    """Body of `failed`: the engine could not start or cannot go on, and why (safe to show to an operator)."""

    reason: str


class Stop(msgspec.Struct):
    """Body of `stop`: finish what is accepted within `grace_s`, then end."""

    grace_s: float


class StartFailed(Exception):
    """The engine cannot start as it is configured; the text says why and what to change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineContext:
    """What an engine kind is handed: settings, the way to the front, its metrics."""

    settings: Mapping[str, Any]
    send: Callable[[Message], Any]
    """`await send(message)`: to the front; raises EngineUnavailable when the front takes nothing."""
    metrics: WorkerMetrics
    begin: Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]]
    """`begin(work, name)`: run a loop that the engine cannot serve without; the process ends if it does."""


class Engine(Protocol):
    """One engine kind; built with an EngineContext, lives on the event loop."""

    async def start(self) -> Mapping[str, Any]:
        """Load everything and run once; return the ready facts. Raises StartFailed."""
        ...

    async def handle(self, message: Message) -> None:
        """Take one message: start a task or queue it, never wait for its end."""
        ...

    def health(self) -> str | None:
        """Return why the engine cannot do its work now, or None; goes out with each heart-beat."""
        ...

    async def stop(self, grace_s: float) -> None:
        """End every accepted call within `grace_s`, then free everything."""
        ...


class Beat(msgspec.Struct):
    """Body of `beat`: alive; `trouble` is the engine's own health, None when good; its metrics so far."""

    trouble: str | None = None
    families: list[Family] = []


def _read_launch() -> Launch:
    line = sys.stdin.buffer.readline()
    return msgspec.json.decode(line, type=Launch)


def _end_with_front(loop: asyncio.AbstractEventLoop, gone: asyncio.Event) -> None:
    """Set `gone` when the front's end of our standard input is closed (it died, or wants us to end)."""

    def on_readable() -> None:
        if not os.read(0, 4096):
            loop.remove_reader(0)
            gone.set()

    loop.add_reader(0, on_readable)


class _Voice:
    """What the front hears from an engine. News of its health come before the answers that they explain: a
    client whose request failed finds `/health` to say so. Its counts come before the answers as well, or
    NEWS_INTERVAL_S later while there are many: what was answered is counted, also when the engine dies."""

    def __init__(self, channel: Channel, metrics: WorkerMetrics, duties: Duties) -> None:
        self._channel = channel
        self._metrics = metrics
        self._duties = duties
        self._told: str | None = None
        self._beat_at = float("-inf")
        self._has_news = asyncio.Event()
        self.health: Callable[[], str | None] | None = None
        """Set once the engine serves."""

    async def send(self, outgoing: Message) -> None:
        """Send one message, after a beat when the health has changed or the last one is not fresh."""
        if self._health() != self._told or _now() - self._beat_at >= NEWS_INTERVAL_S:
            await self.beat()
        else:
            self._has_news.set()
        await self._channel.send(outgoing)

    async def rest(self) -> None:
        """Wait until the next beat is due: in a second, or sooner when there is news since the last one."""
        with suppress(TimeoutError):
            async with asyncio.timeout(BEAT_INTERVAL_S):
                await self._has_news.wait()
            await asyncio.sleep(max(0.0, self._beat_at + NEWS_INTERVAL_S - _now()))

    async def beat(self) -> None:
        """Send a beat now."""
        self._beat_at = _now()
        self._has_news.clear()
        self._told = self._health()
        families = snapshot(self._metrics.registry)
        await self._channel.send(message("beat", Beat(trouble=self._told, families=families)))

    def _health(self) -> str | None:
        """Return the engine's health; one that cannot be told is the engine's failure, not the sender's."""
        if self.health is None:
            return None
        try:
            return self.health()
        except Exception as error:  # noqa: BLE001 - what waits for an answer must get it all the same
            self.health = None
            self._duties.fail("health", error)
            return self._told


def _now() -> float:
    return asyncio.get_running_loop().time()


class _Session:
    """The life of one engine in this process: start, serve messages, beat, stop."""

    def __init__(
        self,
        engine: Engine,
        channel: Channel,
        voice: _Voice,
        metrics: WorkerMetrics,
        duties: Duties,
        folder: Path,
    ) -> None:
        self._engine = engine
        self._folder = folder
        self._channel = channel
        self._voice = voice
        self._metrics = metrics
        self._duties = duties
        self._log = structlog.get_logger()

    async def _serve(self) -> Stop:
        while True:
            received = await self._channel.receive()
            if received.kind == "stop":
                return received.parse(Stop)
            if received.kind == "metrics":
                families = snapshot(self._metrics.registry)
                await self._channel.send(message("metrics", families, call_id=received.call_id))
                continue
            try:
                await self._engine.handle(received)
            except (EpdError, MalformedMessage) as error:
                self._log.warning("engine_message_refused", kind=received.kind, reason=str(error))
                known = (
                    error
                    if isinstance(error, EpdError)
                    else InternalFailure("an internal message is malformed")
                )
                await self._channel.send(error_message(known, call_id=received.call_id))

    async def _beat(self) -> None:
        while True:
            await self._voice.beat()
            await self._voice.rest()

    async def run(self, gone: asyncio.Event) -> int:
        tasks: list[asyncio.Task[Any]] = []
        try:
            facts = await self._start(gone)
            if facts is None:
                return 1
            await self._channel.send(message("ready", dict(facts)))
            self._voice.health = self._engine.health
            tasks = [self._duties.begin(self._beat(), "heart-beat")]
            serving = asyncio.create_task(self._serve())
            failed = asyncio.create_task(self._duties.failure())
            tasks += [serving, failed, left := asyncio.create_task(gone.wait())]
            await asyncio.wait((serving, failed, left), return_when=asyncio.FIRST_COMPLETED)
            if (reason := self._broken(serving, failed)) is not None:
                await self._tell_failure(reason)
                return 1
            self._voice.health = None
            await self._engine.stop(serving.result().grace_s if serving.done() else 0.0)
            return 0
        finally:
            for task in tasks:
                task.cancel()
            self._channel.close()

    def _broken(self, serving: asyncio.Task[Stop], failed: asyncio.Task[str]) -> str | None:
        """Return why the engine cannot go on, or None."""
        if failed.done():
            return failed.result()
        if serving.done() and (error := serving.exception()) is not None:
            self._log.error("engine_task_failed", task="messages", exc_info=error)
            return "a part of the engine process failed (messages)"
        return None

    async def _tell_failure(self, reason: str) -> None:
        with suppress(EngineUnavailable):
            await self._channel.send(message("failed", Failed(reason=reason)), deadline_s=1.0)
            await asyncio.sleep(_HAND_OVER_S)

    async def _start(self, gone: asyncio.Event) -> Mapping[str, Any] | None:
        """Start the engine; None when it cannot, or when the front went away meanwhile."""
        start = asyncio.create_task(self._engine_start())
        left = asyncio.create_task(gone.wait())
        await asyncio.wait([start, left], return_when=asyncio.FIRST_COMPLETED)
        left.cancel()
        if not start.done():
            remove_folder(self._folder)  # of the front's, which was killed before it could
            os._exit(1)  # nobody is left to serve, and loading on a thread cannot be interrupted
        return start.result()

    async def _engine_start(self) -> Mapping[str, Any] | None:
        try:
            facts = await self._engine.start()
            garbage.collect_seldom(garbage.ENGINE)
            await self._channel.receive()  # the front's `hello`: both directions work
            return facts
        except StartFailed as error:
            self._log.error("engine_start_failed", reason=str(error))
            await self._channel.send(message("failed", Failed(reason=str(error))))
            await asyncio.sleep(_HAND_OVER_S)
            return None


async def _run(launch: Launch, build: Callable[[EngineContext], Engine]) -> int:
    gone = asyncio.Event()
    _end_with_front(asyncio.get_running_loop(), gone)
    context = zmq.asyncio.Context()
    metrics = WorkerMetrics()
    try:
        endpoints = Endpoints(to_engine=launch.to_engine, to_front=launch.to_front)
        channel = connect_channel(context, endpoints)
        duties = Duties()
        duties.guard(asyncio.get_running_loop())
        voice = _Voice(channel, metrics, duties)
        engine = build(
            EngineContext(settings=launch.settings, send=voice.send, metrics=metrics, begin=duties.begin)
        )
        return await _Session(engine, channel, voice, metrics, duties, endpoints.folder).run(gone)
    finally:
        context.destroy(linger=0)


def run_engine(build: Callable[[EngineContext], Engine]) -> int:
    """Run an engine kind in this process until the front says stop or goes away; return the exit code.

    SIGINT and SIGTERM are left to the front: a terminal or a service manager sends them to the whole group,
    and the front still needs its engine while it drains.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    garbage.pause()
    launch = _read_launch()
    divert(launch.native_output)
    configure_logs(launch.log_format, launch.log_level)
    return leave(asyncio.run(_run(launch, build)))
