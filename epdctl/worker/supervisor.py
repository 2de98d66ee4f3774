"""One engine process of a worker, kept alive from the front: start, calls, heart-beats, restarts.

Rules of this file:
- A call belongs to one engine process. When that process ends, every open call fails with EngineUnavailable
  at once; nothing waits for a dead engine.
- A process that stops beating is killed: hung is the same as dead.
- The first start must succeed, or the worker ends with the reason; later failures are retried with back-off.
- Only `_run` starts and ends processes; `_read` is the only receiver of a channel.
"""

from __future__ import annotations

import asyncio
import errno
import sys
import time
import uuid
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec
import structlog
import zmq.asyncio

from epdctl.errors import EngineUnavailable
from epdctl.logs import LogFormat, LogLevel
from epdctl.worker.calls import EngineCall as EngineCall
from epdctl.worker.calls import EngineProcess
from epdctl.worker.channel import Channel, Endpoints, MalformedMessage, Message, bind_channel, message
from epdctl.worker.engine import Beat, Failed, Launch, StartFailed, Stop
from epdctl.worker.native_pipe import NativePipe
from epdctl.worker.samples import Family, lasting, merge
from epdctl.worker.shielded import shielded
from epdctl.worker.socket_folder import SocketFolder, sweep


class EngineState(StrEnum):
    """Where an engine process is in its life."""

    STARTING = "starting"
    READY = "ready"
    DOWN = "down"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """How to start one engine process.

    `module` is run with `python -m`; `settings` reach it as JSON. `environment` is its whole environment,
    None stands for ours.
    """

    name: str
    module: str
    settings: Mapping[str, Any]
    environment: Mapping[str, str] | None = None
    log_format: LogFormat = "json"
    log_level: LogLevel = "info"
    start_timeout_s: float = 600.0
    beat_timeout_s: float = 30.0
    backoff_s: tuple[float, float] = (0.5, 30.0)
    settled_after_s: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatus:
    """What the front knows about its engine; `reason` says why it is not ready, or what troubles it."""

    state: EngineState
    reason: str | None
    facts: Mapping[str, Any]
    restarts: int
    pid: int | None


def restart_delay(failures: int, backoff_s: tuple[float, float]) -> float:
    """Return the wait before start number `failures + 1`: doubling from the first bound to the second."""
    first, most = backoff_s
    return min(most, first * 2 ** min(failures - 1, 16)) if failures > 0 else 0.0


class Supervisor:
    """Keeps one engine process running and gives access to it."""

    def __init__(self, spec: EngineSpec, context: zmq.asyncio.Context, directory: Path) -> None:
        self._spec = spec
        self._context = context
        self._directory = directory
        self._log = structlog.get_logger().bind(engine=spec.name)
        self._state = EngineState.STARTING
        self._reason: str | None = "the engine process is starting"
        self._trouble: str | None = None
        self._facts: Mapping[str, Any] = {}
        self._restarts = 0
        self._current: EngineProcess | None = None
        self._started: asyncio.Future[None] | None = None
        self._runner: asyncio.Task[None] | None = None
        self._stopping = asyncio.Event()
        self._grace_s = 0.0
        self._tasks: set[asyncio.Task[Any]] = set()
        self._past: list[Family] = []
        self._latest: list[Family] = []

    def status(self) -> EngineStatus:
        """Return where the engine is now."""
        process = self._current.process if self._current else None
        reason = self._trouble if self._state is EngineState.READY else self._reason
        return EngineStatus(
            state=self._state,
            reason=reason,
            facts=self._facts,
            restarts=self._restarts,
            pid=process.pid if process and process.returncode is None else None,
        )

    def unavailable(self) -> EngineUnavailable:
        """Return the failure to answer with while the engine is not ready."""
        reason = self._reason or "the engine process is not ready"
        return EngineUnavailable(reason, retry_after_s=1)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._spawned_ended)

    def _spawned_ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._log.error("engine_task_failed", exc_info=error)

    async def start(self) -> None:
        """Start the engine and wait until it is ready.

        Raises:
            StartFailed: the engine said why it cannot start, ended, or took longer than `start_timeout_s`.
        """
        await asyncio.to_thread(sweep, self._directory, now=time.time())
        self._started = asyncio.get_running_loop().create_future()
        self._runner = asyncio.create_task(self._run())
        await asyncio.shield(self._started)

    def call(self, call_id: str | None = None) -> EngineCall:
        """Open a call; raises EngineUnavailable unless the engine is ready."""
        if self._state is not EngineState.READY or self._current is None:
            raise self.unavailable()
        return EngineCall(self._current, call_id or uuid.uuid4().hex, self._spawn)

    async def families(self, *, deadline_s: float = 0.5) -> list[Family]:
        """Return the engine's metrics, fresh when it answers within `deadline_s`, with those of its past."""
        with suppress(EngineUnavailable, TimeoutError, MalformedMessage):
            async with asyncio.timeout(deadline_s), self.call() as call:
                await call.send("metrics")
                self._latest = (await call.receive()).parse(list[Family])
                call.end()
        return merge([self._past, self._latest])

    async def stop(self, grace_s: float) -> None:
        """End the engine: it has `grace_s` to finish what it accepted, then it is killed."""
        self._grace_s = grace_s
        self._stopping.set()
        if self._runner is not None:
            await self._runner
        for task in list(self._tasks):
            task.cancel()

    async def _run(self) -> None:
        """Start, watch and restart the engine until told to stop."""
        failures = 0
        while not self._stopping.is_set():
            loop = asyncio.get_running_loop()
            begun = loop.time()
            try:
                reason = await self._live()
            except (OSError, zmq.ZMQError) as error:
                self._state, self._reason = EngineState.DOWN, _why_not_run(error)
                reason = self._reason
            except Exception:  # noqa: BLE001 - the one supervisor of this loop; logged on the next line
                self._log.exception("engine_supervision_failed")
                self._state, self._reason = EngineState.DOWN, "the engine process could not be run"
                reason = self._reason
            if self._started is not None and not self._started.done():
                self._state, self._reason = EngineState.STOPPED, reason
                self._started.set_exception(StartFailed(reason))
                return
            if self._stopping.is_set():
                break
            failures = 1 if loop.time() - begun >= self._spec.settled_after_s else failures + 1
            self._restarts += 1
            delay = restart_delay(failures, self._spec.backoff_s)
            self._log.error("engine_down", reason=reason, restart_in_s=delay, restarts=self._restarts)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), delay)
        self._state, self._reason = EngineState.STOPPED, "the worker is shutting down"

    async def _live(self) -> str:
        """Run one engine process from start to end; return why it ended."""
        folder = SocketFolder(self._directory)
        running: EngineProcess | None = None
        channel: Channel | None = None
        native = NativePipe(self._log)
        try:
            channel, endpoints = bind_channel(self._context, folder.path)
            self._state, self._reason = EngineState.STARTING, "the engine process is starting"
            running = EngineProcess(await self._spawn_process(endpoints, native), channel, folder)
            self._current = running
            self._spawn(self._greet(running))
            reason = await self._watch(running)
            self._lose(running, reason)
            return reason
        finally:
            if running is not None and running.death is None:
                self._lose(running, "the engine process could not be watched")
            if running is not None:
                await _kill(running.process)
            native.close()
            if channel is not None:
                channel.close()
            folder.close()

    async def _greet(self, running: EngineProcess) -> None:
        """Say `hello`, for which the engine waits before it says `ready`."""
        with suppress(EngineUnavailable):
            await running.channel.send(message("hello"), deadline_s=self._spec.start_timeout_s)

    def _lose(self, running: EngineProcess, reason: str) -> None:
        """Take the engine out of service, and fail whatever was open on it."""
        if self._state is not EngineState.STOPPED:
            self._state = EngineState.DOWN
        self._reason, self._trouble = reason, None
        self._past, self._latest = lasting(merge([self._past, self._latest])), []
        running.fail_calls(reason)

    async def _spawn_process(self, endpoints: Endpoints, native: NativePipe) -> asyncio.subprocess.Process:
        launch = Launch(
            to_engine=endpoints.to_engine,
            to_front=endpoints.to_front,
            log_format=self._spec.log_format,
            log_level=self._spec.log_level,
            settings=dict(self._spec.settings),
            native_output=native.engine_end,
        )
        process = await asyncio.create_subprocess_exec(
            *shielded(sys.executable, "-m", self._spec.module),
            stdin=asyncio.subprocess.PIPE,
            env=self._spec.environment,
            pass_fds=(native.engine_end,),
        )
        native.listen()
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(launch) + b"\n")
        return process

    async def _watch(self, running: EngineProcess) -> str:
        """Wait for the first of: the process ends, stops beating, does not start in time, or we stop."""
        ended = asyncio.create_task(running.process.wait())
        reader = asyncio.create_task(self._read(running))
        beats = asyncio.create_task(self._await_silence(running))
        stop = asyncio.create_task(self._stopping.wait())
        tasks = (ended, reader, beats, stop)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if stop.done():
                return await self._let_end(running, ended)
            if reader.done():
                return reader.result()
            if beats.done():
                return beats.result()
            return await self._ending(ended.result(), reader)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _ending(self, code: int, reader: asyncio.Task[str]) -> str:
        """Return why the process ended; while it starts, what it said last counts for more than its code."""
        if self._state is EngineState.STARTING:
            with suppress(TimeoutError):
                return await asyncio.wait_for(asyncio.shield(reader), 0.5)
        how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return f"the engine process {how}"

    async def _read(self, running: EngineProcess) -> str:
        """Deliver the engine's messages; return when it breaks the protocol or says that it failed."""
        while True:
            try:
                received = await running.channel.receive()
                if (reason := self._take(running, received)) is not None:
                    return reason
            except MalformedMessage as error:
                return f"the engine process sent a malformed message ({error})"

    def _take(self, running: EngineProcess, received: Message) -> str | None:
        running.last_beat = asyncio.get_running_loop().time()
        if received.kind == "beat":
            beat = received.parse(Beat)
            self._trouble, self._latest = beat.trouble, beat.families
        elif received.kind == "ready":
            self._become_ready(received.parse(dict[str, Any]))
            # Both ends are connected: without the files a killed front leaves nothing behind.
            running.folder.close()
        elif received.kind == "failed":
            return received.parse(Failed).reason
        elif (call := running.calls.get(received.call_id)) is not None:
            call.deliver(received)
        return None

    def _become_ready(self, facts: Mapping[str, Any]) -> None:
        self._state, self._reason, self._trouble, self._facts = EngineState.READY, None, None, facts
        self._log.info("engine_ready", restarts=self._restarts)
        if self._started is not None and not self._started.done():
            self._started.set_result(None)

    async def _await_silence(self, running: EngineProcess) -> str:
        """Return once the engine did not start, or did not beat, for too long."""
        loop = asyncio.get_running_loop()
        running.last_beat = loop.time()
        while True:
            ready = self._state is EngineState.READY
            limit = self._spec.beat_timeout_s if ready else self._spec.start_timeout_s
            left = running.last_beat + limit - loop.time()
            if left <= 0:
                verb = "gave no sign of life" if ready else "was not ready"
                return f"the engine process {verb} for {limit:g} s and was killed"
            await asyncio.sleep(min(left, 1.0))

    async def _let_end(self, running: EngineProcess, ended: asyncio.Task[int]) -> str:
        loading = self._state is EngineState.STARTING
        self._state, self._reason = EngineState.STOPPED, "the worker is shutting down"
        if loading:  # it has accepted nothing, and hears nothing before it is loaded
            return self._reason
        with suppress(EngineUnavailable, TimeoutError):
            await running.channel.send(message("stop", Stop(grace_s=self._grace_s)))
            await asyncio.wait_for(asyncio.shield(ended), self._grace_s + 5.0)
        return "the worker is shutting down"


async def _kill(process: asyncio.subprocess.Process) -> None:
    """End the process for certain, and reap it."""
    if process.stdin is not None:
        process.stdin.close()
    if process.returncode is None:
        with suppress(ProcessLookupError):
            process.kill()
    await process.wait()


def _why_not_run(error: OSError | zmq.ZMQError) -> str:
    cure = ": raise their limit (ulimit -n)" if error.errno in (errno.EMFILE, errno.ENFILE) else ""
    return f"the engine process could not be run: {error.strerror or error}{cure}"
