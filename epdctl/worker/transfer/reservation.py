"""The consumer's side of EC transfer: who may write where, and what is available.

Rules of this file:
- Every change of a reservation happens here; no clock, no sockets, no bytes. Callers hand in `now` (monotonic
  seconds) and new ids, and fetch what happened with `collect`.
- A region that a writer may still touch is never given to another item: it waits for its writer (bounded),
  then it rests (`items`). Whatever ends leaves a tombstone, in bounded number.
- Each reservation is counted once, by one `Counted` notice.

States and answers are those of sections 3 and 10 of vLLM's protocol (0.33.0), with these differences: both
pending states have a deadline; followers of a writer that gave up end at once, so that their producers see it
by `status`; a cancelled writer without followers no longer holds the hash.
"""

from __future__ import annotations

from epdctl.domain import MmHash, TransferId
from epdctl.ec.protocol import (
    CompleteResult,
    Refusal,
    RefusalCode,
    Reservation,
    ReserveItem,
    TransferStatus,
)
from epdctl.worker.transfer.arena import Arena, Region
from epdctl.worker.transfer.items import Item, ItemTable
from epdctl.worker.transfer.ledger import HELD_BY_WRITER, PENDING, Ledger, Record, State
from epdctl.worker.transfer.notices import LeasePolicy, Lost, Notice
from epdctl.worker.transfer.ports import TensorSpec, TransferOutcome
from epdctl.worker.transfer.tensors import TensorContract, check_item
from epdctl.worker.transfer.tombstones import LOST, SPENT, End


class Reservations:
    """All reservations of one arena. `base_address` is the arena's first byte, `session` its engine's."""

    def __init__(
        self,
        arena: Arena,
        *,
        session: str,
        base_address: int,
        policy: LeasePolicy,
        contract: TensorContract | None = None,
    ) -> None:
        self._session = session
        self._base_address = base_address
        self._max_reservations = policy.max_reservations
        self._contract = contract
        self._ledger = Ledger(policy)
        self._closing = False
        self.items = ItemTable(arena, quarantine_s=policy.quarantine_s)

    def reserve(self, item: ReserveItem, *, reservation_id: str, now: float) -> Reservation | Refusal:
        """Answer one reserve by the table of section 3.3; a refusal leaves nothing behind."""
        if self._closing:
            return Refusal("this consumer is shutting down", RefusalCode.SHUTTING_DOWN)
        refusal = check_item(item, self._contract)
        if refusal is not None:
            return refusal
        self.expire(now)
        transfer_id = TransferId(item.transfer_id)
        stone = self._ledger.ended.get(transfer_id)
        if stone is not None and stone.end in SPENT:
            return _cancelled_form(item.nbytes)
        record = self._ledger.get(transfer_id)
        if record is not None:
            return self._reserve_again(record, item, now)
        if len(self._ledger) >= self._max_reservations:
            return Refusal("too many reservations", RefusalCode.BUSY)
        return self._reserve_new(item, reservation_id, now)

    def region_to_verify(self, transfer_id: TransferId, reservation_id: str) -> Region | None:
        """Return where a writer that says it is done has written, or None when it is no writer's id."""
        record = self._writer(transfer_id, reservation_id)
        return None if record is None else record.item.region

    def complete(
        self, transfer_id: TransferId, reservation_id: str, *, intact: bool, now: float
    ) -> CompleteResult:
        """Publish a finished write, or refuse it when its bytes are not `intact`."""
        record = self._writer(transfer_id, reservation_id)
        if record is None:
            known = self._was_completed(transfer_id, reservation_id)
            return CompleteResult(completed=known, became_ready=False)
        if not intact:
            self._refuse(record, now)
            return CompleteResult(completed=False, became_ready=False)
        if record.state in PENDING:
            self._complete_late(record, now)
            return CompleteResult(completed=True, became_ready=False)
        self._publish(record, now)
        return CompleteResult(completed=True, became_ready=True)

    def cancel(
        self,
        transfer_id: TransferId,
        reservation_id: str = "",
        *,
        abandon: bool = False,
        refresh: bool = False,
        failed: bool = False,
        fenced: bool = False,
        now: float,
    ) -> bool:
        """Answer one cancel by the table of section 3.6; true when it had something to act on.

        `failed`: the writer gave up, so its followers end now. `fenced`: nothing can land any more, so an
        abandoned region need not rest.
        """
        record = self._ledger.get(transfer_id)
        if record is None:
            return self._cancel_ended(transfer_id, reservation_id, now)
        if reservation_id not in ("", record.reservation_id):
            return False
        refresh = refresh and abandon
        if record.state not in HELD_BY_WRITER:
            return self._cancel_without_writer(record, refresh, now)
        if refresh and record.state is State.CANCEL_PENDING:
            return False
        if failed or abandon:
            self._end_followers(record.item, now)
        if failed:
            self._ledger.count(record, TransferOutcome.FAILED, now)
        if abandon:
            self._give_up_writer(record, End.REFRESHED if refresh else _end_of(failed), fenced, now)
        else:
            self._wait_for_writer(record, State.CANCEL_PENDING, now)
        return True

    def status(self, transfer_id: TransferId) -> TransferStatus | None:
        """Return what lives under the id, or None."""
        record = self._ledger.get(transfer_id)
        if record is None or record.state in PENDING:
            return None
        return TransferStatus(
            mm_hash=record.item.mm_hash,
            ready=record.state is State.READY,
            reservation_id=record.reservation_id,
            nbytes=record.item.region.nbytes,
            shape=record.item.spec.shape,
            dtype=record.item.spec.dtype,
        )

    def find(self, transfer_id: TransferId | None, mm_hash: MmHash | None) -> Item | Lost | None:
        """Return the item that a request waits for, why it will not come, or None while it may."""
        record = self._ledger.get(transfer_id)
        if record is not None and record.state is State.READY and mm_hash in (None, record.item.mm_hash):
            return record.item
        named = self.items.find(mm_hash) if mm_hash is not None else None
        if named is not None and named.available:
            return named
        if record is not None:
            others = named is not None and named is not record.item
            return Lost(End.CANCELLED) if record.state in PENDING and not others else None
        stone = self._ledger.ended.get(transfer_id) if transfer_id is not None else None
        return Lost(stone.end) if stone is not None and stone.end in LOST and named is None else None

    def take(self, transfer_id: TransferId | None, item: Item, now: float) -> None:
        """Hand an item that `find` returned to a reader; its id is used up by that."""
        record = self._ledger.get(transfer_id)
        if record is not None and record.state is State.READY and record.item is item:
            self._ledger.end(record, End.TAKEN, now)
        else:
            self.items.refer(item)
            if transfer_id is not None and record is None:
                # Satisfied by another delivery: its own producer need not write it once more.
                self._ledger.spend(transfer_id, End.CANCELLED, now)
        self.items.open_for_reading(item)

    def release(self, item: Item) -> None:
        """End one reading."""
        self.items.close_reading(item)

    def expire(self, now: float) -> None:
        """End what is over: leases, waits for writers, tombstones, rests."""
        for record in self._ledger.overdue(now):
            self._expire_one(record, now)
        self._ledger.ended.expire(now)
        self.items.expire(now)

    def close(self) -> None:
        """Refuse reservations from now on; what is being written may still be completed."""
        self._closing = True

    def collect(self) -> tuple[Notice, ...]:
        """Return what happened since the last call, in order."""
        return self._ledger.collect()

    def counts(self) -> dict[str, int]:
        """Return how many reservations are in each state, and how many ended ones are remembered."""
        return self._ledger.counts()

    # Reserving

    def _reserve_again(self, record: Record, item: ReserveItem, now: float) -> Reservation | Refusal:
        if record.state is State.EXPIRE_PENDING:
            return Refusal("the transfer still has an active writer", RefusalCode.BUSY)
        if (record.item.mm_hash, record.item.spec) != (item.mm_hash, TensorSpec(item.shape, item.dtype)):
            return Refusal("conflicting reservation for transfer_id", RefusalCode.CONFLICT)
        if record.state is State.CANCEL_PENDING:
            return _cancelled_form(item.nbytes)
        self._ledger.renew(record, now)
        if record.state is State.READY:
            self._ledger.say_ready(record)
        return self._reservation(record, write=False, cached=False)

    def _reserve_new(self, item: ReserveItem, reservation_id: str, now: float) -> Reservation | Refusal:
        transfer_id, mm_hash = TransferId(item.transfer_id), MmHash(item.mm_hash)
        spec = TensorSpec(item.shape, item.dtype)
        placed = self.items.find(mm_hash)
        if placed is not None and placed.spec != spec:
            what = "cached tensor" if placed.available else "reservation"
            return Refusal(f"conflicting {what} for mm_hash", RefusalCode.CONFLICT)
        if placed is None:
            placed = self.items.place(mm_hash, spec, item.nbytes)
            if placed is None:
                return Refusal("EC consumer buffer pool is full", RefusalCode.FULL)
            record = self._ledger.add(transfer_id, reservation_id, placed, State.WRITING, now)
            return self._reservation(record, write=True)
        if placed.available:
            record = self._ledger.add(transfer_id, reservation_id, placed, State.READY, now)
            self._become_ready(record, TransferOutcome.CACHED, now)
            return self._reservation(record, write=False, cached=True)
        record = self._ledger.add(transfer_id, reservation_id, placed, State.FOLLOWING, now)
        placed.followers[record.transfer_id] = None
        return self._reservation(record, write=False)

    def _reservation(self, record: Record, *, write: bool, cached: bool = False) -> Reservation:
        return Reservation(
            reservation_id=record.reservation_id,
            dst_session=self._session,
            dst_ptr=self._base_address + record.item.region.offset,
            nbytes=record.item.region.nbytes,
            write=write,
            ready=record.state is State.READY,
            cached=cached,
        )

    # Completing

    def _writer(self, transfer_id: TransferId, reservation_id: str) -> Record | None:
        record = self._ledger.get(transfer_id)
        if record is None or record.state not in HELD_BY_WRITER or record.reservation_id != reservation_id:
            return None
        return record

    def _was_completed(self, transfer_id: TransferId, reservation_id: str) -> bool:
        record = self._ledger.get(transfer_id)
        if record is not None:
            return record.state is State.READY and record.reservation_id == reservation_id
        stone = self._ledger.ended.get(transfer_id)
        return stone is not None and stone.end is End.TAKEN and stone.reservation_id == reservation_id

    def _publish(self, writer: Record, now: float) -> None:
        writer.item.available = True
        self._become_ready(writer, TransferOutcome.DELIVERED, now)
        self._publish_to_followers(writer.item, now)

    def _publish_to_followers(self, item: Item, now: float) -> None:
        item.available = True
        for record in self._take_followers(item):
            self._become_ready(record, TransferOutcome.CACHED, now)

    def _become_ready(self, record: Record, outcome: TransferOutcome, now: float) -> None:
        record.state = State.READY
        self.items.refer(record.item)
        self._ledger.renew(record, now)
        self._ledger.count(record, outcome, now, written=outcome is TransferOutcome.DELIVERED)
        self._ledger.say_ready(record)

    def _complete_late(self, record: Record, now: float) -> None:
        self._ledger.count(record, TransferOutcome.CANCELLED, now, written=True)
        if record.item.followers:
            self._publish_to_followers(record.item, now)
        else:
            self.items.drop(record.item)
        self._ledger.end(record, End.EXPIRED if record.state is State.EXPIRE_PENDING else End.CANCELLED, now)

    def _refuse(self, record: Record, now: float) -> None:
        self._ledger.count(record, TransferOutcome.REFUSED, now, written=True)
        self._end_followers(record.item, now)
        self.items.rest(record.item, now)
        self._ledger.end(record, End.REFUSED, now)

    # Cancelling and expiring

    def _cancel_ended(self, transfer_id: TransferId, reservation_id: str, now: float) -> bool:
        stone = self._ledger.ended.get(transfer_id)
        if stone is not None and not stone.matches(reservation_id):
            return False
        if stone is not None and stone.end in (End.EXPIRED, End.REFRESHED):
            return False
        spent = stone is not None and stone.end in SPENT
        self._ledger.spend(transfer_id, stone.end if stone is not None and spent else End.CANCELLED, now)
        return True

    def _cancel_without_writer(self, record: Record, refresh: bool, now: float) -> bool:
        if record.state is State.FOLLOWING:
            record.item.followers.pop(record.transfer_id, None)
            self._ledger.count(record, TransferOutcome.CANCELLED, now)
            self._ledger.end(record, End.REFRESHED if refresh else End.CANCELLED, now)
            return True
        if refresh:
            return False
        self.items.unrefer(record.item)
        self._ledger.end(record, End.CANCELLED, now)
        return True

    def _wait_for_writer(self, record: Record, state: State, now: float) -> None:
        if record.state is State.WRITING:
            self._ledger.hold(record, state, now)
        if not record.item.followers:
            self.items.detach(record.item)

    def _give_up_writer(self, record: Record, end: End, fenced: bool, now: float) -> None:
        if end is not End.REFRESHED:
            self._ledger.count(record, TransferOutcome.CANCELLED, now)
        if fenced:
            self.items.drop(record.item)
        else:
            self.items.rest(record.item, now)
        self._ledger.end(record, end, now)

    def _end_followers(self, item: Item, now: float) -> None:
        for record in self._take_followers(item):
            self._ledger.count(record, TransferOutcome.FAILED, now)
            self._ledger.end(record, End.WRITER_GONE, now)

    def _take_followers(self, item: Item) -> list[Record]:
        records = [record for record in map(self._ledger.get, item.followers) if record is not None]
        item.followers.clear()
        return records

    def _expire_one(self, record: Record, now: float) -> None:
        if record.state is State.WRITING:
            self._wait_for_writer(record, State.EXPIRE_PENDING, now)
        elif record.state is State.READY:
            self.items.unrefer(record.item)
            self._ledger.end(record, End.EXPIRED, now)
        elif record.state is State.FOLLOWING:
            record.item.followers.pop(record.transfer_id, None)
            self._ledger.count(record, TransferOutcome.FAILED, now)
            self._ledger.end(record, End.FAILED, now)
        else:
            self._end_followers(record.item, now)
            expired = record.state is State.EXPIRE_PENDING
            self._ledger.count(record, TransferOutcome.FAILED if expired else TransferOutcome.CANCELLED, now)
            self._give_up_writer(record, End.EXPIRED if expired else End.CANCELLED, False, now)


def _end_of(failed: bool) -> End:
    return End.FAILED if failed else End.CANCELLED


def _cancelled_form(nbytes: int) -> Reservation:
    return Reservation(
        reservation_id="", dst_session="", dst_ptr=0, nbytes=nbytes, write=False, ready=False, cancelled=True
    )
