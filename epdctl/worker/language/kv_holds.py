"""Finished prompts whose KV waits for a decode: who may fetch it, until when, and when it is free again.

    held --fetch--> writing --settled--> gone
      |--release, lease over--> gone

Rules of this file: pure; `now` is handed in. A region leaves exactly once, and the caller frees it then.
While it is written it belongs to the write, whatever else happens: bytes may still be read from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

Region = TypeVar("Region")


class NotHeld(LookupError):
    """The KV is not there (any more): taken, released, or its lease is over."""


class InUse(RuntimeError):
    """The KV is being written to somebody."""


@dataclass(slots=True)
class _Hold(Generic[Region]):
    region: Region
    tokens: int
    deadline: float
    writing: bool = False


class Holds(Generic[Region]):
    """All leases of a prefill process."""

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._holds: dict[str, _Hold[Region]] = {}

    def __len__(self) -> int:
        """Leases that have not ended."""
        return len(self._holds)

    def hold(self, kv_id: str, region: Region, tokens: int, now: float) -> None:
        """Start a lease."""
        self._holds[kv_id] = _Hold(region=region, tokens=tokens, deadline=now + self._lease_s)

    def take(self, kv_id: str, now: float) -> tuple[Region, int]:
        """Start to write; return region and tokens.

        Raises:
            NotHeld: there is no such lease.
            InUse: it is being written already.
        """
        hold = self._holds.get(kv_id)
        if hold is None or (not hold.writing and hold.deadline <= now):
            raise NotHeld(kv_id)
        if hold.writing:
            raise InUse(kv_id)
        hold.writing = True
        return hold.region, hold.tokens

    def settle(self, kv_id: str) -> Region:
        """End a write, however it went; the region is the caller's to free."""
        return self._holds.pop(kv_id).region

    def release(self, kv_id: str) -> Region | None:
        """End a lease that nobody will use; the region is the caller's to free. None: nothing to release."""
        hold = self._holds.get(kv_id)
        if hold is None or hold.writing:
            return None
        return self._holds.pop(kv_id).region

    def expire(self, now: float) -> list[Region]:
        """End the leases that are over; the regions are the caller's to free."""
        over = [kv_id for kv_id, h in self._holds.items() if not h.writing and h.deadline <= now]
        return [self._holds.pop(kv_id).region for kv_id in over]
