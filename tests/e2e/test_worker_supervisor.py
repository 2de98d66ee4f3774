"""The engine process of a worker as its front sees it: real processes, an engine that computes nothing."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from epdctl.errors import EngineUnavailable, InvalidRequest
from epdctl.worker.engine import NEWS_INTERVAL_S, StartFailed
from epdctl.worker.server import worker_sockets
from epdctl.worker.supervisor import EngineSpec, EngineState, Supervisor
from tests.stubs.process import wait_until

pytestmark = pytest.mark.e2e

Start = Callable[..., Supervisor]


@pytest.fixture
async def engine() -> AsyncIterator[Start]:
    """Build supervisors of the echo engine and end them afterwards."""
    built: list[Supervisor] = []
    directory = Path(tempfile.mkdtemp(prefix="epdctl-"))
    async with worker_sockets() as (context, _):

        def build(*, start: str = "ok", **limits: Any) -> Supervisor:
            spec = EngineSpec(
                name="echo",
                module="tests.stubs.echo_engine",
                settings={"start": start},
                **{"backoff_s": (0.05, 0.2), "start_timeout_s": 30.0, **limits},
            )
            built.append(Supervisor(spec, context, directory))
            return built[-1]

        yield build
        for supervisor in built:
            await supervisor.stop(0.0)
    directory.rmdir()  # noqa: ASYNC240 - fails unless every engine took its socket files along


async def test_call_carries_body_and_frames_both_ways(engine: Start) -> None:
    """Bodies and byte frames of any size arrive unchanged at the engine and back."""
    supervisor = engine()
    await supervisor.start()
    frames = (b"", b"x" * 5, os.urandom(3_000_000))

    async with supervisor.call() as call:
        await call.send("echo", {"a": [1, None, "ä"]}, frames)
        reply = await call.receive()
        call.end()

    assert (reply.kind, reply.parse(dict[str, Any])) == ("echoed", {"a": [1, None, "ä"]})
    assert tuple(bytes(f) for f in reply.frames) == frames


async def test_ready_engine_leaves_no_files(engine: Start) -> None:
    """Once an engine is connected its socket files are gone, so a killed front leaves nothing behind."""
    supervisor = engine()
    await supervisor.start()

    assert list(supervisor._directory.iterdir()) == []
    async with supervisor.call() as call:
        await call.send("echo", {})
        assert (await call.receive()).kind == "echoed"
        call.end()


_FRONT = """
import asyncio, sys
from pathlib import Path
from epdctl.worker.server import worker_sockets
from epdctl.worker.supervisor import EngineSpec, Supervisor

async def main():
    async with worker_sockets() as (context, _):
        spec = EngineSpec(name="echo", module="tests.stubs.echo_engine", settings={"start": "hang"})
        supervisor = Supervisor(spec, context, Path(sys.argv[1]))
        starting = asyncio.create_task(supervisor.start())
        while supervisor.status().pid is None:
            await asyncio.sleep(0.01)
        print(supervisor.status().pid, flush=True)
        await starting

asyncio.run(main())
"""


@pytest.mark.parametrize("at", ["the first moment", "while it loads"])
async def test_front_killed_while_its_engine_loads_leaves_nothing(at: str) -> None:
    """kill -9 of a front whose engine is not ready: the engine ends by itself and takes the files along."""
    directory = Path(tempfile.mkdtemp(prefix="epdctl-"))
    front = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _FRONT, directory, stdout=asyncio.subprocess.PIPE
    )
    assert front.stdout is not None
    engine = Path("/proc", (await front.stdout.readline()).decode().strip())
    if at == "while it loads":
        # An engine that has connected has threads of ZeroMQ's.
        await wait_until(lambda: len(list((engine / "task").iterdir())) > 1, "the engine is connected", 30.0)
    assert list(directory.iterdir())  # noqa: ASYNC240 - they exist, so their end says something
    front.kill()
    await front.wait()

    await wait_until(lambda: not engine.exists(), "the engine's end", 30.0)
    directory.rmdir()  # noqa: ASYNC240 - fails unless the files are gone


async def test_the_first_engine_to_connect_takes_nothing_from_the_others(engine: Start) -> None:
    """A ready engine's socket files are removed, and no others: one that is held back at its start still
    finds its own, and in the end no file is left."""
    fast, slow = engine(), engine()
    starting = asyncio.create_task(slow.start())

    async def is_begun() -> bool:
        return slow.status().pid is not None

    await wait_until(is_begun, "the slow engine's process exists", 10.0)
    pid = slow.status().pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        await fast.start()
        left = [path.name for path in slow._directory.glob("*/*")]
    finally:
        os.kill(pid, signal.SIGCONT)
    await starting
    answers = []
    for supervisor in (fast, slow):
        async with supervisor.call() as call:
            await call.send("echo", {})
            answers.append((await call.receive()).kind)
            call.end()

    assert sorted(left) == ["to-engine", "to-front"]
    assert answers == ["echoed", "echoed"]
    assert list(slow._directory.iterdir()) == []


async def test_failure_of_a_call_arrives_as_the_same_failure(engine: Start) -> None:
    """A failure that the engine reports is raised at the caller with its class, text and field."""
    supervisor = engine()
    await supervisor.start()

    async with supervisor.call() as call:
        await call.send("refuse")
        with pytest.raises(InvalidRequest) as failure:
            await call.receive()

    assert (failure.value.message, failure.value.param) == ("not this", "x")


async def test_killed_engine_fails_open_calls_at_once_and_comes_back(engine: Start) -> None:
    """kill -9 of the engine fails every open call within two seconds; a new process then serves again."""
    supervisor = engine()
    await supervisor.start()

    async with supervisor.call() as one, supervisor.call() as two:
        await one.send("silent")
        await two.send("silent")
        os.kill(supervisor.status().pid or 0, signal.SIGKILL)
        killed_at = time.monotonic()
        for call in (one, two):
            with pytest.raises(EngineUnavailable, match="signal 9"):
                await call.receive()
        took_s = time.monotonic() - killed_at
    await wait_until(lambda: supervisor.status().state is EngineState.READY, "ready", 20.0)

    assert took_s < 2.0
    assert supervisor.status().restarts == 1
    async with supervisor.call() as call:
        await call.send("echo", {})
        assert (await call.receive()).kind == "echoed"
        call.end()


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("loop", "echo loop"),
        ("callback", "callback"),
        ("task", "never retrieved"),
        ("health", "health"),
        ("message", "messages"),
    ],
)
async def test_an_engine_with_a_part_that_failed_is_replaced(engine: Start, what: str, named: str) -> None:
    """A bug that ends any part of an engine ends all of it: open calls fail at once with what has failed, and
    a new process serves."""
    supervisor = engine()
    await supervisor.start()
    first = supervisor.status().pid

    async with supervisor.call() as silent, supervisor.call() as call:
        await silent.send("silent")
        await call.send("break", what)
        with pytest.raises(EngineUnavailable, match=rf"a part of the engine process failed \(.*{named}"):
            await asyncio.wait_for(silent.receive(), 10.0)
    await wait_until(lambda: supervisor.status().state is EngineState.READY, "ready", 20.0)

    assert supervisor.status().pid != first
    assert supervisor.status().restarts == 1


async def test_what_waits_for_health_is_answered_though_that_cannot_be_told(engine: Start) -> None:
    """An answer is sent after the news of the engine's health; when those cannot be made it still arrives."""
    supervisor = engine()
    await supervisor.start()

    async with supervisor.call() as call:
        await call.send("break", "health")
        await call.send("echo", {})
        assert (await call.receive()).kind == "echoed"
        call.end()


async def test_an_engine_that_cannot_be_watched_fails_its_calls(
    engine: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bug of ours where the engine's messages are read costs that engine: its calls fail at once."""
    supervisor = engine()
    await supervisor.start()

    async with supervisor.call() as call:
        await call.send("silent")
        with monkeypatch.context() as patched:
            patched.setattr(supervisor, "_take", lambda running, received: 1 / 0)
            with pytest.raises(EngineUnavailable, match="could not be watched"):
                await asyncio.wait_for(call.receive(), 10.0)
    await wait_until(lambda: supervisor.status().state is EngineState.READY, "ready", 20.0)


async def test_messages_to_a_dying_engine_fail_as_unavailable(engine: Start) -> None:
    """A message that is under way while the engine dies fails as EngineUnavailable, not as a cancellation."""
    supervisor = engine()
    await supervisor.start()

    async def talk() -> str:
        try:
            async with asyncio.timeout(10.0):
                while True:
                    async with supervisor.call() as call:
                        await call.send("echo", {}, (bytes(200_000),))
                        await call.receive()
                        call.end()
        except EngineUnavailable:
            return "unavailable"

    talking = [asyncio.create_task(talk()) for _ in range(8)]
    await asyncio.sleep(0)
    os.kill(supervisor.status().pid or 0, signal.SIGKILL)

    assert await asyncio.gather(*talking, return_exceptions=True) == ["unavailable"] * 8


async def test_no_call_is_taken_while_the_engine_is_down(engine: Start) -> None:
    """While the engine is down, a call fails at once with the reason, and the status says so."""
    supervisor = engine(backoff_s=(30.0, 30.0))
    await supervisor.start()
    os.kill(supervisor.status().pid or 0, signal.SIGKILL)
    await wait_until(lambda: supervisor.status().state is EngineState.DOWN, "down")

    with pytest.raises(EngineUnavailable, match="signal 9"):
        supervisor.call()

    assert "signal 9" in (supervisor.status().reason or "")


async def test_hung_engine_is_killed_and_replaced(engine: Start) -> None:
    """An engine whose loop stands still is killed after the beat time-out and replaced."""
    supervisor = engine(beat_timeout_s=2.0)
    await supervisor.start()
    first = supervisor.status().pid

    async with supervisor.call() as call:
        await call.send("hang")
        with pytest.raises(EngineUnavailable, match="no sign of life"):
            await call.receive()
    await wait_until(lambda: supervisor.status().state is EngineState.READY, "ready", 20.0)

    assert supervisor.status().pid != first


@pytest.mark.parametrize(
    ("start", "reason"),
    [("fail", "no model at this place"), ("die", "signal 9"), ("hang", "was not ready for")],
)
async def test_first_start_that_fails_says_why(engine: Start, start: str, reason: str) -> None:
    """An engine that cannot start the first time is not retried: the worker learns the reason."""
    supervisor = engine(start=start, start_timeout_s=3.0 if start == "hang" else 30.0)

    with pytest.raises(StartFailed, match=reason):
        await supervisor.start()

    assert supervisor.status().state is EngineState.STOPPED


async def test_leaving_a_call_early_tells_the_engine(engine: Start) -> None:
    """A caller that goes away cancels its work at the engine; one that has ended does not."""
    supervisor = engine()
    await supervisor.start()

    async with supervisor.call("watch") as watch:
        async with supervisor.call("over") as over:
            await over.send("echo", {})
            await over.receive()
            over.end()
        async with supervisor.call("left") as left:
            await left.send("silent")
        cancelled = await watch.receive()
        watch.end()

    assert cancelled.parse(dict[str, str]) == {"call": "left"}


async def count(supervisor: Supervisor, *, then_kill: bool = False) -> None:
    """Have the engine count five bytes; kill it the moment it has answered if so asked."""
    async with supervisor.call() as call:
        await call.send("count")
        await call.receive()
        if then_kill:
            os.kill(supervisor.status().pid or 0, signal.SIGKILL)
        call.end()


async def counted(supervisor: Supervisor) -> float:
    """Return how many bytes the front says were counted."""
    families = await supervisor.families()
    return sum(s.value for f in families for s in f.samples if s.name == "epdctl_ec_bytes_total")


async def test_counters_survive_the_engine(engine: Start) -> None:
    """Counters of an engine process that died are kept and added to those of its successor."""
    supervisor = engine(beat_timeout_s=30.0)
    await supervisor.start()

    await count(supervisor)
    assert await counted(supervisor) == 5.0
    os.kill(supervisor.status().pid or 0, signal.SIGKILL)
    await wait_until(lambda: supervisor.status().restarts == 1, "restart")
    await wait_until(lambda: supervisor.status().state is EngineState.READY, "ready", 20.0)
    await count(supervisor)

    assert await counted(supervisor) == 10.0


async def test_what_was_answered_is_counted_though_the_engine_dies(engine: Start) -> None:
    """The numbers of an engine killed the moment it answered, before anybody asked for them, are not lost."""
    supervisor = engine()
    await supervisor.start()
    await asyncio.sleep(2 * NEWS_INTERVAL_S)

    await count(supervisor, then_kill=True)
    await wait_until(lambda: supervisor.status().restarts == 1, "restart")

    assert await counted(supervisor) == 5.0


async def test_what_a_library_writes_is_told_in_the_log(
    engine: Start, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its lines on stderr are lines of the front's log, one for many equal ones; Python's own stay there."""
    supervisor = engine()
    with capture_logs() as logs:
        await supervisor.start()
        async with supervisor.call() as call:
            for _ in range(3):
                await call.send("say", "E1130 00:38:39.123456 12345 plugin.cpp:10] connect() refused\n")
            await call.send("die")
            with pytest.raises(EngineUnavailable):
                await call.receive()
        await wait_until(lambda: supervisor.status().restarts == 1, "restart")

    told = [line for line in logs if line["event"] == "native_output"]
    assert [(line["text"], line["source"], line["engine"]) for line in told] == [
        ("connect() refused", "plugin.cpp:10", "echo")
    ]
    assert capfd.readouterr().err.splitlines().count("by Python") == 3


async def test_engine_ends_when_its_front_is_gone(engine: Start) -> None:
    """An engine whose front closes its pipe (as a killed front does) ends by itself."""
    supervisor = engine()
    await supervisor.start()
    running = supervisor._current
    assert running is not None and running.process.stdin is not None

    running.process.stdin.close()

    assert await asyncio.wait_for(running.process.wait(), 10.0) == 0
