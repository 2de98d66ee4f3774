"""The control side of the consumers that a producer knows: who answers where, asked in batches.

Rules of this file: what is asked for in one turn of the event loop, and while the message before it is under
way, travels together. The ranks of a consumer are asked for once per incarnation of it: again after an
exchange was lost or its Mooncake session changed. Nothing is retried here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

import zmq.asyncio

from epdctl.ec.client import ControlClient
from epdctl.ec.protocol import CompleteItem, CompleteResult, Refusal, Reservation, ReserveItem, TransferStatus
from epdctl.errors import ConsumerUnavailable, EpdError
from epdctl.worker.transfer.batching import Batched
from epdctl.worker.transfer.debts import Debts
from epdctl.worker.transfer.push_steps import Cancel
from epdctl.worker.transfer.suspicion import Suspicion
from epdctl.worker.transfer.turns import Turns

A = TypeVar("A")
FIRST_RESERVES = 8
"""The first message of a burst is small, so that its items get going while the rest is asked for."""


class RankLink:
    """One rank's control address."""

    def __init__(self, client: ControlClient) -> None:
        self._client = client
        self._reserve: Batched[ReserveItem, Reservation | Refusal] = Batched(
            self._reserve_many, first=FIRST_RESERVES
        )
        self._complete: Batched[CompleteItem, CompleteResult] = Batched(self._complete_many)
        self._debts = Debts(self.cancel)
        self.session: str | None = None
        self.heard_at = float("-inf")

    def reserve(
        self, item: ReserveItem, answered: Callable[[Reservation | Refusal | EpdError], None]
    ) -> None:
        """Ask for the space of one item."""
        self._debts.forgive(item.transfer_id)
        self._reserve.ask(item, answered)

    def complete(self, item: CompleteItem, answered: Callable[[CompleteResult | EpdError], None]) -> None:
        """Publish one finished write."""
        self._complete.ask(item, answered)

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

    def owe(self, cancel: Cancel) -> None:
        """Give the reservation up as soon as somebody answers here."""
        self._debts.add(cancel)

    def forget_debts(self) -> None:
        """Owe nothing more: another process listens here now."""
        self._debts.clear()

    async def status(self, transfer_id: str) -> TransferStatus | None:
        """Ask what became of a transfer."""
        return self._heard(await self._client.status(transfer_id))

    async def greet(self) -> None:
        """Make sure that somebody is there."""
        self._heard(await self._client.peers())

    async def close(self) -> None:
        """Drop what is under way."""
        self._debts.close()
        self._reserve.close()
        self._complete.close()
        await self._client.close()

    def _reserve_many(
        self, items: Sequence[ReserveItem]
    ) -> Coroutine[Any, Any, Sequence[Reservation | Refusal]]:
        # vLLM's producer sends the single form for one item; so do we.
        if len(items) == 1:
            return self._as_one(self._client.reserve(items[0]))
        return self._noted(self._client.reserve_batch(items))

    def _complete_many(self, items: Sequence[CompleteItem]) -> Coroutine[Any, Any, Sequence[CompleteResult]]:
        return self._noted(self._client.complete_batch(items))

    async def _as_one(self, asked: Coroutine[Any, Any, A]) -> Sequence[A]:
        return [self._heard(await asked)]

    async def _noted(self, asked: Coroutine[Any, Any, A]) -> A:
        return self._heard(await asked)

    def _heard(self, answer: A) -> A:
        self.heard_at = asyncio.get_running_loop().time()
        self._debts.wake()
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
        self.turns = Turns()

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
        if asking.cancelled():
            raise ConsumerUnavailable("the exchange with the EC consumer failed")
        return [self._rank(port) for port in asking.result()]

    def known_ranks(self) -> list[RankLink] | None:
        """Return the links to all ranks, or None when the consumer has to be asked first."""
        return None if self._ports is None else [self._rank(port) for port in self._ports]

    def saw_session(self, rank: RankLink, session: str) -> None:
        """Note a rank's Mooncake session; another one than before is another process."""
        if rank.session is not None and rank.session != session:
            self.forget_ranks()
            rank.forget_debts()
        rank.session = session

    def forget_ranks(self) -> None:
        """Ask again who is there, next time."""
        self._ports = None

    async def close(self) -> None:
        """Close all sockets."""
        self.turns.close()
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
            client = ControlClient(address, self._timeout_s, context=self._context)
            self._ranks[port] = RankLink(client)
        return self._ranks[port]


def _retrieve(task: asyncio.Task[list[int]]) -> None:
    if not task.cancelled():
        task.exception()
