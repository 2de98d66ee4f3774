"""Carries out one push to one rank: does what `push.Push` wants done, and reports back what came of it.

Rules of this file: order of steps only. Everything runs on one event loop; each exchange is a task, owned
and ended here. Nothing is written to a consumer that was not heard of lately.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import structlog

from epdctl.domain import TransferId
from epdctl.ec.client import ConsumerSilent
from epdctl.ec.protocol import CompleteItem, Refusal, Reservation, ReserveItem
from epdctl.errors import ConsumerUnavailable, UpstreamProtocol
from epdctl.worker.transfer.lanes import Piece
from epdctl.worker.transfer.links import ConsumerLink, RankLink
from epdctl.worker.transfer.mooncake import TransferSetupFailed
from epdctl.worker.transfer.mooncake import Write as EngineWrite
from epdctl.worker.transfer.ports import (
    PushAnnouncement,
    PushSource,
    RecordSink,
    Side,
    TransferRecord,
)
from epdctl.worker.transfer.push import Answer, Push
from epdctl.worker.transfer.push_steps import (
    Action,
    Cancel,
    Complete,
    Exchange,
    Finish,
    Phase,
    Poll,
    PushPolicy,
    ReleaseSource,
    Reserve,
    Withdraw,
    Write,
)

FRESH_S = 1.5
"""A consumer that was heard of this lately is there; a write to a hung one could stall every other."""


SPARE_IDS = 2


class WriteEngine(Protocol):
    """What a push needs of the transfer engine."""

    def submit(self, session: str, pieces: Sequence[Piece]) -> EngineWrite:
        """Queue one write."""
        ...

    def withdraw(self, write: EngineWrite) -> None:
        """Give a write up."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What all deliveries of a sender share."""

    engine: WriteEngine
    policy: PushPolicy
    observe: RecordSink
    new_id: Callable[[], TransferId]


class RankPush:
    """One push to one rank. `on_finish` and `on_free` are called once each, `on_over` after everything."""

    def __init__(
        self,
        around: Surroundings,
        consumer: ConsumerLink,
        rank: RankLink,
        announcement: PushAnnouncement,
        *,
        on_finish: Callable[[RankPush, Finish], None],
        on_free: Callable[[], None],
        on_answer: Callable[[], None],
        on_over: Callable[[], None],
    ) -> None:
        self._around = around
        self._consumer = consumer
        self._rank = rank
        self._item = announcement
        self._on_finish, self._on_free, self._on_over = on_finish, on_free, on_over
        self._on_answer = on_answer
        self._loop = asyncio.get_running_loop()
        self._push = Push(
            announcement.nbytes,
            transfer_id=announcement.transfer_id,
            spare_ids=(around.new_id() for _ in range(SPARE_IDS)),
            policy=around.policy,
        )
        self._source: PushSource | None = None
        self._write: EngineWrite | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self.tasks: set[asyncio.Future[Any]] = set()
        self._started_at = self._loop.time()
        self._over = False
        self.has_answer = False
        """Whether the consumer has answered a reservation."""
        self.is_silent = True
        """Whether the consumer, as far as it was asked, only kept silent."""
        self._stopped = False
        self._log = structlog.get_logger()

    @property
    def transfer_id(self) -> TransferId:
        """The id that is in use."""
        return self._push.transfer_id

    @property
    def bytes_written(self) -> int:
        """What Mooncake has moved."""
        return self._push.bytes_written

    def start(self) -> None:
        """Begin to reserve."""
        self._do(self._push.start(self._loop.time()))

    def give_source(self, source: PushSource) -> None:
        """The bytes are there."""
        self._source = source
        self._do(self._push.give_source(self._loop.time()))

    def abort(self) -> None:
        """Nobody wants the item any more."""
        self._do(self._push.abort(self._loop.time()))

    def stop(self) -> None:
        """Drop what is under way and start nothing more; a source in use is still given back later."""
        self._stopped = True
        if self._timer is not None:
            self._timer.cancel()
        for task in self.tasks:
            task.cancel()

    def _do(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case ReleaseSource():
                    self._on_free()
                case Finish():
                    self._finish(action)
                case _ if self._stopped:
                    continue
                case Reserve():
                    self._ask(action, self._rank.reserve(self._to_reserve(action)))
                case Complete():
                    self._ask(action, self._rank.complete(self._to_complete(action)))
                case Poll():
                    self._ask(action, self._loop.create_task(self._rank.status(action.transfer_id)))
                case Cancel():
                    self._ask(action, self._loop.create_task(self._rank.cancel(action)))
                case Write():
                    self._start_write(action)
                case Withdraw():
                    if self._write is not None:
                        self._around.engine.withdraw(self._write)
        self._set_timer()
        if self._push.is_over and not self._over:
            self._over = True
            self._on_over()

    def _track(self, work: asyncio.Future[Any]) -> None:
        self.tasks.add(work)
        work.add_done_callback(self.tasks.discard)

    def _set_timer(self) -> None:
        due = None if self._stopped else self._push.due_at
        if self._timer is not None:
            # One that fires too early is set again then: cheaper than a new one for each step.
            if due is not None and self._timer_at <= due:
                return
            self._timer.cancel()
            self._timer = None
        if due is not None:
            self._timer_at = due
            self._timer = self._loop.call_at(due, self._tick)

    def _tick(self) -> None:
        # The loop may call a little early: the push does nothing then, and the timer is set again.
        self._timer = None
        self._do(self._push.tick(self._loop.time()))

    def _finish(self, finish: Finish) -> None:
        record = TransferRecord(
            side=Side.PRODUCER,
            outcome=finish.outcome,
            nbytes=self._push.bytes_written,
            seconds=self._loop.time() - self._started_at,
        )
        self._around.observe(record)
        self._on_finish(self, finish)

    def _ask(self, asked: Exchange, answer: asyncio.Future[Any]) -> None:
        # No task each: a push has two exchanges, and a task costs more than all that is decided in it.
        self.tasks.add(answer)
        answer.add_done_callback(partial(self._answered, asked))

    def _answered(self, asked: Exchange, future: asyncio.Future[Any]) -> None:
        self.tasks.discard(future)
        if future.cancelled():
            return
        error = future.exception()
        now = self._loop.time()
        if error is None:
            answer: Answer = future.result()
            if isinstance(answer, Reservation) and answer.dst_session:
                self._consumer.saw_session(self._rank, answer.dst_session)
            if isinstance(answer, Reservation | Refusal):
                self._heard()
            self._do(self._push.answered(asked, answer, now))
        elif isinstance(error, ConsumerUnavailable | UpstreamProtocol):
            self._consumer.forget_ranks()
            self.is_silent &= isinstance(error, ConsumerSilent)
            op = type(asked).__name__.lower()
            self._log.info("ec_exchange_lost", op=op, transfer_id=self.transfer_id, error=error.message)
            self._do(self._push.lost(asked, now))
        else:
            raise error

    def _heard(self) -> None:
        # Only this counts as a sign of life: a consumer that names its ranks and reserves nothing has none.
        self._consumer.suspicion.heard()
        self.has_answer, self.is_silent = True, False
        self._on_answer()

    def _to_reserve(self, asked: Reserve) -> ReserveItem:
        item = self._item
        return ReserveItem(
            transfer_id=asked.transfer_id,
            mm_hash=item.mm_hash,
            nbytes=item.nbytes,
            shape=item.shape,
            dtype=item.dtype,
        )

    def _to_complete(self, asked: Complete) -> CompleteItem:
        digest = None if self._source is None else self._source.digest
        return CompleteItem(transfer_id=asked.transfer_id, reservation_id=asked.reservation_id, digest=digest)

    def _start_write(self, wanted: Write) -> None:
        if self._loop.time() - self._rank.heard_at > FRESH_S:
            self._track(self._loop.create_task(self._greet_and_write(wanted)))
        elif not self._submit(wanted):
            self._loop.call_soon(self._not_written)

    async def _greet_and_write(self, wanted: Write) -> None:
        try:
            await self._rank.greet()
        except (ConsumerUnavailable, UpstreamProtocol):
            self._consumer.forget_ranks()
            self._not_written()
            return
        # The push may have been given up while we asked: then not a byte must go out.
        if self._push.phase is not Phase.WRITING or not self._submit(wanted):
            self._not_written()

    def _submit(self, wanted: Write) -> bool:
        """Hand the write to the engine; false when there is none, or nothing to write."""
        if self._source is None:
            return False
        piece = Piece(self._source.address, wanted.destination, self._item.nbytes)
        try:
            self._write = self._around.engine.submit(wanted.session, [piece])
        except TransferSetupFailed:
            return False
        self._write.outcome.add_done_callback(self._written)
        self._write.settled.add_done_callback(self._settled)
        return True

    def _not_written(self) -> None:
        self._do(self._push.written(False, self._loop.time()))
        self._do(self._push.settled(self._loop.time()))

    def _written(self, outcome: asyncio.Future[bool]) -> None:
        ok = not outcome.cancelled() and outcome.result()
        self._do(self._push.written(ok, self._loop.time()))

    def _settled(self, _: asyncio.Future[None]) -> None:
        self._do(self._push.settled(self._loop.time()))
