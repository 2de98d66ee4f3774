"""How many requests are worked on at once: permits, and a bounded queue in the order of arrival.

Rules of this file: a permit lives as long as the response body; a waiter that leaves gives its place back; no
clock of its own, the wait has the deadline it is given.
"""

from __future__ import annotations

import asyncio
from collections import deque

from epdctl.errors import Overloaded

_RETRY_AFTER_S = 1


class Admission:
    """Permits for `limit` requests (0: any number); `queue_size` more may wait `wait_s`."""

    def __init__(self, *, limit: int, queue_size: int, wait_s: float) -> None:
        self._limit = limit
        self._queue_size = queue_size
        self._wait_s = wait_s
        self._active = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def active(self) -> int:
        """How many permits are out."""
        return self._active

    async def enter(self) -> None:
        """Take a permit; raises Overloaded when the queue is full or the wait was too long."""
        if not self._limit or self._active < self._limit:
            self._active += 1
            return
        if len(self._waiting) >= self._queue_size:
            raise Overloaded("too many requests are waiting", retry_after_s=_RETRY_AFTER_S)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            async with asyncio.timeout(self._wait_s):
                await turn
        except TimeoutError:
            self._give_up(turn)
            raise Overloaded("the wait for a free slot was too long", retry_after_s=_RETRY_AFTER_S) from None
        except asyncio.CancelledError:
            self._give_up(turn)
            raise

    def leave(self) -> None:
        """Give the permit to the first that waits, or back."""
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self._active -= 1

    def _give_up(self, turn: asyncio.Future[None]) -> None:
        """Leave the queue; a permit that came at the same moment goes on to the next."""
        if turn.done() and not turn.cancelled():
            self.leave()
        elif turn in self._waiting:
            self._waiting.remove(turn)
