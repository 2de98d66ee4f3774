"""The embedding cache of an encode engine with the tiers that its settings ask for, put together.

    stack = TierStack(settings, memory, arena, metrics, events)
    await stack.start()
    stack.cache                 # L1, the arena
    stack.lookups               # the tiers below it
    stack.publish(key)          # the tower made an embedding: offer it to the other workers
    await stack.settled()       # after a reservation, before anything is written there
    stack.wake()                # arena space came back
    await stack.close()

Rules of this file: wiring only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from epdctl.metrics import WorkerMetrics
from epdctl.worker.encode.arena_memory import ArenaMemory
from epdctl.worker.encode.dram import Slot
from epdctl.worker.encode.lookups import LookupPolicy, Lookups, Result
from epdctl.worker.encode.messages import EncodeEngineSettings, StoreSettings
from epdctl.worker.encode.mover import Mover
from epdctl.worker.encode.shared_tier import PinnedRows, SharedPolicy, SharedTier
from epdctl.worker.encode.store import StoreAddress, StoreClient, StoredValue
from epdctl.worker.encode.tiers import Tiers
from epdctl.worker.transfer.arena import Arena, Region


@dataclass(frozen=True, slots=True, kw_only=True)
class StackEvents:
    """`found`: how a look-up ended; `fits`: whether a value is our tower's; `room`: space came back."""

    found: Callable[[str, Result], None]
    fits: Callable[[StoredValue], bool]
    room: Callable[[], None]


class TierStack:
    """See the module."""

    def __init__(
        self,
        settings: EncodeEngineSettings,
        memory: ArenaMemory,
        arena: Arena,
        metrics: WorkerMetrics,
        events: StackEvents,
    ) -> None:
        self._memory = memory
        self._room = events.room
        self._mover = Mover(memory)
        self._tiers = Tiers(
            arena,
            settings.cache_dram_bytes,
            demote=self._demote,
            evicted=lambda tier, count: metrics.cache_evictions.labels(tier).inc(count),
        )
        self.cache = self._tiers.cache
        self._shared = self._new_shared(settings, settings.store, metrics) if settings.store else None
        policy = LookupPolicy(room_wait_s=settings.transfer_timeout_s, fits=events.fits)
        self.lookups = Lookups(self._tiers, self._mover, self._shared, metrics, policy, events.found)
        metrics.cache_bytes.labels("l1").set_function(lambda: self.cache.nbytes)
        if settings.cache_dram_bytes:
            metrics.cache_bytes.labels("l2").set_function(lambda: self._tiers.dram.nbytes)

    def _new_shared(
        self, settings: EncodeEngineSettings, store: StoreSettings, metrics: WorkerMetrics
    ) -> SharedTier:
        address = StoreAddress(
            address=store.address,
            host=settings.host,
            protocol=settings.mooncake_protocol,
            segment_bytes=store.segment_bytes,
            buffer_bytes=store.buffer_bytes,
        )
        return SharedTier(StoreClient(address), SharedPolicy(look_s=store.timeout_s), metrics, self._pin)

    async def start(self) -> None:
        """Connect to the store, if there is one."""
        if self._shared is not None:
            await self._shared.start()

    async def close(self) -> None:
        """End the look-ups, leave the store, end the threads."""
        await self.lookups.close()
        if self._shared is not None:
            await self._shared.close()
        self._mover.close()

    def publish(self, key: str) -> None:
        """Offer an embedding that the tower made to the shared store."""
        if self._shared is not None:
            self._shared.publish(key)

    async def settled(self) -> None:
        """Return when what was evicted so far has been copied out of the arena."""
        await self._mover.settled()

    def wake(self) -> None:
        """Say that arena space came back."""
        self.lookups.wake()

    def _demote(self, slot: Slot, region: Region) -> None:
        self._mover.demote(slot, region)

    def _pin(self, key: str) -> PinnedRows | None:
        entry = self.cache.get(key)
        if entry is None or entry.facts is None:
            return None
        self.cache.pin(entry)

        def release() -> None:
            self.cache.unpin(entry)
            self._room()

        parts = self._memory.parts(entry.region.offset, entry.region.nbytes)
        return PinnedRows(facts=entry.facts, nbytes=entry.region.nbytes, parts=parts, release=release)
