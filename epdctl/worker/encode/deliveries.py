"""Takes finished embeddings to their consumers, and tells the front how that went.

A consumer is asked for space when the tower starts on an item (`announce`), and given the rows when they
are there (`begin`).

Rules of this file: an entry is pinned from the moment its delivery begins until the transfer engine can no
longer read it, which may be later than the answer. What a consumer has not answered yet is charged to it in
`parking`, from when it is asked. Deliveries are bounded; beyond the bound a call is
refused, never queued without end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass

import msgspec
import structlog

from epdctl.domain import MmHash, TransferId
from epdctl.errors import EngineUnavailable, EpdError, InternalFailure, Overloaded, ShuttingDown
from epdctl.worker.channel import Message, error_message, message
from epdctl.worker.encode.cache import EmbeddingCache, Entry, Facts
from epdctl.worker.encode.messages import Ask, Done
from epdctl.worker.encode.parking import Parking
from epdctl.worker.transfer.ports import Delivery, PushAnnouncement, Pusher, PushSource


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveryPolicy:
    """`reply_after_push`: the front hears `done` only when the consumer has the bytes.

    `every_item`: items go to a place, not to a consumer, so each is delivered, whatever its call names.
    """

    reply_after_push: bool
    every_item: bool = False
    max_deliveries: int = 1024


class _Source:
    """The pinned bytes of one delivery; let go exactly once."""

    def __init__(self, let_go: Callable[[], None]) -> None:
        self._let_go: Callable[[], None] | None = let_go
        self.with_pusher = False
        """Whether the pusher has it, who then says when nothing reads it any more."""

    def release(self) -> None:
        let_go, self._let_go = self._let_go, None
        if let_go is not None:
            let_go()


class Deliveries:
    """All deliveries under way."""

    def __init__(
        self,
        pusher: Pusher,
        cache: EmbeddingCache,
        send: Callable[[Message], Awaitable[None]],
        *,
        policy: DeliveryPolicy,
        parking: Parking,
        on_settled: Callable[[str], None],
        address_of: Callable[[Entry], int],
        on_room: Callable[[], None],
        on_unsent: Callable[[EpdError], None],
    ) -> None:
        self._pusher = pusher
        self._cache = cache
        self._send = send
        self._policy = policy
        self._parking = parking
        self._on_settled = on_settled
        self._address_of = address_of
        self._on_room = on_room
        self._on_unsent = on_unsent
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._announced: dict[str, Delivery | EpdError] = {}
        self._log = structlog.get_logger()

    def __len__(self) -> int:
        return len(self._tasks)

    @property
    def is_full(self) -> bool:
        """Whether no further delivery is taken now."""
        return len(self._tasks) >= self._policy.max_deliveries

    def announce(self, call_id: str, ask: Ask, nbytes: int, shape: tuple[int, int], dtype: str) -> None:
        """Ask the consumer for space; how that goes is heard in `begin`."""
        if not self._is_delivered(ask):
            return
        self._charge(call_id, ask, nbytes)
        announcement = PushAnnouncement(
            consumer_zmq=ask.consumer_zmq or "",
            transfer_id=TransferId(ask.transfer_id or ""),
            mm_hash=MmHash(ask.mm_hash),
            nbytes=nbytes,
            shape=shape,
            dtype=dtype,
            on_answer=lambda: self._settle(call_id),
        )
        try:
            self._announced[call_id] = self._pusher.announce(announcement)
        except EpdError as error:
            self._announced[call_id] = error
            self._settle(call_id)

    def consumer_of(self, ask: Ask) -> str | None:
        """Return the consumer that `ask` has its embedding delivered to, or None."""
        return ask.consumer_zmq if not self._policy.every_item and self._is_delivered(ask) else None

    def withdraw(self, call_id: str) -> None:
        """Give the space of a call back: its item failed, or nobody wants it any more."""
        announced = self._announced.pop(call_id, None)
        if announced is not None and not isinstance(announced, EpdError):
            announced.abort()
        self._settle(call_id)

    def begin(self, call_id: str, ask: Ask, entry: Entry, source: str) -> None:
        """Deliver `entry` to where `ask` says, as a task; the front hears the end."""
        self._cache.pin(entry)
        if call_id not in self._announced:
            self._charge(call_id, ask, entry.region.nbytes)
        held = _Source(lambda: self._release(entry))
        task = asyncio.create_task(self._run(call_id, ask, entry, source, held))
        self._tasks[call_id] = task
        task.add_done_callback(lambda _: self._ended(call_id, held))

    def cancel(self, call_id: str) -> None:
        """Give up what was announced or begun for a call that was left."""
        self.withdraw(call_id)
        if (task := self._tasks.get(call_id)) is not None:
            task.cancel()

    async def close(self) -> None:
        """Give up whatever is still under way."""
        for call_id in list(self._announced):
            self.withdraw(call_id)
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _is_delivered(self, ask: Ask) -> bool:
        return self._policy.every_item or (ask.consumer_zmq is not None and ask.transfer_id is not None)

    def _ended(self, call_id: str, held: _Source) -> None:
        self._tasks.pop(call_id, None)
        self._settle(call_id)
        if not held.with_pusher:
            held.release()
        self._on_room()

    def _charge(self, call_id: str, ask: Ask, nbytes: int) -> None:
        consumer = self.consumer_of(ask)
        if consumer is not None:
            now = asyncio.get_running_loop().time()
            self._parking.charge(call_id, consumer, ask.key, nbytes, now)

    def _settle(self, call_id: str) -> None:
        consumer = self._parking.settle(call_id)
        if consumer is not None:
            self._on_settled(consumer)

    def _release(self, entry: Entry) -> None:
        self._cache.unpin(entry)
        self._on_room()

    async def _run(self, call_id: str, ask: Ask, entry: Entry, source: str, held: _Source) -> None:
        facts = _facts(entry)
        done = Done(rows=facts.rows, metadata=facts.metadata, transfer_id=ask.transfer_id, source=source)
        early = message("done", done, call_id=call_id)
        with suppress(EngineUnavailable):  # the front is gone; there is nobody to tell
            if not self._is_delivered(ask):
                await self._send(early)
            elif self._policy.reply_after_push:
                await self._send(await self._push(call_id, ask, entry, done, held))
            else:
                await self._send(early)
                await self._push(call_id, ask, entry, done, held)

    async def _push(self, call_id: str, ask: Ask, entry: Entry, done: Done, held: _Source) -> Message:
        """Push `entry` and return the message that tells how it went."""
        try:
            delivery = self._delivery(call_id, ask, entry)
            held.with_pusher = True
            result = await delivery.push(
                PushSource(address=self._address_of(entry), digest=_facts(entry).digest, on_free=held.release)
            )
        except EpdError as error:
            self._log.warning("push_failed", **_place(ask), error_code=error.code, reason=error.message)
            return error_message(error, call_id=call_id)
        except Exception:  # noqa: BLE001 - the one supervisor of a delivery: it costs that one only
            self._log.exception("push_failed", **_place(ask), error_code=InternalFailure.code)
            return error_message(InternalFailure("the delivery of an embedding failed"), call_id=call_id)
        delivered = msgspec.structs.replace(done, transfer_id=str(result.transfer_id) or None)
        return message("done", delivered, call_id=call_id)

    def _delivery(self, call_id: str, ask: Ask, entry: Entry) -> Delivery:
        """Return what was announced for the call, announcing it now if that was not done."""
        facts = _facts(entry)
        if call_id not in self._announced:
            shape = (facts.rows, facts.width)
            self.announce(call_id, ask, entry.region.nbytes, shape, facts.dtype)
        announced = self._announced.pop(call_id)
        if isinstance(announced, EpdError):
            self._on_unsent(announced)
            raise announced
        return announced


def _place(ask: Ask) -> dict[str, str | None]:
    """Return where an item goes, for the log; answers do not name the host of a consumer."""
    return {"transfer_id": ask.transfer_id, "consumer": ask.consumer_zmq}


def _facts(entry: Entry) -> Facts:
    assert entry.facts is not None, "only published entries are delivered"
    return entry.facts


def refusal(*, stopping: bool) -> EpdError:
    """Return why a call is not taken now."""
    if stopping:
        return ShuttingDown("this worker is shutting down")
    return Overloaded("too many embeddings wait for their consumers", retry_after_s=1)
