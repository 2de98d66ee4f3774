"""Which bytes of one big buffer are taken: a best-fit allocator that coalesces.

    arena = Arena(nbytes)
    region = arena.allocate(n)      # None when there is no room; offset is a multiple of 256
    arena.pin(region) / arena.unpin(region)          # counted; somebody reads or writes it now
    arena.quarantine(region)        # nobody owns it any more, yet a late write may still land in it
    arena.free(region)
    arena.bytes_by_state()          # {"free":…, "used":…, "pinned":…, "quarantined":…}: always adds up

Rules of this file: only offsets and counters, no memory. A region belongs to whoever allocated it until that
owner frees it, once; a stale region (freed already, its place perhaps given away again) is an error and
changes nothing. A pinned region cannot be freed. Sizes are bytes.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

ALIGNMENT = 256
"""What vLLM 0.33.0's consumer rounds to; also keeps rows of two items off one cache line."""


class ArenaMisuse(RuntimeError):
    """A region was freed twice, freed while pinned, or never came from this arena: a bug of the caller."""


@dataclass(frozen=True, slots=True)
class Region:
    """A part of the arena: `offset` and `nbytes` as asked for; `size` is what it takes up."""

    offset: int
    nbytes: int
    size: int
    serial: int


@dataclass(slots=True)
class _Slot:
    region: Region
    pins: int = 0
    quarantined: bool = False

    @property
    def state(self) -> str:
        if self.quarantined:
            return "quarantined"
        return "pinned" if self.pins else "used"


class Arena:
    """Allocates 256-byte-aligned regions out of `nbytes`, smallest sufficient gap first."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes - nbytes % ALIGNMENT
        if self.nbytes <= 0:
            raise ValueError(f"an arena needs at least {ALIGNMENT} bytes, got {nbytes}")
        self._serial = 0
        self._slots: dict[int, _Slot] = {}
        self._gaps: list[tuple[int, int]] = [(self.nbytes, 0)]
        self._gap_at: dict[int, int] = {0: self.nbytes}
        self._gap_ending_at: dict[int, int] = {self.nbytes: 0}
        self._bytes = {"free": self.nbytes, "used": 0, "pinned": 0, "quarantined": 0}
        self._held: dict[int, int] = {}

    def allocate(self, nbytes: int) -> Region | None:
        """Return a region of at least `nbytes`, or None when no gap is large enough."""
        if nbytes <= 0:
            raise ValueError(f"a region has at least one byte, got {nbytes}")
        size = -(-nbytes // ALIGNMENT) * ALIGNMENT
        index = bisect_left(self._gaps, (size, 0))
        if index == len(self._gaps):
            return None
        gap_size, offset = self._gaps[index]
        self._remove_gap(offset, gap_size)
        if gap_size > size:
            self._add_gap(offset + size, gap_size - size)
        self._serial += 1
        region = Region(offset, nbytes, size, self._serial)
        self._slots[offset] = _Slot(region)
        self._move(size, "free", "used")
        return region

    def free(self, region: Region) -> None:
        """Give the region back; it merges with the gaps next to it."""
        slot = self._slot(region)
        if slot.pins:
            raise ArenaMisuse(f"the region at {region.offset} is pinned {slot.pins} times")
        del self._slots[region.offset]
        self._held.pop(region.offset, None)
        self._move(region.size, slot.state, "free")
        self._add_gap(region.offset, region.size)

    def pin(self, region: Region) -> None:
        """Count one more reader or writer of the region."""
        slot = self._slot(region)
        if slot.quarantined:
            raise ArenaMisuse(f"the region at {region.offset} is quarantined")
        self._change(slot, pins=slot.pins + 1)

    def unpin(self, region: Region) -> None:
        """Count one reader or writer less."""
        slot = self._slot(region)
        if not slot.pins:
            raise ArenaMisuse(f"the region at {region.offset} is not pinned")
        self._change(slot, pins=slot.pins - 1)

    def quarantine(self, region: Region) -> None:
        """Mark an unpinned region as owned by nobody but not reusable yet; `free` ends that."""
        slot = self._slot(region)
        if slot.pins:
            raise ArenaMisuse(f"the region at {region.offset} is pinned {slot.pins} times")
        self._change(slot, pins=0, quarantined=True)

    def pins(self, region: Region) -> int:
        """Return how often the region is pinned."""
        return self._slot(region).pins

    def bytes_by_state(self) -> dict[str, int]:
        """Return the bytes that are free, used, pinned and quarantined; they add up to `nbytes`."""
        return dict(self._bytes)

    @property
    def largest_gap(self) -> int:
        """The largest allocation that would succeed now."""
        return self._gaps[-1][0] if self._gaps else 0

    def largest_reach(self) -> int:
        """Return the largest allocation that would succeed if all unpinned regions were freed."""
        largest = end = 0
        for offset in sorted(self._held):
            largest = max(largest, offset - end)
            end = offset + self._held[offset]
        return max(largest, self.nbytes - end)

    def _slot(self, region: Region) -> _Slot:
        slot = self._slots.get(region.offset)
        if slot is None or slot.region != region:
            raise ArenaMisuse(f"the region at {region.offset} is not allocated any more")
        return slot

    def _change(self, slot: _Slot, *, pins: int, quarantined: bool = False) -> None:
        before = slot.state
        slot.pins, slot.quarantined = pins, quarantined
        if slot.state == "used":
            self._held.pop(slot.region.offset, None)
        else:
            self._held[slot.region.offset] = slot.region.size
        self._move(slot.region.size, before, slot.state)

    def _move(self, size: int, before: str, after: str) -> None:
        self._bytes[before] -= size
        self._bytes[after] += size

    def _add_gap(self, offset: int, size: int) -> None:
        left = self._gap_ending_at.get(offset)
        if left is not None:
            self._remove_gap(left, offset - left)
            offset, size = left, size + offset - left
        right = self._gap_at.get(offset + size)
        if right is not None:
            self._remove_gap(offset + size, right)
            size += right
        insort(self._gaps, (size, offset))
        self._gap_at[offset] = size
        self._gap_ending_at[offset + size] = offset

    def _remove_gap(self, offset: int, size: int) -> None:
        del self._gaps[bisect_left(self._gaps, (size, offset))]
        del self._gap_at[offset]
        del self._gap_ending_at[offset + size]
