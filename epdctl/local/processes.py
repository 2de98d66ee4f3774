"""Child processes of a local deployment: start, wait for health, stop.

Rules of this file: each child leads its own session, so that Ctrl-C reaches only us and we take the children
down in order; every wait has a deadline; a child's output goes to its log file.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from epdctl.local.plan import ProcessPlan

_POLL_S = 0.1
_HEALTH_TIMEOUT_S = 2.0


class StartFailed(Exception):
    """A process ended, or did not become healthy in time; the message says where its log is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Child:
    """A running process of the deployment."""

    plan: ProcessPlan
    process: asyncio.subprocess.Process
    log: Path

    @property
    def alive(self) -> bool:
        """Whether the process still runs."""
        return self.process.returncode is None


async def start_child(plan: ProcessPlan, log_dir: Path, environment: dict[str, str]) -> Child:
    """Start `plan` with its output in `log_dir`/<name>.log, which starts empty; raises StartFailed."""
    log = log_dir / f"{plan.name}.log"
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *_program(plan),
            *plan.arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment,
            start_new_session=True,
        )
    return Child(plan=plan, process=process, log=log)


def _program(plan: ProcessPlan) -> tuple[str, ...]:
    if plan.program is None:
        return (sys.executable, "-m", "epdctl")
    # Beside this interpreter: where the wheel that has it put it, whatever the PATH says.
    path = Path(sys.executable).parent / plan.program
    if not path.is_file():
        extras = "epdctl[cpu], epdctl[cuda12], epdctl[cuda13]"
        raise StartFailed(f"{path} is missing: install one of the extras {extras}")
    return (str(path),)


def _last_lines(log: Path, count: int = 5) -> str:
    lines = log.read_text(errors="replace").splitlines()[-count:]
    return "\n".join(f"    {line}" for line in lines)


async def wait_healthy(child: Child, timeout_s: float) -> None:
    """Wait until `child` answers /health with 200; raise StartFailed when it ends or `timeout_s` is over."""
    deadline = asyncio.get_running_loop().time() + timeout_s
    limits = aiohttp.ClientTimeout(total=_HEALTH_TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=limits) as session:
        while asyncio.get_running_loop().time() < deadline:
            if not child.alive:
                raise StartFailed(
                    f"{child.plan.name} ended with exit code {child.process.returncode}; "
                    f"the end of {child.log}:\n{_last_lines(child.log)}"
                )
            try:
                async with session.get(child.plan.url + "/health") as answer:
                    if answer.status == 200:
                        return
            except (aiohttp.ClientError, TimeoutError):
                pass
            await asyncio.sleep(_POLL_S)
    raise StartFailed(f"{child.plan.name} was not healthy within {timeout_s:g} s; see {child.log}")


def _signal_group(child: Child, number: signal.Signals) -> None:
    try:
        os.killpg(child.process.pid, number)
    except ProcessLookupError:
        return


async def stop_children(children: list[Child], grace_s: float) -> None:
    """End `children`: SIGTERM to all at once, SIGKILL to their groups after `grace_s` seconds."""
    for child in children:
        if child.alive:
            child.process.terminate()
    waits = [asyncio.ensure_future(child.process.wait()) for child in children]
    if waits:
        await asyncio.wait(waits, timeout=grace_s)
    for child in children:
        _signal_group(child, signal.SIGKILL)
    if waits:
        await asyncio.wait(waits, timeout=5)
