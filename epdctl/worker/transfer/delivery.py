"""One item on its way to one consumer: all its ranks, joined.

Rules of this file: the caller hears of the end at once; the source and the clean-up have ends of their own,
and the sender keeps the delivery until then. Every rank gets the whole item; when one fails the others are
given up. Results are values until somebody asks: an announced item that nobody pushes is no error. What goes
wrong before the ranks are known, a bug as well, ends the delivery here; after that it ends in its rank.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from epdctl.ec.client import ConsumerSilent
from epdctl.errors import (
    ConsumerFull,
    ConsumerUnavailable,
    EpdError,
    InternalFailure,
    ShuttingDown,
    TransferFailed,
    UpstreamProtocol,
    UpstreamTimeout,
)
from epdctl.worker.transfer.callbacks import call_back, guarded, watched
from epdctl.worker.transfer.links import ConsumerLink, RankLink
from epdctl.worker.transfer.ports import (
    PushAnnouncement,
    PushResult,
    PushSource,
    Side,
    TransferOutcome,
    TransferRecord,
)
from epdctl.worker.transfer.push_steps import Failure, Finish
from epdctl.worker.transfer.rank_push import RankPush, Surroundings

DISCOVERY_ATTEMPTS = 2
_STRONGEST_FIRST = (TransferOutcome.DELIVERED, TransferOutcome.CANCELLED, TransferOutcome.CACHED)


class Delivery:
    """Implements `ports.Delivery`, once begun. `on_finish`: the caller's part is over; `on_over`: all is."""

    def __init__(
        self,
        around: Surroundings,
        consumer: ConsumerLink,
        announcement: PushAnnouncement,
        *,
        on_finish: Callable[[], None],
        on_over: Callable[[Delivery], None],
    ) -> None:
        self._around = around
        self._consumer = consumer
        self._item = announcement
        self._on_finish, self._on_over = on_finish, on_over
        self._loop = asyncio.get_running_loop()
        self._started_at = self._loop.time()
        self._result: PushResult | EpdError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._ranks: list[RankPush] = []
        self._finished: dict[RankPush, Finish] = {}
        self._open = 0
        self._unfreed = 0
        self._source: PushSource | None = None
        self._discovery: asyncio.Task[None] | None = None
        self._has_begun = False

    def begin(self) -> None:
        """Start to reserve, when it is this delivery's turn."""
        self._consumer.turns.add(self._begin)

    async def push(self, source: PushSource) -> PushResult:
        """Deliver the bytes; see `ports.Delivery.push`."""
        self._give(source)
        if self._result is None:
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            except asyncio.CancelledError:
                self.abort()
                raise
        result = self._result
        assert result is not None, "whoever waits is woken with a result"
        if isinstance(result, EpdError):
            raise result
        return result

    def abort(self) -> None:
        """Give up; harmless when the end is known already."""
        self._conclude(TransferFailed("the transfer was given up"))
        for rank in self._ranks:
            rank.abort()
        if not self._ranks:
            self._free()

    @property
    def is_asking(self) -> bool:
        """Whether an answer of the consumer is waited for."""
        is_discovering = self._discovery is not None and not self._discovery.done()
        return is_discovering or any(rank.is_asking for rank in self._ranks)

    async def stop(self) -> None:
        """Drop everything under way, for a sender that closes."""
        self._conclude(ShuttingDown("this worker is shutting down"))
        self._begin()
        for rank in self._ranks:
            rank.stop()
        if self._discovery is not None:
            self._discovery.cancel()
            await asyncio.gather(self._discovery, return_exceptions=True)
        if not self._ranks:
            self._free()

    def _begin(self) -> None:
        if self._has_begun:
            return
        self._has_begun = True
        guarded(self._break, self._start_or_discover)

    def _start_or_discover(self) -> None:
        if self._result is not None:
            self._fail_undiscovered(TransferFailed("the transfer was given up"))
        elif (known := self._consumer.known_ranks()) is not None:
            self._start(known)
        else:
            self._discovery = self._loop.create_task(watched(self._discover, self._break))

    async def _discover(self) -> None:
        try:
            # Each exchange has a deadline of its own; this one holds whatever they do.
            async with asyncio.timeout(self._around.policy.deadline_s):
                links = await self._find_ranks()
            if self._result is not None:
                self._fail_undiscovered(TransferFailed("the transfer was given up"))
            else:
                self._start(links)
        except EpdError as error:
            self._fail_undiscovered(error)
        except TimeoutError:
            self._consumer.suspicion.silent(self._loop.time())
            self._fail_undiscovered(ConsumerUnavailable("the EC consumer did not answer in time"))

    def _break(self) -> None:
        """End at once after a bug, called where it is caught; the ranks that have begun end by themselves."""
        self._around.log.exception("delivery_broken", transfer_id=self._item.transfer_id)
        broken = InternalFailure("the delivery of an embedding failed")
        if not self._ranks:
            self._fail_undiscovered(broken)
            return
        call_back(self._conclude, broken)
        for rank in self._ranks:
            rank.abort()

    def _start(self, links: list[RankLink]) -> None:
        ranks = [
            RankPush(
                self._around,
                self._consumer,
                link,
                self._item,
                on_finish=self._rank_finished,
                on_free=self._rank_freed,
                on_answer=self._rank_answered,
                on_over=self._rank_over,
            )
            for link in links
        ]
        self._ranks, self._open, self._unfreed = ranks, len(ranks), len(ranks)
        for rank in self._ranks:
            if rank not in self._finished:
                rank.start()
            if self._source is not None:
                rank.give_source(self._source)

    def _give(self, source: PushSource) -> None:
        self._source = source
        if self._ranks:
            for rank in self._ranks:
                rank.give_source(source)
        elif self._result is not None:
            self._free()

    async def _find_ranks(self) -> list[RankLink]:
        for attempt in range(1, DISCOVERY_ATTEMPTS + 1):
            try:
                return await self._consumer.ranks()
            except ConsumerUnavailable as error:
                if attempt == DISCOVERY_ATTEMPTS:
                    if isinstance(error, ConsumerSilent):
                        self._consumer.suspicion.silent(self._loop.time())
                    raise ConsumerUnavailable(error.message) from error
        raise AssertionError("unreachable: the last attempt returns or raises")

    def _fail_undiscovered(self, error: EpdError) -> None:
        given_up = self._result is not None
        outcome = TransferOutcome.CANCELLED if given_up else TransferOutcome.FAILED
        seconds = self._loop.time() - self._started_at
        record = TransferRecord(side=Side.PRODUCER, outcome=outcome, nbytes=0, seconds=seconds)
        call_back(self._around.observe, record)
        call_back(self._conclude, error)
        self._free()
        self._on_over(self)

    def _rank_finished(self, rank: RankPush, finish: Finish) -> None:
        self._finished[rank] = finish
        if finish.failure is not None:
            if finish.failure in (Failure.UNAVAILABLE, Failure.TIMEOUT) and rank.is_silent:
                self._consumer.suspicion.silent(self._loop.time())
            self._conclude(_error(finish))
            for other in self._ranks:
                other.abort()
        elif len(self._finished) == len(self._ranks):
            self._conclude(self._joined())

    def _rank_answered(self) -> None:
        if all(rank.has_answer for rank in self._ranks):
            self._answered()

    def _answered(self) -> None:
        if self._item.on_answer is not None:
            call_back(self._item.on_answer)

    def _joined(self) -> PushResult:
        outcomes = [finish.outcome for finish in self._finished.values()]
        return PushResult(
            transfer_id=self._ranks[0].transfer_id,
            outcome=next(outcome for outcome in _STRONGEST_FIRST if outcome in outcomes),
            nbytes_written=sum(rank.bytes_written for rank in self._ranks),
            seconds=self._loop.time() - self._started_at,
        )

    def _rank_freed(self) -> None:
        self._unfreed -= 1
        if self._unfreed == 0:
            self._free()

    def _free(self) -> None:
        source, self._source = self._source, None
        if source is not None:
            call_back(source.on_free)

    def _rank_over(self) -> None:
        self._open -= 1
        if self._open == 0:
            self._on_over(self)

    def _conclude(self, result: PushResult | EpdError) -> None:
        if self._result is not None:
            return
        self._result = result
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        self._on_finish()
        self._answered()


def _error(finish: Finish) -> EpdError:
    reason = f": {finish.detail}" if finish.detail else ""
    match finish.failure:
        case Failure.UNAVAILABLE:
            return ConsumerUnavailable("the EC consumer did not answer in time")
        case Failure.GARBLED:
            return UpstreamProtocol("the EC consumer's answers are not in the protocol")
        case Failure.FULL:
            return ConsumerFull("the EC consumer has no room for the embedding", retry_after_s=1)
        case Failure.TIMEOUT:
            return UpstreamTimeout("the embedding was not delivered in time")
        case Failure.REFUSED:
            return TransferFailed(f"the EC consumer refused the embedding{reason}")
        case Failure.CORRUPT:
            return TransferFailed("the EC consumer did not accept the bytes of the embedding")
        case Failure.BROKEN:
            return InternalFailure("the delivery of an embedding failed")
        case Failure.WRITER_GONE:
            return TransferFailed("another producer of the same embedding gave up, twice")
        case _:
            return TransferFailed(f"the embedding could not be written to the EC consumer{reason}")
