"""Work that is done a little in each turn of the event loop, so that what comes in is read in between.

    turns = Turns(); turns.add(work); turns.close()

Rules of this file: in the order of coming, the first few at once; one that fails takes nobody with it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

AT_ONCE = 8
EACH_TURN = 16


class Turns:
    """Calls what is added: `AT_ONCE` when it is added, the rest `EACH_TURN` at a time."""

    def __init__(self) -> None:
        self._work: deque[Callable[[], None]] = deque()
        self._turn: asyncio.Handle | None = None
        self._done_at_once = 0

    def add(self, work: Callable[[], None]) -> None:
        """Call `work`, now or soon; raises what it raises now."""
        if self._turn is None:
            self._done_at_once = 0
            self._turn = asyncio.get_running_loop().call_soon(self._take)
        if self._done_at_once < AT_ONCE and not self._work:
            self._done_at_once += 1
            work()
        else:
            self._work.append(work)

    def close(self) -> None:
        """Call nothing more."""
        self._work.clear()
        if self._turn is not None:
            self._turn.cancel()

    def _take(self) -> None:
        self._turn = None
        try:
            for _ in range(min(EACH_TURN, len(self._work))):
                self._work.popleft()()
        finally:
            if self._work:
                self._turn = asyncio.get_running_loop().call_soon(self._take)
