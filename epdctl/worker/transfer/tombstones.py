"""What is remembered of transfers that have ended, so that late messages about them are understood.

Rules of this file: bounded twice, by time and by count; the oldest goes first. Nothing else in this package
grows with the number of transfers that ever were.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from enum import StrEnum

from epdctl.domain import TransferId


class End(StrEnum):
    """How a transfer ended, as far as a late message cares.

    The first four spend the id: a later reserve is answered `cancelled`. The others leave it usable.
    """

    CANCELLED = "cancelled"
    WRITER_GONE = "writer_gone"
    REFUSED = "refused"
    FAILED = "failed"
    EXPIRED = "expired"
    REFRESHED = "refreshed"
    TAKEN = "taken"


SPENT = frozenset({End.CANCELLED, End.WRITER_GONE, End.REFUSED, End.FAILED})
LOST = SPENT | {End.EXPIRED}


@dataclass(frozen=True, slots=True)
class Tombstone:
    """One ended transfer; an empty `reservation_id` matches any."""

    end: End
    reservation_id: str
    expires_at: float

    def matches(self, reservation_id: str) -> bool:
        """Whether a message about `reservation_id` is about this transfer."""
        return "" in (reservation_id, self.reservation_id) or reservation_id == self.reservation_id


class Tombstones:
    """The last `limit` ended transfers, each for `lifetime_s`."""

    def __init__(self, *, lifetime_s: float, limit: int) -> None:
        self._lifetime_s = lifetime_s
        self._limit = limit
        self._stones: OrderedDict[TransferId, Tombstone] = OrderedDict()

    def __len__(self) -> int:
        return len(self._stones)

    def put(self, transfer_id: TransferId, end: End, reservation_id: str, now: float) -> None:
        """Remember how a transfer ended, from now on anew."""
        self._stones.pop(transfer_id, None)
        self._stones[transfer_id] = Tombstone(end, reservation_id, now + self._lifetime_s)
        if len(self._stones) > self._limit:
            self._stones.popitem(last=False)

    def get(self, transfer_id: TransferId) -> Tombstone | None:
        """Return how a transfer ended, or None when that is not known (any more)."""
        return self._stones.get(transfer_id)

    def forget(self, transfer_id: TransferId) -> None:
        """Make the id usable again."""
        self._stones.pop(transfer_id, None)

    def expire(self, now: float) -> None:
        """Forget what is too old."""
        while self._stones:
            transfer_id, stone = next(iter(self._stones.items()))
            if stone.expires_at > now:
                return
            del self._stones[transfer_id]
