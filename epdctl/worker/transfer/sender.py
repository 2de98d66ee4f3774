"""The producer end: delivers embeddings to EC consumers.

    sender = Sender(engine, observe=sink)                     # inside the loop
    result = await sender.push(PushItem(…))                   # an item whose bytes exist
    delivery = sender.announce(PushAnnouncement(…))           # reserve while the tower still runs, then:
    result = await delivery.push(PushSource(address=…, digest=…, on_free=…))    # or delivery.abort()
    sender.stats(); await sender.close()      # then close the engine, which frees the last sources

Rules of this file: what is refused, is refused before anything is sent. A consumer that does not answer can
hold up to `max_pending` items of its own, and nobody else's; once it failed to, it is asked once a second.
"""

from __future__ import annotations

import asyncio
import os
from collections import OrderedDict
from dataclasses import dataclass
from functools import partial

import structlog
import zmq.asyncio

from epdctl.ec.protocol import new_transfer_id
from epdctl.errors import ConsumerUnavailable, Overloaded, ShuttingDown
from epdctl.worker.transfer.callbacks import watched
from epdctl.worker.transfer.delivery import Delivery
from epdctl.worker.transfer.links import ConsumerLink
from epdctl.worker.transfer.ports import PushAnnouncement, PushItem, PushResult, PushSource, RecordSink
from epdctl.worker.transfer.push_steps import PushPolicy
from epdctl.worker.transfer.rank_push import Surroundings, WriteEngine

__all__ = ["PushPolicy", "Sender", "SenderStats"]

MAX_CONSUMERS = 256
CLOSE_GRACE_S = 2.0
CLOSE_LOOK_S = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class SenderStats:
    """`pending`: pushes whose callers wait. `open`: with those that are only being cleaned up."""

    pending: int
    open: int
    consumers: int


class Sender:
    """Pushes items through one transfer engine. `control_timeout_s` bounds each control exchange."""

    def __init__(
        self,
        engine: WriteEngine,
        *,
        observe: RecordSink,
        policy: PushPolicy | None = None,
        control_timeout_s: float = 2.0,
        max_pending: int = 1024,
    ) -> None:
        self._around = Surroundings(
            engine=engine,
            policy=policy if policy is not None else PushPolicy(),
            observe=observe,
            new_id=lambda: new_transfer_id(os.urandom(16)),
            log=structlog.get_logger(),
        )
        self._control_timeout_s = control_timeout_s
        self._max_pending = max_pending
        self._context = zmq.asyncio.Context()
        self._consumers: OrderedDict[str, ConsumerLink] = OrderedDict()
        self._open: dict[Delivery, ConsumerLink] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._closed = False

    async def push(self, item: PushItem) -> PushResult:
        """Deliver an item whose bytes exist; see `ports.Pusher` for what is raised."""
        delivery = self.announce(item)
        return await delivery.push(
            PushSource(address=item.address, digest=item.digest, on_free=item.on_source_free)
        )

    def announce(self, announcement: PushAnnouncement) -> Delivery:
        """Start to reserve.

        Raises Overloaded, ShuttingDown, InvalidRequest for a bad address, or ConsumerUnavailable for one that
        has just failed to answer.
        """
        if self._closed:
            raise ShuttingDown("this worker is shutting down")
        consumer = self._consumer(announcement.consumer_zmq)
        if consumer.pending >= self._max_pending:
            raise Overloaded("too many embeddings wait for this EC consumer", retry_after_s=1)
        if not consumer.suspicion.ask(asyncio.get_running_loop().time()):
            raise silence()
        delivery = Delivery(
            self._around,
            consumer,
            announcement,
            on_finish=lambda: self._finished(consumer),
            on_over=self._over,
        )
        consumer.pending += 1
        self._open[delivery] = consumer
        delivery.begin()
        return delivery

    def is_suspect(self, consumer_zmq: str) -> bool:
        """Return whether the consumer has lately failed to answer, and not answered since."""
        consumer = self._consumers.get(consumer_zmq)
        return consumer is not None and consumer.suspicion.is_suspect(asyncio.get_running_loop().time())

    def is_held(self, consumer_zmq: str) -> bool:
        """Return whether `announce` would refuse the consumer as one that has just failed to answer."""
        consumer = self._consumers.get(consumer_zmq)
        return consumer is not None and consumer.suspicion.is_held(asyncio.get_running_loop().time())

    def stats(self) -> SenderStats:
        """Return what is under way."""
        return SenderStats(
            pending=sum(consumer.pending for consumer in self._consumers.values()),
            open=len(self._open),
            consumers=len(self._consumers),
        )

    async def close(self) -> None:
        """Give up what is under way, tell the consumers as far as they answer soon, and close all sockets."""
        self._closed = True
        for delivery in list(self._open):
            delivery.abort()
        await self._wait_until_told()
        for delivery in list(self._open):
            await delivery.stop()
        for consumer in self._consumers.values():
            await consumer.close()
        await asyncio.gather(*self._closing)
        self._context.destroy(linger=0)

    async def _wait_until_told(self) -> None:
        """Let the exchanges that the aborts have started end, but not what only waits for time to pass."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + CLOSE_GRACE_S
        # Each waits for one answer after another: there is no one event to wait for.
        while loop.time() < deadline and self._is_asking():  # noqa: ASYNC110
            await asyncio.sleep(CLOSE_LOOK_S)

    def _is_asking(self) -> bool:
        return any(delivery.is_asking for delivery in self._open)

    def _consumer(self, address: str) -> ConsumerLink:
        consumer = self._consumers.get(address)
        if consumer is None:
            consumer = ConsumerLink(address, self._control_timeout_s, self._context)
            self._forget_idle()
            self._consumers[address] = consumer
        self._consumers.move_to_end(address)
        return consumer

    def _forget_idle(self) -> None:
        if len(self._consumers) < MAX_CONSUMERS:
            return
        busy = set(self._open.values())
        idle = [address for address, consumer in self._consumers.items() if consumer not in busy]
        for address in idle[: MAX_CONSUMERS // 4]:
            closing = self._consumers.pop(address).close
            failed = partial(structlog.get_logger().exception, "ec_consumer_not_closed")
            task = asyncio.create_task(watched(closing, failed))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    def _finished(self, consumer: ConsumerLink) -> None:
        consumer.pending -= 1

    def _over(self, delivery: Delivery) -> None:
        self._open.pop(delivery, None)


def silence() -> ConsumerUnavailable:
    """Return the failure of an item whose consumer has just failed to answer another one."""
    return ConsumerUnavailable("the EC consumer did not answer in time, and has not since")
