"""The second tier of the embedding cache: which embeddings lie in host memory, and how many bytes.

    dram = DramTier(budget)
    slot = dram.add(key, nbytes, facts)     # evicts the least recently used; None: larger than the budget
    dram.get(key)                           # counts as a use
    dram.take(slot)                         # it goes back to the arena

The rows themselves are written into `Slot.rows` by the mover, a moment after `add`: each slot owns its bytes,
and they are free as soon as the slot is gone and nobody copies them.

Rules of this file: book-keeping only. Bytes are exact: the sum over the slots, never above the budget.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from epdctl.worker.encode.cache import Facts


@dataclass(eq=False, slots=True)
class Slot:
    """One embedding in host memory. `rows` is None until the mover has copied them."""

    key: str
    nbytes: int
    facts: Facts
    rows: memoryview | None = None


class DramTier:
    """Slots by key, least recently used first; a budget of 0 holds nothing."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.nbytes = 0
        self.evictions = 0
        self._slots: OrderedDict[str, Slot] = OrderedDict()

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, key: str) -> bool:
        return key in self._slots

    def get(self, key: str) -> Slot | None:
        """Return the slot of `key`, and count that as a use."""
        slot = self._slots.get(key)
        if slot is not None:
            self._slots.move_to_end(key)
        return slot

    def add(self, key: str, nbytes: int, facts: Facts) -> Slot | None:
        """Hold `nbytes` for `key`, as the one used last; None when that is more than the whole budget.

        What makes room is evicted for good. A slot of the same key is replaced.
        """
        if nbytes > self.budget:
            return None
        if (before := self._slots.get(key)) is not None:
            self.take(before)
        while self.nbytes + nbytes > self.budget:
            self.take(next(iter(self._slots.values())))
            self.evictions += 1
        slot = Slot(key, nbytes, facts)
        self._slots[key] = slot
        self.nbytes += nbytes
        return slot

    def take(self, slot: Slot) -> None:
        """Hold `slot` no longer; harmless when it is gone already."""
        if self._slots.get(slot.key) is slot:
            del self._slots[slot.key]
            self.nbytes -= slot.nbytes
