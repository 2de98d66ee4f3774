"""Looks an embedding up in the tiers below the arena, and brings it there.

    lookups = Lookups(tiers, mover, shared, metrics, policy, found)
    lookups.begin(key)          # false: no lower tier can have it, nothing was begun
    lookups.wake()              # arena space came back
    await lookups.close()

`found(key, result)` is called once for each look-up that was begun: with the entry, pinned until it
returns; with None, when the tower has to make it; or with the failure to answer with. A look-up that nobody
waits for any more is let end: its embedding is in the arena then, and in no other tier of this process.

Rules of this file: order of steps. Callers do not begin a key twice at a time (single flight is in
`flights`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from epdctl.errors import EpdError
from epdctl.metrics import WorkerMetrics
from epdctl.worker.encode.cache import Entry
from epdctl.worker.encode.mover import Mover
from epdctl.worker.encode.room import no_room
from epdctl.worker.encode.shared_tier import SharedTier
from epdctl.worker.encode.store import StoredValue
from epdctl.worker.encode.tiers import Promotion, Stays, Tiers

Result = Entry | EpdError | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupPolicy:
    """`room_wait_s`: how long a promotion waits for space; `fits`: whether a stored value is our tower's."""

    room_wait_s: float
    fits: Callable[[StoredValue], bool]


class Lookups:
    """All look-ups under way."""

    def __init__(
        self,
        tiers: Tiers,
        mover: Mover,
        shared: SharedTier | None,
        metrics: WorkerMetrics,
        policy: LookupPolicy,
        found: Callable[[str, Result], None],
    ) -> None:
        self._tiers = tiers
        self._mover = mover
        self._shared = shared
        self._metrics = metrics
        self._policy = policy
        self._found = found
        self._tasks: set[asyncio.Task[None]] = set()
        self._room = asyncio.Event()
        self._log = structlog.get_logger()

    def begin(self, key: str) -> bool:
        """Look `key` up, if a lower tier may have it."""
        in_dram = key in self._tiers.dram
        if self._tiers.dram.budget and not in_dram:
            self._count("l2", "miss")
        if not in_dram and self._shared is None:
            return False
        task = asyncio.create_task(self._run(key))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return True

    def wake(self) -> None:
        """Say that arena space came back."""
        self._room.set()

    async def close(self) -> None:
        """Give up what is under way."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _count(self, tier: str, result: str) -> None:
        self._metrics.cache_requests.labels(tier, result).inc()

    async def _run(self, key: str) -> None:
        result: Result = None
        try:
            result = await self._from_dram(key)
            if result is None and self._shared is not None:
                result = await self._from_store(key, self._shared)
        except EpdError as error:
            result = error
        except Exception:  # noqa: BLE001 - the one supervisor of a look-up: the tower makes the embedding then
            self._log.exception("cache_lookup_failed", key=key)
        self._found(key, result)
        if isinstance(result, Entry):
            self._tiers.cache.unpin(result)

    async def _from_dram(self, key: str) -> Entry | None:
        """Return the promoted entry; raises Overloaded when the arena has no room for it in time."""
        promotion = await self._promotion(key)
        if promotion is None:
            return None
        if not await asyncio.shield(self._mover.promote(promotion.slot, promotion.entry.region)):
            self._tiers.failed(promotion)
            self._count("l2", "miss")
            return None
        self._tiers.promoted(promotion)
        self._count("l2", "hit")
        return promotion.entry

    async def _promotion(self, key: str) -> Promotion | None:
        deadline = asyncio.get_running_loop().time() + self._policy.room_wait_s
        while True:
            self._room.clear()
            promotion = self._tiers.promote(key)
            if isinstance(promotion, Promotion) or promotion is None:
                return promotion
            if promotion is Stays.TOO_LARGE:
                self._count("l2", promotion.value)
                return None
            await self._await_room(deadline)

    async def _await_room(self, deadline: float) -> None:
        try:
            await asyncio.wait_for(self._room.wait(), deadline - asyncio.get_running_loop().time())
        except TimeoutError:
            self._count("l2", Stays.NO_ROOM.value)
            raise no_room() from None

    async def _from_store(self, key: str, shared: SharedTier) -> Entry | None:
        """Return the entry with what the store has; None without arena space, which the tower waits for."""
        value = await shared.look(key)
        if value is None or not self._policy.fits(value):
            return None
        entry = self._tiers.cache.reserve(key, value.rows.nbytes)
        if entry is None:
            return None
        await asyncio.shield(self._mover.fill(value.rows, entry.region))
        self._tiers.cache.publish(entry, value.facts)
        return entry
