"""Children that a terminal's Ctrl-C does not reach."""

from __future__ import annotations

import asyncio
import sys

import pytest
import uvloop

from epdctl.worker.shielded import shielded

pytestmark = pytest.mark.unit

_PROGRAM = """
import os, signal, sys
ignored = [signal.getsignal(number) == signal.SIG_IGN for number in (signal.SIGINT, signal.SIGTERM)]
print(os.getpid(), *ignored, sys.stdin.read())
raise SystemExit(7)
"""


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_a_shielded_program_is_itself_and_ignores_both_signals(run: object) -> None:
    """Process id, pipes, arguments and exit code are the program's own; under uvloop, too."""

    async def ask() -> tuple[int, int | None, list[str]]:
        process = await asyncio.create_subprocess_exec(
            *shielded(sys.executable, "-c", _PROGRAM, "a b", "$HOME"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        out, _ = await asyncio.wait_for(process.communicate(b"heard"), 30.0)
        return process.pid, process.returncode, out.decode().split()

    pid, code, words = run(ask())  # type: ignore[operator]

    assert (code, words) == (7, [str(pid), "True", "True", "heard"])
