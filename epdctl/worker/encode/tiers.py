"""The tiers of the embedding cache in this process: the arena (L1), and host memory (L2) for what it evicts.

    tiers = Tiers(arena, dram_bytes, demote=..., evicted=...)
    tiers.cache                     # L1; what it evicts is demoted
    tiers.promote(key)              # -> Promotion, NO_ROOM, TOO_LARGE, or None: L2 does not have it
    tiers.promoted(promotion)       # its bytes are in the arena (or `failed`: they are not)

An embedding is in one tier. `demote(slot, region)` is called for each eviction, before the region is given
away: the rows must be copied into the slot before anything is written into the arena afterwards. A promotion
takes its slot out of L2 only together with its place in the arena: without one nothing moves, in any tier.
Since the slot leaves first, those that make room for it find its bytes free in L2.

Rules of this file: decisions only; who copies is told by `demote` and by what `promote` returns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from epdctl.worker.encode.cache import EmbeddingCache, Entry
from epdctl.worker.encode.dram import DramTier, Slot
from epdctl.worker.transfer.arena import Arena, Region


@dataclass(frozen=True, slots=True, kw_only=True)
class Promotion:
    """Copy the rows of `slot` to where `entry` lies; the entry is pinned until `promoted` or `failed`."""

    entry: Entry
    slot: Slot


class Stays(StrEnum):
    """Why an embedding stays in L2."""

    NO_ROOM = "no_room"
    TOO_LARGE = "too_large"


class Tiers:
    """See the module."""

    def __init__(
        self,
        arena: Arena,
        dram_bytes: int,
        *,
        demote: Callable[[Slot, Region], None],
        evicted: Callable[[str, int], None],
    ) -> None:
        """`evicted` hears how many embeddings a tier ("l1", "l2") gave up to make room."""
        self.cache = EmbeddingCache(arena, on_evict=self._evicted)
        self.dram = DramTier(dram_bytes)
        self._demote = demote
        self._told = evicted

    def promote(self, key: str) -> Promotion | Stays | None:
        """Give the embedding of `key` a place in the arena; None when L2 does not have it."""
        slot = self.dram.get(key)
        if slot is None:
            return None
        if not self.cache.fits(slot.nbytes):
            return Stays.TOO_LARGE
        if not self.cache.has_room(slot.nbytes):
            return Stays.NO_ROOM
        self.dram.take(slot)
        entry = self.cache.reserve(key, slot.nbytes)
        assert entry is not None, "there is room"
        return Promotion(entry=entry, slot=slot)

    def promoted(self, promotion: Promotion) -> None:
        """The rows are in the arena. The caller unpins the entry once whoever waited has pinned it."""
        self.cache.publish(promotion.entry, promotion.slot.facts)

    def failed(self, promotion: Promotion) -> None:
        """The rows could not be copied: they are in no tier any more."""
        self.cache.drop(promotion.entry)
        self.cache.unpin(promotion.entry)

    def _evicted(self, entry: Entry) -> None:
        assert entry.facts is not None, "only ready entries are evicted"
        before = self.dram.evictions
        slot = self.dram.add(entry.key, entry.region.nbytes, entry.facts)
        self._told("l1", 1)
        if self.dram.evictions > before:
            self._told("l2", self.dram.evictions - before)
        if slot is not None:
            self._demote(slot, entry.region)
