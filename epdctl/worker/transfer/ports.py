"""What the encode and language engines know of EC transfer: two interfaces and their data.

Producer side (`sender.Sender`, in the encode engine's event loop):

    sender = Sender(engine, observe=record_sink)
    result = await sender.push(item)                       # reserve, write, complete
    delivery = sender.announce(announcement)               # or: reserve now, while the tower still runs
    result = await delivery.push(source)  /  delivery.abort()
    await sender.close()

Consumer side (`receiver.Receiver`, in the language engine's event loop):

    receiver = Receiver(settings, memory=memory, session=engine.session, observe=record_sink)
    receiver.start()                                       # binds; raises OSError naming the port
    received = await receiver.take(transfer_id=…, mm_hash=…, expect=TensorSpec(shape, dtype), deadline_s=60)
    …read received.view (torch.frombuffer(…) and copy, or use in place)…; received.release()
    receiver.cancel(transfer_id)                           # nobody wants it any more
    receiver.stats(); await receiver.close()

Rules of this file: plain data and protocols. Bytes are row major and contiguous; dtypes are torch names
without prefix; addresses are virtual addresses of this process; ids are opaque strings.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from epdctl.domain import MmHash, TransferId


class Side(StrEnum):
    """Which end of a transfer is counting."""

    PRODUCER = "producer"
    CONSUMER = "consumer"


class TransferOutcome(StrEnum):
    """How a transfer ended; both ends use the same words, so their counters can be compared.

    - `delivered`: the bytes were written and accepted.
    - `cached`: the consumer had the item, or somebody else was writing it; nothing was written.
    - `cancelled`: nobody wanted it any more.
    - `refused`: the bytes were written, and the consumer did not accept them (digest).
    - `failed`: it did not get that far: no space, no answer, a failed write, a lease that ran out.
    """

    DELIVERED = "delivered"
    CACHED = "cached"
    CANCELLED = "cancelled"
    REFUSED = "refused"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferRecord:
    """One ended transfer, for the metrics: `nbytes` are the bytes that Mooncake moved (0 when none)."""

    side: Side
    outcome: TransferOutcome
    nbytes: int
    seconds: float


RecordSink = Callable[[TransferRecord], None]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """The shape (elements) and dtype of an item."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PushAnnouncement:
    """What a reservation needs to know of an item before its bytes exist.

    `on_answer` is called, possibly more than once, when the consumer has answered the reservation, or the
    delivery is over without that.
    """

    consumer_zmq: str
    transfer_id: TransferId
    mm_hash: MmHash
    nbytes: int
    shape: tuple[int, ...]
    dtype: str
    on_answer: Callable[[], None] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PushSource:
    """The bytes of an announced item, inside memory that is registered with the engine.

    The caller keeps them unchanged until `on_free` is called: exactly once, on the event loop, and possibly
    long after the push has ended, since a write that was reported as failed may still be reading them.
    `digest` is the blake3 hex of the bytes, or None to send none.
    """

    address: int
    digest: str | None
    on_free: Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class PushItem(PushAnnouncement):
    """An announcement and its source in one, for items whose bytes exist already (a cache hit)."""

    address: int
    digest: str | None
    on_source_free: Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class PushResult:
    """A push that did not fail: `delivered`, `cached` or `cancelled`.

    `transfer_id` is the id it ended under: another one than announced when it had to reserve anew.
    """

    transfer_id: TransferId
    outcome: TransferOutcome
    nbytes_written: int
    seconds: float


class Delivery(Protocol):
    """One announced item on its way."""

    async def push(self, source: PushSource) -> PushResult:
        """Deliver the bytes.

        Raises ConsumerUnavailable (no answer), ConsumerFull (no space), TransferFailed (refused, failed or
        corrupt) or UpstreamTimeout (the deadline was over). When the awaiting task is cancelled the transfer
        is given up at the consumer, in the background.
        """
        ...

    def abort(self) -> None:
        """Give up before the bytes existed; harmless at any other time."""
        ...


class Pusher(Protocol):
    """Delivers items to EC consumers."""

    async def push(self, item: PushItem) -> PushResult:
        """Announce and deliver in one call; raises what `Delivery.push` raises, and Overloaded."""
        ...

    def announce(self, announcement: PushAnnouncement) -> Delivery:
        """Start reserving.

        Raises Overloaded when too much waits for this consumer already, and ConsumerUnavailable when it has
        just failed to answer and is not to be asked again yet.
        """
        ...


@dataclass(slots=True, kw_only=True)
class Received:
    """An item in the arena, ours to read until `release` is called (once; more calls are harmless).

    `view` is a writable memoryview of unsigned bytes (torch.frombuffer warns of read-only ones); the item is
    shared with every other request that took it, so nobody writes.
    """

    view: memoryview
    shape: tuple[int, ...]
    dtype: str
    mm_hash: MmHash
    _on_release: Callable[[], None] | None = field(default=None, repr=False)

    def release(self) -> None:
        """Stop reading (on the event loop): the bytes stay for whoever wants the same item, until evicted."""
        callback, self._on_release = self._on_release, None
        if callback is not None:
            callback()


class Taker(Protocol):
    """Hands out items that arrived."""

    async def take(
        self,
        *,
        transfer_id: TransferId | None,
        mm_hash: MmHash | None,
        expect: TensorSpec,
        deadline_s: float,
    ) -> Received:
        """Wait for an item, by its transfer id or any other delivery of the same `mm_hash`.

        Raises TransferFailed as soon as it is known not to come (the producer gave up, the bytes are corrupt,
        shape or dtype differ from `expect`), and UpstreamTimeout at the deadline.
        """
        ...

    def cancel(self, transfer_id: TransferId) -> None:
        """Say that nobody wants the item any more, whether it has arrived or not."""
        ...
