"""Calls in flight, by URL and generation.

Rules of this file: pure. Leases live outside the records, so they outlive them: a call that ends after its
instance was removed, or was registered again, makes nobody's count negative.
"""

from __future__ import annotations

from typing import TypeVar

from epdctl.domain import InstanceUrl

K = TypeVar("K")


class Leases:
    """Who has how many calls in flight."""

    def __init__(self) -> None:
        self._by_generation: dict[tuple[InstanceUrl, int], int] = {}
        self._by_url: dict[InstanceUrl, int] = {}

    def acquire(self, url: InstanceUrl, generation: int) -> None:
        """Count one call more."""
        lease = (url, generation)
        self._by_generation[lease] = self._by_generation.get(lease, 0) + 1
        self._by_url[url] = self._by_url.get(url, 0) + 1

    def release(self, url: InstanceUrl, generation: int) -> bool:
        """Count one call less; False when there was none of this generation."""
        if (url, generation) not in self._by_generation:
            return False
        _count_down(self._by_generation, (url, generation))
        _count_down(self._by_url, url)
        return True

    def in_flight(self, url: InstanceUrl) -> int:
        """Return the calls in flight on `url`, over all generations."""
        return self._by_url.get(url, 0)

    def total(self) -> int:
        """Return the calls in flight on all instances."""
        return sum(self._by_url.values())


def _count_down(counts: dict[K, int], key: K) -> None:
    counts[key] -= 1
    if not counts[key]:
        del counts[key]
