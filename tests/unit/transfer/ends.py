"""Both ends of EC transfer in this process: real sockets, memory copies instead of Mooncake."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from epdctl.domain import MmHash, TransferId
from epdctl.worker.transfer.digest import digest_of
from epdctl.worker.transfer.memory import HostMemory
from epdctl.worker.transfer.notices import LeasePolicy
from epdctl.worker.transfer.ports import PushItem, TensorSpec, TransferOutcome, TransferRecord
from epdctl.worker.transfer.push_steps import PushPolicy
from epdctl.worker.transfer.receiver import Receiver, ReceiverSettings
from epdctl.worker.transfer.sender import Sender
from epdctl.worker.transfer.service import Verification
from epdctl.worker.transfer.tensors import TensorContract
from tests.unit.transfer.engine import MemoryEngine, Started

MEBIBYTE = 1 << 20
DATA = b"an embedding"
SHORT = LeasePolicy(lease_s=0.6, pending_s=0.3, quarantine_s=0.3, tombstone_s=1.0)


@dataclass(slots=True, kw_only=True)
class ConsumerEnd:
    """A receiver, its memory, and what it counted."""

    receiver: Receiver
    memory: HostMemory
    records: list[TransferRecord]

    @property
    def address(self) -> str:
        """The control address."""
        return self.receiver.consumer_zmq


@asynccontextmanager
async def consumer_end(
    nbytes: int = MEBIBYTE,
    *,
    leases: LeasePolicy | None = None,
    contract: TensorContract | None = None,
    verification: Verification | None = None,
) -> AsyncIterator[ConsumerEnd]:
    """Start a receiver on a port that the system chooses."""
    memory = HostMemory(nbytes)
    records: list[TransferRecord] = []
    settings = ReceiverSettings(
        port=0,
        leases=leases or LeasePolicy(),
        contract=contract,
        verification=verification or Verification(),
        tick_s=0.02,
    )
    receiver = Receiver(settings, memory=memory, session="consumer:1", observe=records.append)
    receiver.start()
    try:
        yield ConsumerEnd(receiver=receiver, memory=memory, records=records)
    finally:
        await receiver.close()


@dataclass(slots=True, kw_only=True)
class ProducerEnd:
    """A sender, its engine and memory, what it counted, and which sources are free again."""

    sender: Sender
    engine: MemoryEngine
    memory: HostMemory
    records: list[TransferRecord]
    freed: list[str] = field(default_factory=list)

    def item(
        self,
        consumer_zmq: str,
        transfer_id: str,
        data: bytes,
        *,
        mm_hash: str | None = None,
        offset: int = 0,
        dtype: str = "uint8",
        shape: tuple[int, ...] | None = None,
    ) -> PushItem:
        """Put `data` into the memory and return the item to push."""
        view = self.memory.view(offset, len(data))
        view[:] = data
        return PushItem(
            consumer_zmq=consumer_zmq,
            transfer_id=TransferId(transfer_id),
            mm_hash=MmHash(mm_hash or f"hash of {transfer_id}"),
            nbytes=len(data),
            shape=shape or (1, len(data)),
            dtype=dtype,
            address=self.memory.address + offset,
            digest=digest_of(view),
            on_source_free=lambda: self.freed.append(transfer_id),
        )


@asynccontextmanager
async def producer_end(
    *,
    nbytes: int = MEBIBYTE,
    policy: PushPolicy | None = None,
    on_write: Callable[[Started], None] | None = None,
    control_timeout_s: float = 0.5,
    max_pending: int = 1024,
) -> AsyncIterator[ProducerEnd]:
    """Start a sender whose writes are memory copies."""
    engine = MemoryEngine(on_write)
    records: list[TransferRecord] = []
    sender = Sender(
        engine,
        observe=records.append,
        policy=policy,
        control_timeout_s=control_timeout_s,
        max_pending=max_pending,
    )
    try:
        yield ProducerEnd(sender=sender, engine=engine, memory=HostMemory(nbytes), records=records)
    finally:
        await sender.close()


def spec(data: bytes) -> TensorSpec:
    """Return what a request expects of an item of `data`."""
    return TensorSpec((1, len(data)), "uint8")


def idle(end: ConsumerEnd) -> bool:
    """Whether a consumer holds nothing that is in use."""
    stats = end.receiver.stats()
    live = sum(count for state, count in stats.reservations.items() if state != "ended")
    busy = sum(stats.arena_bytes[state] for state in ("used", "pinned", "quarantined"))
    return not (live or busy or stats.reading or stats.waiting)


def succeed(started: Started) -> None:
    """End a write well without moving bytes: a stub consumer's addresses are no memory."""
    started.end(True)


def counted(end: ProducerEnd | ConsumerEnd) -> list[tuple[TransferOutcome, int]]:
    """Return what an end counted."""
    return sorted((record.outcome, record.nbytes) for record in end.records)


async def taken(end: ConsumerEnd, transfer_id: str, data: bytes) -> bytes:
    """Return the bytes that a request gets."""
    received = await end.receiver.take(
        transfer_id=TransferId(transfer_id), mm_hash=None, expect=spec(data), deadline_s=5
    )
    copy = bytes(received.view)
    received.release()
    return copy
