"""Processes that tests start: own process group, logs in files, always ended.

Rules of this file: waiting is "until this holds, at most so long", never a fixed sleep; a deadline that
passes shows the end of the process's logs; teardown kills the whole group, also when the test failed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

POLL_S = 0.02


class NotInTime(AssertionError):
    """A condition did not hold before its deadline."""


async def wait_until(
    condition: Callable[[], bool | Awaitable[bool]], what: str, timeout_s: float = 10.0
) -> None:
    """Return as soon as `condition` holds; raise NotInTime naming `what` after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while True:
        held = condition()
        if isinstance(held, Awaitable):
            held = await held
        if held:
            return
        if time.monotonic() > deadline:
            raise NotInTime(f"not within {timeout_s} s: {what}")
        await asyncio.sleep(POLL_S)


class Process:
    """One program in its own process group; stdout and stderr go to two files.

    Use `start_process`; `stop` is idempotent and is what teardown calls.
    """

    def __init__(
        self, popen: subprocess.Popen[bytes], command: Sequence[str], name: str, stdout: Path, stderr: Path
    ) -> None:
        self.popen = popen
        self.command = tuple(command)
        self.name = name
        self.stdout_path = stdout
        self.stderr_path = stderr

    @property
    def pid(self) -> int:
        """The process id, which is also its group's."""
        return self.popen.pid

    @property
    def exit_code(self) -> int | None:
        """The exit code, or None while it runs (negative: ended by that signal)."""
        return self.popen.poll()

    @property
    def stdout(self) -> str:
        """All of stdout so far."""
        return self.stdout_path.read_text(errors="replace")

    @property
    def stderr(self) -> str:
        """All of stderr so far."""
        return self.stderr_path.read_text(errors="replace")

    @property
    def logs(self) -> str:
        """Stdout, then stderr."""
        return self.stdout + self.stderr

    def rss_bytes(self) -> int:
        """Resident memory of the process itself, without children."""
        fields = Path(f"/proc/{self.pid}/statm").read_text().split()
        return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")

    def peak_rss_bytes(self) -> int:
        """The most resident memory since the start, or since `reset_peak_rss`."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))) * 1024

    def reset_peak_rss(self) -> None:
        """Let the peak start anew from what is resident now."""
        Path(f"/proc/{self.pid}/clear_refs").write_text("5")

    def open_descriptors(self) -> int:
        """How many descriptors it holds."""
        return sum(1 for _ in Path(f"/proc/{self.pid}/fd").iterdir())

    def send_signal(self, number: int) -> None:
        """Send a signal to the process alone."""
        self.popen.send_signal(number)

    def kill_group(self) -> None:
        """SIGKILL the process and everything it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    async def wait_exit(self, timeout_s: float = 10.0) -> int:
        """Return the exit code once it ended; raise NotInTime with its log's end."""
        await self.wait_until(lambda: self.exit_code is not None, "exit", timeout_s, alive=False)
        return self.popen.returncode

    async def wait_until(
        self,
        condition: Callable[[], bool | Awaitable[bool]],
        what: str,
        timeout_s: float = 10.0,
        *,
        alive: bool = True,
    ) -> None:
        """Wait for a condition about this process; with `alive`, its death ends the wait at once."""

        async def holds() -> bool:
            held = condition()
            if isinstance(held, Awaitable):
                held = await held
            if not held and alive and self.exit_code is not None:
                raise NotInTime(f"{self.name} exited with {self.exit_code} before: {what}\n{self.log_tail()}")
            return held

        try:
            await wait_until(holds, what, timeout_s)
        except NotInTime as late:
            if self.exit_code is None or not alive:
                raise NotInTime(f"{self.name}: {late}\n{self.log_tail()}") from None
            raise

    def log_tail(self, characters: int = 4000) -> str:
        """The end of both logs, for a failure message."""
        return f"--- {self.name} stdout\n{self.stdout[-characters:]}\n--- stderr\n{self.stderr[-characters:]}"

    async def stop(self, number: int = signal.SIGTERM, grace_s: float = 3.0) -> int:
        """End it with `number`, and the whole group with SIGKILL after `grace_s`; return the exit code."""
        if self.exit_code is None:
            self.send_signal(number)
            with contextlib.suppress(NotInTime):
                await wait_until(lambda: self.exit_code is not None, "exit", grace_s)
        self.kill_group()
        return self.popen.wait(timeout=10)

    def close(self) -> None:
        """Kill the group at once; for teardown outside an event loop."""
        self.kill_group()
        self.popen.wait(timeout=10)


def start_process(
    command: Sequence[str],
    log_dir: Path,
    name: str,
    *,
    env: Mapping[str, str | None] | None = None,
    cwd: Path | None = None,
) -> Process:
    """Start `command`; `env` is laid over this process's environment, None removes a variable."""
    environment = dict(os.environ)
    for key, value in (env or {}).items():
        if value is None:
            environment.pop(key, None)
        else:
            environment[key] = value
    log_dir.mkdir(parents=True, exist_ok=True)
    stdout, stderr = log_dir / f"{name}.out", log_dir / f"{name}.err"
    with stdout.open("ab") as out, stderr.open("ab") as err:
        popen = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env=environment,
            cwd=cwd,
            start_new_session=True,
        )
    return Process(popen, command, name, stdout, stderr)


def epdctl_command(*arguments: str) -> list[str]:
    """Return the command line that runs `epdctl` from this checkout."""
    return [sys.executable, "-m", "epdctl", *arguments]
