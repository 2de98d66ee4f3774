"""The control side of the consumers that a producer knows: who answers where, asked in batches.

Rules of this file: what is asked for in one turn of the event loop, and while the message before it is under
way, travels together. The ranks of a consumer are asked for once per incarnation of it: again after an
exchange was lost or its Mooncake session changed. Nothing is retried here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

import zmq.asyncio

from epdctl.ec.client import ControlClient
from epdctl.ec.protocol import CompleteItem, CompleteResult, Refusal, Reservation, ReserveItem, TransferStatus
from epdctl.errors import EpdError
from epdctl.worker.transfer.push_steps import Cancel
from epdctl.worker.transfer.suspicion import Suspicion

FIRST_BATCH, MAX_BATCH = 8, 64
MAX_WAIT_S = 0.02

I = TypeVar("I")  # noqa: E741 - an item that is asked for
A = TypeVar("A")


class Batched(Generic[I, A]):
    """Gathers what is asked for while a message is under way, and asks for it together in the next one.

    The first message of a burst is small, so that its items get going while the rest is asked for. What has
    waited for `MAX_WAIT_S` is asked for whatever is under way: an answer that does not come delays nobody.
    """

    def __init__(self, ask_many: Callable[[Sequence[I]], Awaitable[Sequence[A]]]) -> None:
        self._ask_many = ask_many
        self._queue: list[tuple[I, asyncio.Future[A]]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None

    def ask(self, item: I) -> asyncio.Future[A]:
        """Return the future answer for `item`; it fails with what its batch failed with."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[A] = loop.create_future()
        if not self._queue:
            loop.call_soon(self._flush)
        self._queue.append((item, answer))
        return answer

    def close(self) -> None:
        """Drop what is under way."""
        self._stop_timer()
        for task in self._tasks:
            task.cancel()

    def _flush(self) -> None:
        if self._queue and not self._tasks:
            self._send_next(FIRST_BATCH)
        if self._queue and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(MAX_WAIT_S, self._flush_all)

    def _flush_all(self) -> None:
        self._timer = None
        while self._queue:
            self._send_next(MAX_BATCH)

    def _send_next(self, size: int) -> None:
        batch, self._queue = self._queue[:size], self._queue[size:]
        if not self._queue:
            self._stop_timer()
        task = asyncio.create_task(self._send(batch))
        self._tasks.add(task)
        task.add_done_callback(self._sent)

    def _sent(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if self._queue and not self._tasks:
            self._send_next(MAX_BATCH)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def _send(self, batch: list[tuple[I, asyncio.Future[A]]]) -> None:
        try:
            answers = await self._ask_many([item for item, _ in batch])
        except EpdError as error:
            for _, future in batch:
                if not future.done():
                    future.set_exception(error)
            return
        for (_, future), answer in zip(batch, answers, strict=True):
            if not future.done():
                future.set_result(answer)


class RankLink:
    """One rank's control address."""

    def __init__(self, client: ControlClient) -> None:
        self._client = client
        self._reserve = Batched(self._reserve_many)
        self._complete = Batched(self._complete_many)
        self.session: str | None = None
        self.heard_at = float("-inf")

    def reserve(self, item: ReserveItem) -> asyncio.Future[Reservation | Refusal]:
        """Ask for the space of one item."""
        return self._reserve.ask(item)

    def complete(self, item: CompleteItem) -> asyncio.Future[CompleteResult]:
        """Publish one finished write."""
        return self._complete.ask(item)

    async def cancel(self, cancel: Cancel) -> bool:
        """Give one reservation up."""
        answer = await self._client.cancel(
            cancel.transfer_id,
            cancel.reservation_id,
            abandon=cancel.abandon,
            refresh=cancel.refresh,
            failed=cancel.failed,
            fenced=cancel.fenced,
        )
        return self._heard(answer)

    async def status(self, transfer_id: str) -> TransferStatus | None:
        """Ask what became of a transfer."""
        return self._heard(await self._client.status(transfer_id))

    async def greet(self) -> None:
        """Make sure that somebody is there."""
        self._heard(await self._client.peers())

    async def close(self) -> None:
        """Drop what is under way."""
        self._reserve.close()
        self._complete.close()
        await self._client.close()

    async def _reserve_many(self, items: Sequence[ReserveItem]) -> Sequence[Reservation | Refusal]:
        # vLLM's producer sends the single form for one item; so do we.
        if len(items) == 1:
            return self._heard([await self._client.reserve(items[0])])
        return self._heard(await self._client.reserve_batch(items))

    async def _complete_many(self, items: Sequence[CompleteItem]) -> Sequence[CompleteResult]:
        return self._heard(await self._client.complete_batch(items))

    def _heard(self, answer: A) -> A:
        self.heard_at = asyncio.get_running_loop().time()
        return answer


class ConsumerLink:
    """One consumer: its base address, and the ranks behind it."""

    def __init__(self, address: str, timeout_s: float, context: zmq.asyncio.Context) -> None:
        self._client = ControlClient(address, timeout_s, context=context)
        self._timeout_s = timeout_s
        self._context = context
        self._ranks: dict[int, RankLink] = {}
        self._ports: list[int] | None = None
        self._asking: asyncio.Task[list[int]] | None = None
        self.pending = 0
        self.suspicion = Suspicion()

    async def ranks(self) -> list[RankLink]:
        """Return the links to all ranks; raise ConsumerUnavailable or UpstreamProtocol."""
        known = self.known_ranks()
        if known is not None:
            return known
        if self._asking is None:
            self._asking = asyncio.create_task(self._ask())
            self._asking.add_done_callback(_retrieve)
        # All pushes that come meanwhile share the one question; none of them may cancel it.
        asking = self._asking
        await asyncio.wait({asking})
        return [self._rank(port) for port in asking.result()]

    def known_ranks(self) -> list[RankLink] | None:
        """Return the links to all ranks, or None when the consumer has to be asked first."""
        return None if self._ports is None else [self._rank(port) for port in self._ports]

    def saw_session(self, rank: RankLink, session: str) -> None:
        """Note a rank's Mooncake session; another one than before is another process."""
        if rank.session is not None and rank.session != session:
            self.forget_ranks()
        rank.session = session

    def forget_ranks(self) -> None:
        """Ask again who is there, next time."""
        self._ports = None

    async def close(self) -> None:
        """Close all sockets."""
        if self._asking is not None:
            self._asking.cancel()
        for rank in self._ranks.values():
            await rank.close()
        await self._client.close()

    async def _ask(self) -> list[int]:
        try:
            self._ports = await self._client.peers()
            return self._ports
        finally:
            self._asking = None

    def _rank(self, port: int) -> RankLink:
        if port not in self._ranks:
            address = str(self._client.address.with_port(port))
            self._ranks[port] = RankLink(ControlClient(address, self._timeout_s, context=self._context))
        return self._ranks[port]


def _retrieve(task: asyncio.Task[list[int]]) -> None:
    if not task.cancelled():
        task.exception()
