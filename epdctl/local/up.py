"""`epdctl up`: a local deployment that runs until Ctrl-C or SIGTERM, or until one of its processes ends."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import Coroutine
from pathlib import Path

from epdctl.config import EXIT_FAILED, EXIT_OK, child_environment
from epdctl.config.local import UpSettings
from epdctl.local.deployment import Deployment, Say, deploy
from epdctl.local.plan import WorkerOptions
from epdctl.local.processes import StartFailed
from epdctl.local.shape import parse_shape


def progress(started: float) -> Say:
    """Return a `say` that writes to stderr with the seconds since `started` (monotonic)."""

    def say(message: str) -> None:
        print(f"[{time.monotonic() - started:6.1f} s] {message}", file=sys.stderr, flush=True)  # noqa: T201

    return say


def curl_lines(deployment: Deployment, model: str) -> str:
    """Return shell lines that use the deployment: the roster, a text request, metrics."""
    body = f'{{"model": "{model}", "messages": [{{"role": "user", "content": "What color is this?"}}]}}'
    return (
        f"  curl {deployment.url}/instances\n"
        f"  curl {deployment.url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'\n"
        f"  curl {deployment.url}/metrics\n"
    )


def _resident_mib(pid: int) -> int:
    """Return the resident memory of process `pid` and its descendants in MiB (Linux)."""
    total = 0
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            facts = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
        except (FileNotFoundError, ProcessLookupError):
            continue
        if pid in (int(facts["Pid"]), int(facts["PPid"])):
            total += int(facts.get("VmRSS", "0 kB").split()[0])
    return total // 1024


async def _until_one_ends(deployment: Deployment, say: Say) -> int:
    exits = {asyncio.ensure_future(child.process.wait()): child for child in deployment.children}
    try:
        done, _ = await asyncio.wait(exits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in exits:
            task.cancel()
    for child in (exits[task] for task in done):
        say(f"{child.plan.name}: ended with exit code {child.process.returncode}, see {child.log}")
    return EXIT_FAILED


async def _serve(settings: UpSettings, say: Say) -> int:
    model = settings.served_model_name or settings.model
    async with deploy(
        parse_shape(settings.shape),
        WorkerOptions(
            model=settings.model,
            served_model_name=model,
            device=settings.device,
            with_store=settings.with_store,
        ),
        proxy_port=settings.port,
        log_dir=settings.log_dir,
        environment=child_environment(),
        start_timeout_s=settings.start_timeout,
        stop_grace_s=settings.stop_grace,
        say=say,
    ) as deployment:
        for child in deployment.children:
            say(f"{child.plan.name}: {_resident_mib(child.process.pid)} MiB resident")
        say(f"{settings.shape} serves at {deployment.url}; Ctrl-C stops it. Try:")
        sys.stderr.write(curl_lines(deployment, model))
        return await _until_one_ends(deployment, say)


async def run_until_signal(
    work: Coroutine[None, None, int], say: Say, *, when_signalled: int = EXIT_OK
) -> int:
    """Run `work`; on SIGINT or SIGTERM cancel it, let it clean up, and return `when_signalled`."""
    task = asyncio.ensure_future(work)
    loop = asyncio.get_running_loop()
    stopped_by_signal = False

    def stop() -> None:
        nonlocal stopped_by_signal
        stopped_by_signal = True
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    try:
        return await task
    except StartFailed as failure:
        say(f"failed: {failure}")
        return EXIT_FAILED
    except asyncio.CancelledError:
        if not stopped_by_signal:
            raise
        return when_signalled


def run(settings: UpSettings) -> int:
    """Run the deployment; return 0 when it was asked to stop, 1 when it failed."""
    say = progress(time.monotonic())
    return asyncio.run(run_until_signal(_serve(settings, say), say))
