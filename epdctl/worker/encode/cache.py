"""The embedding cache: entries live in the arena that Mooncake reads from, so a hit is pushed without a copy.

    cache = EmbeddingCache(arena)
    entry = cache.reserve(key, nbytes)      # evicts unpinned entries, oldest use first; None: no room now
    cache.publish(key, facts)               # its bytes are complete
    cache.get(key)                          # a hit counts as a use
    cache.pin(entry) / cache.unpin(entry)   # while a forward writes it or a push reads it

An entry is `filling` (reserved, pinned by its writer) or `ready`. Only ready, unpinned entries are evicted.
An entry owns its region alone: no view of a batch keeps other bytes alive.

Rules of this file: book-keeping only, the bytes are elsewhere.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from epdctl.worker.transfer.arena import Arena, Region


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What is known of an embedding: its shape in elements, dtype, blake3 of its bytes, reply metadata."""

    rows: int
    width: int
    dtype: str
    digest: str
    metadata: dict[str, Any]


@dataclass(eq=False, slots=True)
class Entry:
    """One embedding in the arena; `facts` is None while it is being filled."""

    key: str
    region: Region
    facts: Facts | None = None
    pins: int = 0
    dropped: bool = False


class EmbeddingCache:
    """Entries by key, least recently used first."""

    def __init__(self, arena: Arena, *, on_evict: Callable[[Entry], None] | None = None) -> None:
        """`on_evict` hears of each entry that makes room for another one, while its bytes are still there."""
        self._arena = arena
        self._on_evict = on_evict
        self._entries: OrderedDict[str, Entry] = OrderedDict()
        self.evictions = 0
        self.nbytes = 0
        """Bytes of the arena that ready entries take up."""

    def __len__(self) -> int:
        return len(self._entries)

    def fits(self, nbytes: int) -> bool:
        """Return whether an embedding of `nbytes` could ever be held."""
        return 0 < nbytes <= self.largest

    @property
    def largest(self) -> int:
        """Bytes of the largest embedding that could ever be held."""
        return self._arena.nbytes

    def has_room(self, nbytes: int) -> bool:
        """Return whether `reserve` would find room for `nbytes` now."""
        return self.fits(nbytes) and nbytes <= self.reach()

    def reach(self) -> int:
        """Return the bytes of the largest embedding that `reserve` would find room for now."""
        return self._arena.largest_reach()

    def get(self, key: str) -> Entry | None:
        """Return the ready entry of `key`, and count that as a use."""
        entry = self._entries.get(key)
        if entry is None or entry.facts is None:
            return None
        self._entries.move_to_end(key)
        return entry

    def reserve(self, key: str, nbytes: int) -> Entry | None:
        """Make room for `key` and return its entry, pinned once for its writer; None when there is no room.

        Nothing is evicted when even that would make no room. The caller fills the bytes and then calls
        `publish`, or `drop`. A key has one entry at a time.
        """
        if key in self._entries:
            raise ValueError("the key has an entry already")
        region = self._arena.allocate(nbytes)
        if region is None and not self.has_room(nbytes):
            return None
        while region is None:
            self._evict_oldest()
            region = self._arena.allocate(nbytes)
        entry = Entry(key, region)
        self._entries[key] = entry
        self.pin(entry)
        return entry

    def publish(self, entry: Entry, facts: Facts) -> None:
        """Say that the bytes of `entry` are complete."""
        entry.facts = facts
        self.nbytes += entry.region.size
        self._entries.move_to_end(entry.key)

    def drop(self, entry: Entry) -> None:
        """Take `entry` out; its bytes come back once nothing pins it."""
        if entry.dropped:
            return
        if self._entries.get(entry.key) is entry:
            del self._entries[entry.key]
        if entry.facts is not None:
            self.nbytes -= entry.region.size
        entry.dropped = True
        self._free_if_over(entry)

    def pin(self, entry: Entry) -> None:
        """Keep the bytes of `entry` where they are until `unpin`; counted."""
        entry.pins += 1
        self._arena.pin(entry.region)

    def unpin(self, entry: Entry) -> None:
        """Undo one `pin`."""
        if entry.pins <= 0:
            raise ValueError("the entry is not pinned")
        entry.pins -= 1
        self._arena.unpin(entry.region)
        self._free_if_over(entry)

    def _free_if_over(self, entry: Entry) -> None:
        if entry.dropped and entry.pins == 0:
            self._arena.free(entry.region)

    def _evict_oldest(self) -> None:
        oldest = next(e for e in self._entries.values() if e.pins == 0 and e.facts is not None)
        if self._on_evict is not None:
            self._on_evict(oldest)
        self.drop(oldest)
        self.evictions += 1
