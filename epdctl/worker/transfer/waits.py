"""Requests that wait for an embedding, woken when something changed about what they wait for.

Rules of this file: whoever waits looks again after each wake-up; nothing is handed over in the wake-up, so a
lost or doubled one is harmless. A wait ends at its deadline at the latest.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Iterable

from epdctl.errors import TransferFailed, UpstreamTimeout
from epdctl.worker.transfer.items import Item
from epdctl.worker.transfer.notices import Lost
from epdctl.worker.transfer.tombstones import End

SUCCESSOR_GRACE_S = 1.0
"""How long a follower whose writer gave up is waited for: its producer asks every 100 ms, reserves anew."""

_REASONS = {
    End.CANCELLED: "it was cancelled",
    End.WRITER_GONE: "the producer that was writing it gave up",
    End.REFUSED: "its bytes do not match their digest",
    End.FAILED: "its producer reported a failure",
    End.EXPIRED: "it was not asked for in time",
}


class Waits:
    """All waits of one receiver, by whatever key they care for."""

    def __init__(self) -> None:
        self._waiting: dict[Hashable, set[asyncio.Event]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    async def until_found(
        self,
        find: Callable[[], Item | Lost | None],
        *,
        keys: Iterable[Hashable | None],
        deadline: float,
    ) -> Item:
        """Return what `find` finds, asking again whenever one of `keys` is woken.

        Raises TransferFailed when it is lost, and UpstreamTimeout at `deadline` (of the event loop's clock).
        """
        woken = asyncio.Event()
        wanted = [key for key in keys if key is not None]
        for key in wanted:
            self._waiting.setdefault(key, set()).add(woken)
        self._count += 1
        try:
            return await _look_until(find, woken, deadline)
        finally:
            self._count -= 1
            for key in wanted:
                self._forget(key, woken)

    def wake(self, *keys: Hashable | None) -> None:
        """Let those who wait for any of `keys` look again."""
        for key in keys:
            for woken in self._waiting.get(key, ()):
                woken.set()

    def wake_all(self) -> None:
        """Let everybody look again."""
        self.wake(*self._waiting)

    def _forget(self, key: Hashable, woken: asyncio.Event) -> None:
        waiting = self._waiting.get(key, set())
        waiting.discard(woken)
        if not waiting:
            self._waiting.pop(key, None)


async def _look_until(find: Callable[[], Item | Lost | None], woken: asyncio.Event, deadline: float) -> Item:
    loop = asyncio.get_running_loop()
    lost_at: float | None = None
    while True:
        woken.clear()
        found = find()
        if isinstance(found, Item):
            return found
        until = deadline
        if isinstance(found, Lost):
            lost_at = loop.time() if lost_at is None else lost_at
            until = min(deadline, lost_at + SUCCESSOR_GRACE_S)
            if found.end is not End.WRITER_GONE or loop.time() >= until:
                raise TransferFailed(f"the embedding did not arrive: {_REASONS[found.end]}")
        else:
            lost_at = None
        if loop.time() >= deadline:
            raise UpstreamTimeout("the embedding did not arrive in time")
        await _wait(woken, until - loop.time())


async def _wait(woken: asyncio.Event, seconds: float) -> None:
    # Waking it costs a third of a timeout context, and whoever waits looks again anyway.
    alarm = asyncio.get_running_loop().call_later(max(0.0, seconds), woken.set)
    try:
        await woken.wait()
    finally:
        alarm.cancel()
