"""The consumer end: answers producers, verifies what they wrote, and hands items to the language engine.

    receiver = Receiver(settings, memory=memory, session=engine.session, observe=sink)
    receiver.start()                       # inside the loop; OSError names a port that is taken
    received = await receiver.take(transfer_id=…, mm_hash=…, expect=TensorSpec(…), deadline_s=60)
    received.release()
    receiver.cancel(transfer_id); receiver.stats(); await receiver.close()

`memory` is registered with the engine whose `session` is given (`mooncake.TransferEngine`), before `start`.

Rules of this file: order of steps only; what is allowed is decided in `reservation`. Everything runs on one
event loop, digests of large items on one thread. Leases end by a timer, not by the next request.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import structlog
import zmq.asyncio

from epdctl.domain import MmHash, TransferId
from epdctl.ec.protocol import DEFAULT_CONTROL_PORT, ControlAddress, ReadyEvent
from epdctl.errors import ShuttingDown, TransferFailed
from epdctl.worker.transfer.arena import Arena, Region
from epdctl.worker.transfer.events import EventPublisher
from epdctl.worker.transfer.items import Item
from epdctl.worker.transfer.listener import ControlListener
from epdctl.worker.transfer.memory import HostMemory
from epdctl.worker.transfer.notices import BecameReady, Counted, LeasePolicy, Lost
from epdctl.worker.transfer.ports import Received, RecordSink, Side, TensorSpec, TransferRecord
from epdctl.worker.transfer.reservation import Reservations
from epdctl.worker.transfer.service import ControlService, Verification
from epdctl.worker.transfer.tensors import TensorContract, check_expectation
from epdctl.worker.transfer.waits import Waits


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiverSettings:
    """Where a receiver listens (port 0: the system chooses) and what it takes."""

    host: str = "127.0.0.1"
    port: int = DEFAULT_CONTROL_PORT
    contract: TensorContract | None = None
    leases: LeasePolicy = field(default_factory=LeasePolicy)
    verification: Verification = field(default_factory=Verification)
    tick_s: float = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiverStats:
    """What a receiver holds now.

    `arena_bytes`: free, used (reserved or ready), pinned (being read), resident (kept in case it is asked for
    again) and quarantined; they add up. `reservations`: by state, and `ended` ones that are remembered.
    """

    reservations: dict[str, int]
    arena_bytes: dict[str, int]
    items: int
    waiting: int
    reading: int


class Receiver:
    """An EC consumer of one replica (tensor parallel size 1)."""

    def __init__(
        self,
        settings: ReceiverSettings,
        *,
        memory: HostMemory,
        session: str,
        observe: RecordSink,
    ) -> None:
        self._settings = settings
        self._memory = memory
        self._observe = observe
        self._arena = Arena(memory.nbytes)
        self._reservations = Reservations(
            self._arena,
            session=session,
            base_address=memory.address,
            policy=settings.leases,
            contract=settings.contract,
        )
        self._context = zmq.asyncio.Context()
        self._digests = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ec-digest")
        self._events = EventPublisher(settings.host, self._context)
        service = ControlService(
            self._reservations,
            read=self._bytes,
            ports=lambda: (self._listener.port, self._events.port),
            verification=settings.verification,
            executor=self._digests,
            settle=self._settle,
            clock=lambda: asyncio.get_running_loop().time(),
        )
        address = ControlAddress(host=settings.host, port=settings.port)
        self._listener = ControlListener(address, service.answer, self._context)
        self._waits = Waits()
        self._ticker: asyncio.Task[None] | None = None
        self._reading = 0
        self._closed = False
        self._log = structlog.get_logger()

    def start(self) -> None:
        """Bind the control and event ports and start the lease timer; raise OSError when a port is taken."""
        self._listener.open()
        self._events.open()
        self._ticker = asyncio.create_task(self._tick(), name="ec-leases")

    @property
    def consumer_zmq(self) -> str:
        """The control address that producers are given."""
        return str(ControlAddress(host=self._settings.host, port=self._listener.port))

    async def take(
        self,
        *,
        transfer_id: TransferId | None,
        mm_hash: MmHash | None,
        expect: TensorSpec,
        deadline_s: float,
    ) -> Received:
        """Wait for an item and pin it; see `ports.Taker` for what is raised."""
        loop = asyncio.get_running_loop()
        item = await self._waits.until_found(
            lambda: self._find(transfer_id, mm_hash),
            keys=(transfer_id, mm_hash),
            deadline=loop.time() + deadline_s,
        )
        difference = check_expectation(item.spec, expect)
        if difference is not None:
            if transfer_id is not None:
                self.cancel(transfer_id)
            raise TransferFailed(f"{difference}: producer and consumer must run the same model and dtype")
        self._reservations.take(transfer_id, item, loop.time())
        self._reading += 1
        self._settle()
        return Received(
            view=self._bytes(item.region),
            shape=item.spec.shape,
            dtype=item.spec.dtype,
            mm_hash=item.mm_hash,
            _on_release=lambda: self._release(item),
        )

    def cancel(self, transfer_id: TransferId) -> None:
        """Say that nobody wants the item any more, whether it has arrived or not."""
        self._reservations.cancel(transfer_id, now=asyncio.get_running_loop().time())
        self._settle()

    def stats(self) -> ReceiverStats:
        """Return what is held now."""
        resident = self._reservations.items.resident_bytes
        arena_bytes = self._arena.bytes_by_state()
        arena_bytes["used"] -= resident
        return ReceiverStats(
            reservations=self._reservations.counts(),
            arena_bytes=arena_bytes | {"resident": resident},
            items=len(self._reservations.items),
            waiting=len(self._waits),
            reading=self._reading,
        )

    async def close(self) -> None:
        """Stop answering and fail the takes that wait. Close the engine next: that fences late writes."""
        self._closed = True
        self._reservations.close()
        self._waits.wake_all()
        if self._ticker is not None:
            self._ticker.cancel()
            await asyncio.gather(self._ticker, return_exceptions=True)
        await self._listener.close()
        await self._events.close()
        self._digests.shutdown(wait=True)
        self._context.destroy(linger=0)

    def _find(self, transfer_id: TransferId | None, mm_hash: MmHash | None) -> Item | Lost | None:
        if self._closed:
            raise ShuttingDown("this worker is shutting down")
        return self._reservations.find(transfer_id, mm_hash)

    def _release(self, item: Item) -> None:
        self._reading -= 1
        self._reservations.release(item)

    def _bytes(self, region: Region) -> memoryview:
        return self._memory.view(region.offset, region.nbytes)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self._settings.tick_s)
            try:
                self._reservations.expire(asyncio.get_running_loop().time())
                self._settle()
            except Exception:  # noqa: BLE001 - the supervisor of this loop: without it leases never end
                self._log.exception("ec_lease_timer_failed")

    def _settle(self) -> None:
        """Pass on what happened: to waiting requests, vLLM schedulers and the metrics."""
        for notice in self._reservations.collect():
            match notice:
                case Counted(outcome=outcome, nbytes=nbytes, seconds=seconds):
                    self._observe(
                        TransferRecord(side=Side.CONSUMER, outcome=outcome, nbytes=nbytes, seconds=seconds)
                    )
                case BecameReady():
                    self._waits.wake(notice.transfer_id, notice.mm_hash)
                    self._events.publish(_event(notice, self._listener.port))
                case _:
                    self._waits.wake(notice.transfer_id, notice.mm_hash)


def _event(notice: BecameReady, shard: int) -> ReadyEvent:
    return ReadyEvent(
        transfer_id=notice.transfer_id,
        mm_hash=notice.mm_hash,
        ready=True,
        reservation_id=notice.reservation_id,
        nbytes=notice.nbytes,
        shape=notice.spec.shape,
        dtype=notice.spec.dtype,
        shard=shard,
    )
