"""The embeddings in a consumer's arena: one region each, shared by all transfers and readers of one mm_hash.

Rules of this file: an item is in the table under its hash until it is dropped; it is evictable only while it
is available and nobody refers to it. A region whose writer was given up rests before it is reused: writes
that were reported as failed still landed after seconds (seen on the transfer engine). Times are monotonic
seconds, handed in.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field

from epdctl.domain import MmHash, TransferId
from epdctl.worker.transfer.arena import Arena, Region
from epdctl.worker.transfer.ports import TensorSpec


@dataclass(slots=True, eq=False)
class Item:
    """One embedding. `references` counts ready reservations and readers; none makes it evictable."""

    mm_hash: MmHash
    spec: TensorSpec
    region: Region
    available: bool = False
    loaded: bool = False
    references: int = 0
    followers: dict[TransferId, None] = field(default_factory=dict)


class ItemTable:
    """Places items in the arena, evicts the least recently used ones, and keeps doubtful regions apart."""

    def __init__(self, arena: Arena, *, quarantine_s: float) -> None:
        self._arena = arena
        self._quarantine_s = quarantine_s
        self._items: dict[MmHash, Item] = {}
        self._residents: OrderedDict[MmHash, Item] = OrderedDict()
        self._resting: deque[tuple[float, Region]] = deque()

    def find(self, mm_hash: MmHash) -> Item | None:
        """Return the item of that hash, available or being written."""
        return self._items.get(mm_hash)

    def place(self, mm_hash: MmHash, spec: TensorSpec, nbytes: int) -> Item | None:
        """Return a new item to be written, evicting unused ones as needed; None when there is no room."""
        if nbytes > self._arena.nbytes:
            return None
        region = self._arena.allocate(nbytes)
        while region is None and self._residents:
            _, oldest = self._residents.popitem(last=False)
            self._forget(oldest)
            self._arena.free(oldest.region)
            region = self._arena.allocate(nbytes)
        if region is None:
            return None
        item = Item(mm_hash, spec, region)
        self._items[mm_hash] = item
        return item

    def refer(self, item: Item) -> None:
        """Count one more user of an available item."""
        item.references += 1
        self._residents.pop(item.mm_hash, None)

    def unrefer(self, item: Item) -> None:
        """Count one user less; an item that was never read leaves with its last one, others stay resident."""
        item.references -= 1
        if item.references:
            return
        if item.loaded:
            self._residents[item.mm_hash] = item
        else:
            self.drop(item)

    def open_for_reading(self, item: Item) -> None:
        """Pin the bytes of an item that its reader refers to already."""
        item.loaded = True
        self._arena.pin(item.region)

    def close_reading(self, item: Item) -> None:
        """End one reading, and its reference."""
        self._arena.unpin(item.region)
        self.unrefer(item)

    def drop(self, item: Item) -> None:
        """Free an item that nobody uses or writes any more."""
        self._forget(item)
        self._arena.free(item.region)

    def rest(self, item: Item, now: float) -> None:
        """Take an item away whose writer may still be heard of; its region is reused after the quarantine."""
        self._forget(item)
        self._arena.quarantine(item.region)
        self._resting.append((now + self._quarantine_s, item.region))

    def detach(self, item: Item) -> None:
        """Keep the region but not the name, so that the same hash can be written elsewhere meanwhile."""
        self._forget(item)

    def expire(self, now: float) -> None:
        """Free the regions that have rested long enough."""
        while self._resting and self._resting[0][0] <= now:
            self._arena.free(self._resting.popleft()[1])

    def __len__(self) -> int:
        return len(self._items)

    @property
    def resident_bytes(self) -> int:
        """Bytes of items that nobody uses: taken, yet there for whoever needs room."""
        return sum(item.region.size for item in self._residents.values())

    def _forget(self, item: Item) -> None:
        # A detached item's name may belong to its successor by now.
        if self._items.get(item.mm_hash) is item:
            del self._items[item.mm_hash]
