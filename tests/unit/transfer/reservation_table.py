"""A consumer's reservations with short calls and a clock that tests move."""

from __future__ import annotations

import math

from epdctl.domain import MmHash, TransferId
from epdctl.ec.protocol import CompleteResult, Refusal, Reservation, ReserveItem
from epdctl.worker.transfer.arena import Arena
from epdctl.worker.transfer.items import Item
from epdctl.worker.transfer.notices import BecameReady, Counted, LeasePolicy, Lost
from epdctl.worker.transfer.ports import TransferOutcome
from epdctl.worker.transfer.reservation import Reservations
from epdctl.worker.transfer.tensors import TensorContract

POLICY = LeasePolicy(lease_s=300, pending_s=240, quarantine_s=15, tombstone_s=300)
BASE = 1 << 40
ACCEPTED = CompleteResult(completed=True, became_ready=True)
REPEATED = CompleteResult(completed=True, became_ready=False)
NOT_COMPLETED = CompleteResult(completed=False, became_ready=False)


class Table:
    """Reservations with short calls and a clock that tests move."""

    def __init__(
        self,
        nbytes: int = 4096,
        *,
        policy: LeasePolicy = POLICY,
        contract: TensorContract | None = None,
    ) -> None:
        self.arena = Arena(nbytes)
        self.all = Reservations(
            self.arena, session="s:1", base_address=BASE, policy=policy, contract=contract
        )
        self.now = 0.0
        self.serial = 0

    def ask(
        self,
        transfer_id: str,
        mm_hash: str = "h",
        shape: tuple[int, ...] = (4, 32),
        dtype: str = "bfloat16",
        nbytes: int = 0,
    ) -> Reservation | Refusal:
        """Reserve, and return whatever comes back."""
        self.serial += 1
        item = ReserveItem(
            transfer_id=transfer_id,
            mm_hash=mm_hash,
            nbytes=nbytes or math.prod(shape) * 2,
            shape=shape,
            dtype=dtype,
        )
        return self.all.reserve(item, reservation_id=f"r{self.serial}", now=self.now)

    def reserve(self, transfer_id: str, mm_hash: str = "h", shape: tuple[int, ...] = (4, 32)) -> Reservation:
        """Reserve what must be granted."""
        answer = self.ask(transfer_id, mm_hash, shape)
        assert isinstance(answer, Reservation), answer
        return answer

    def complete(self, transfer_id: str, reservation_id: str, *, intact: bool = True) -> CompleteResult:
        """Complete."""
        return self.all.complete(TransferId(transfer_id), reservation_id, intact=intact, now=self.now)

    def ready(self, transfer_id: str, mm_hash: str = "h", shape: tuple[int, ...] = (4, 32)) -> Reservation:
        """Reserve and complete."""
        answer = self.reserve(transfer_id, mm_hash, shape)
        assert self.complete(transfer_id, answer.reservation_id) == ACCEPTED
        return answer

    def cancel(self, transfer_id: str, reservation_id: str = "", **flags: bool) -> bool:
        """Cancel."""
        return self.all.cancel(TransferId(transfer_id), reservation_id, now=self.now, **flags)

    def take(self, transfer_id: str | None, mm_hash: str | None = "h") -> Item:
        """Take what must be there."""
        item = self.find(transfer_id, mm_hash)
        assert isinstance(item, Item), item
        self.all.take(TransferId(transfer_id) if transfer_id else None, item, self.now)
        return item

    def find(self, transfer_id: str | None, mm_hash: str | None = "h") -> Item | Lost | None:
        """Look for an item."""
        return self.all.find(
            TransferId(transfer_id) if transfer_id else None, MmHash(mm_hash) if mm_hash else None
        )

    def pass_time(self, seconds: float) -> None:
        """Move the clock and let what is due expire."""
        self.now += seconds
        self.all.expire(self.now)

    def states(self) -> dict[str, int]:
        """Return the live reservations by state, without the states that have none."""
        return {name: count for name, count in self.all.counts().items() if count and name != "ended"}

    def ready_events(self) -> list[str]:
        """Return the transfers announced as ready since the last call."""
        return [notice.transfer_id for notice in self.all.collect() if isinstance(notice, BecameReady)]

    def counted(self) -> list[tuple[TransferOutcome, int]]:
        """Return what was counted since the last call."""
        return [(n.outcome, n.nbytes) for n in self.all.collect() if isinstance(n, Counted)]

    def held_bytes(self) -> int:
        """Return the bytes that are neither free nor evictable."""
        return self.arena.nbytes - self.arena.bytes_by_state()["free"] - self.all.items.resident_bytes


def flags(answer: Reservation | Refusal) -> tuple[bool, bool, bool]:
    """Return write, ready and cached of a granted reservation."""
    assert isinstance(answer, Reservation)
    return answer.write, answer.ready, answer.cached is True
