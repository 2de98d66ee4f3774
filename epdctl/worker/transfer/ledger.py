"""The reservations that live, when each is due, and what is remembered of those that ended.

Rules of this file: bookkeeping only; what a reservation may do next is decided in `reservation`. Each is
counted once. Times are monotonic seconds, handed in.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from epdctl.domain import TransferId
from epdctl.worker.transfer.items import Item
from epdctl.worker.transfer.notices import BecameReady, Counted, GaveUp, LeasePolicy, Notice
from epdctl.worker.transfer.ports import TransferOutcome
from epdctl.worker.transfer.tombstones import End, Tombstones


class State(StrEnum):
    """Where a live reservation is."""

    WRITING = "writing"
    FOLLOWING = "following"
    READY = "ready"
    CANCEL_PENDING = "cancel_pending"
    EXPIRE_PENDING = "expire_pending"


PENDING = frozenset({State.CANCEL_PENDING, State.EXPIRE_PENDING})
HELD_BY_WRITER = PENDING | {State.WRITING}


@dataclass(slots=True, eq=False)
class Record:
    """One live reservation of an item; `due_at` is when it is looked at next, never after `expires_at`."""

    transfer_id: TransferId
    reservation_id: str
    item: Item
    state: State
    since: float
    expires_at: float
    due_at: float = 0.0
    counted: bool = False


SPARE_ENTRIES = 1024


class Ledger:
    """All live reservations and the tombstones of ended ones."""

    def __init__(self, policy: LeasePolicy) -> None:
        self._policy = policy
        self._records: dict[TransferId, Record] = {}
        self._due: list[tuple[float, int, TransferId]] = []
        self._serial = 0
        self._notices: list[Notice] = []
        self.ended = Tombstones(lifetime_s=policy.tombstone_s, limit=policy.max_tombstones)

    def __len__(self) -> int:
        return len(self._records)

    def get(self, transfer_id: TransferId | None) -> Record | None:
        """Return the live reservation of that id."""
        return None if transfer_id is None else self._records.get(transfer_id)

    def add(
        self, transfer_id: TransferId, reservation_id: str, item: Item, state: State, now: float
    ) -> Record:
        """Open a reservation with a fresh lease; an ended one of the same id is forgotten."""
        self.ended.forget(transfer_id)
        record = Record(transfer_id, reservation_id, item, state, now, now + self._policy.lease_s)
        self._records[transfer_id] = record
        self._schedule(record)
        return record

    def renew(self, record: Record, now: float) -> None:
        """Start the lease anew."""
        record.expires_at = now + self._policy.lease_s

    def hold(self, record: Record, state: State, now: float) -> None:
        """Let the reservation wait for its writer, but not for ever."""
        record.state = state
        record.expires_at = now + self._policy.pending_s
        self._schedule(record)
        self.say_gave_up(record)

    def end(self, record: Record, end: End, now: float) -> None:
        """Close a reservation and remember how."""
        del self._records[record.transfer_id]
        self.ended.put(record.transfer_id, end, record.reservation_id, now)
        if end is not End.TAKEN:
            self.say_gave_up(record)

    def overdue(self, now: float) -> Iterator[Record]:
        """Yield the reservations whose lease or wait is over; each must be ended or held before the next."""
        while self._due and self._due[0][0] <= now:
            due_at, _, transfer_id = heapq.heappop(self._due)
            record = self._records.get(transfer_id)
            if record is None or record.due_at != due_at:
                continue
            if record.expires_at > now:
                self._schedule(record)
            else:
                yield record

    def count(self, record: Record, outcome: TransferOutcome, now: float, *, written: bool = False) -> None:
        """Count how the reservation went, unless it was counted before."""
        if record.counted:
            return
        record.counted = True
        nbytes = record.item.region.nbytes if written else 0
        self._notices.append(Counted(outcome=outcome, nbytes=nbytes, seconds=now - record.since))

    def say_ready(self, record: Record) -> None:
        """Announce that the reservation's item is available."""
        self._notices.append(
            BecameReady(
                transfer_id=record.transfer_id,
                mm_hash=record.item.mm_hash,
                reservation_id=record.reservation_id,
                nbytes=record.item.region.nbytes,
                spec=record.item.spec,
            )
        )

    def say_gave_up(self, record: Record) -> None:
        """Announce that nothing will arrive under the reservation's id."""
        self._notices.append(GaveUp(transfer_id=record.transfer_id, mm_hash=record.item.mm_hash))

    def spend(self, transfer_id: TransferId, end: End, now: float) -> None:
        """Remember an id that has no reservation as ended."""
        self.ended.put(transfer_id, end, "", now)
        self._notices.append(GaveUp(transfer_id=transfer_id, mm_hash=None))

    def collect(self) -> tuple[Notice, ...]:
        """Return what happened since the last call, in order."""
        notices = tuple(self._notices)
        self._notices.clear()
        return notices

    def counts(self) -> dict[str, int]:
        """Return how many reservations are in each state, and how many ended ones are remembered."""
        counts = {state.value: 0 for state in State}
        for record in self._records.values():
            counts[record.state] += 1
        return counts | {"ended": len(self.ended)}

    def _schedule(self, record: Record) -> None:
        self._forget_stale()
        self._serial += 1
        record.due_at = record.expires_at
        heapq.heappush(self._due, (record.due_at, self._serial, record.transfer_id))

    def _forget_stale(self) -> None:
        """Drop the entries of reservations that ended before they were due, once they are the most."""
        if len(self._due) <= 2 * len(self._records) + SPARE_ENTRIES:
            return
        self._due = [entry for entry in self._due if self._is_current(entry)]
        heapq.heapify(self._due)

    def _is_current(self, entry: tuple[float, int, TransferId]) -> bool:
        record = self._records.get(entry[2])
        return record is not None and record.due_at == entry[0]
