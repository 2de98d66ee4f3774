"""Which data-parallel engine gets an item.

Rules of this file: pure. Each engine has a cache and a single flight of its own, so a key has a home: the
engine with the highest score for it (highest random weight, which needs no state; an engine that leaves moves
only its own keys, and they come home when it is back). A key leaves home only when home does not serve or has
more than its share of the items; a key that is under way stays where it is. Engines are known by their index.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import ceil

from blake3 import blake3

LOAD_FACTOR = 1.25
"""An engine may have this many times the mean number of items before its keys go elsewhere."""
SPARE_ITEMS = 4
"""So many items are never too many: with few under way, affinity is worth more than an even spread."""


class Placement:
    """Where the items under way are; `loads` counts them by engine."""

    def __init__(self, engines: int) -> None:
        self.loads = [0] * engines
        self._held: dict[str, Counter[int]] = {}

    def place(self, key: str, serving: Sequence[bool], *, avoid: int | None = None) -> int | None:
        """Choose an engine for an item of `key` and count the item there; None when there is none.

        Args:
            key: the item's cache key; equal keys under way share an engine.
            serving: whether each engine takes items now.
            avoid: the engine that has just failed on this item.
        """
        usable = [engine for engine, serves in enumerate(serving) if serves and engine != avoid]
        if not usable:
            return None
        here = self._held.get(key, Counter())
        held = [engine for engine in usable if here[engine]]
        engine = max(held or self._with_room(usable), key=lambda engine: score(key, engine))
        self.loads[engine] += 1
        self._held.setdefault(key, Counter())[engine] += 1
        return engine

    def leave(self, key: str, engine: int) -> None:
        """Say that an item of `key` is no longer on `engine`."""
        held = self._held[key]
        held[engine] -= 1
        self.loads[engine] -= 1
        if not held.total():
            del self._held[key]

    def _with_room(self, usable: Sequence[int]) -> list[int]:
        total = sum(self.loads[engine] for engine in usable)
        share = max(SPARE_ITEMS, ceil(LOAD_FACTOR * (total + 1) / len(usable)))
        return [engine for engine in usable if self.loads[engine] < share]


def score(key: str, engine: int) -> bytes:
    """Return how much `engine` is the home of `key`; the same in every process."""
    return blake3(f"{engine}:{key}".encode()).digest(length=8)
