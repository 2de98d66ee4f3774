"""When the harness itself stood still: its own pauses are no latency of the product.

Rules of this file: a stall is an interval in which the event loop ran late; it is noted, never hidden, and
only time limits on single answers subtract it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path

TICK_S, LATE_S = 0.005, 0.010


class Stalls:
    """The intervals in which the harness's event loop was late."""

    def __init__(self) -> None:
        self.intervals: list[tuple[float, float]] = []

    @contextlib.asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Watch the loop while the block runs."""
        watcher = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            watcher.cancel()
            await asyncio.gather(watcher, return_exceptions=True)

    async def _watch(self) -> None:
        while True:
            due = time.monotonic() + TICK_S
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            if now - due > LATE_S:
                self.intervals.append((due, now))

    def within(self, began: float, ended: float) -> float:
        """Return how many seconds of an interval the loop stood still."""
        return sum(max(0.0, min(ended, end) - max(began, begin)) for begin, end in self.intervals)


def wait_for_a_core(pid: int) -> float:
    """Return how many seconds the event loop's thread could run and had no core, since it began."""
    try:
        return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0
