"""Carries out one push to one rank: does what `push.Push` wants done, and reports back what came of it.

Rules of this file: order of steps only. Everything runs on one event loop; each exchange is a task, owned
and ended here. Nothing is written to a consumer that was not heard of lately.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Protocol

import structlog

from epdctl.domain import TransferId
from epdctl.ec.protocol import CompleteItem, Reservation, ReserveItem
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
        on_over: Callable[[], None],
    ) -> None:
        self._around = around
        self._consumer = consumer
        self._rank = rank
        self._item = announcement
        self._on_finish, self._on_free, self._on_over = on_finish, on_free, on_over
        self._loop = asyncio.get_running_loop()
        self._push = Push(
            announcement.nbytes,
            transfer_id=announcement.transfer_id,
            spare_ids=(around.new_id(), around.new_id()),
            policy=around.policy,
        )
        self._source: PushSource | None = None
        self._write: EngineWrite | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.tasks: set[asyncio.Task[None]] = set()
        self._started_at = self._loop.time()
        self._over = False
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
                case Reserve() | Complete() | Poll() | Cancel():
                    self._spawn(self._exchange(action))
                case Write():
                    self._spawn(self._start_write(action))
                case Withdraw():
                    if self._write is not None:
                        self._around.engine.withdraw(self._write)
        self._set_timer()
        if self._push.is_over and not self._over:
            self._over = True
            self._on_over()

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = self._loop.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._push.due_at is not None and not self._stopped:
            self._timer = self._loop.call_at(self._push.due_at, self._tick)

    def _tick(self) -> None:
        # The loop may call a little early: the push does nothing then, and the timer is set again.
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

    async def _exchange(self, asked: Exchange) -> None:
        try:
            answer = await self._ask(asked)
        except (ConsumerUnavailable, UpstreamProtocol) as error:
            self._consumer.forget_ranks()
            op = type(asked).__name__.lower()
            self._log.info("ec_exchange_lost", op=op, transfer_id=self.transfer_id, error=error.message)
            self._do(self._push.lost(asked, self._loop.time()))
            return
        if isinstance(answer, Reservation) and answer.dst_session:
            self._consumer.saw_session(self._rank, answer.dst_session)
        self._do(self._push.answered(asked, answer, self._loop.time()))

    async def _ask(self, asked: Exchange) -> Answer:
        item = self._item
        match asked:
            case Reserve(transfer_id):
                return await self._rank.reserve(
                    ReserveItem(
                        transfer_id=transfer_id,
                        mm_hash=item.mm_hash,
                        nbytes=item.nbytes,
                        shape=item.shape,
                        dtype=item.dtype,
                    )
                )
            case Complete(transfer_id, reservation_id):
                digest = None if self._source is None else self._source.digest
                return await self._rank.complete(
                    CompleteItem(transfer_id=transfer_id, reservation_id=reservation_id, digest=digest)
                )
            case Poll(transfer_id):
                return await self._rank.status(transfer_id)
            case Cancel():
                return await self._rank.cancel(asked)

    async def _start_write(self, wanted: Write) -> None:
        reachable = await self._is_reachable()
        # The push may have been given up while we asked: then not a byte must go out.
        if not reachable or self._source is None or self._push.phase is not Phase.WRITING:
            self._not_written()
            return
        piece = Piece(self._source.address, wanted.destination, self._item.nbytes)
        try:
            self._write = self._around.engine.submit(wanted.session, [piece])
        except TransferSetupFailed:
            self._not_written()
            return
        self._write.outcome.add_done_callback(self._written)
        self._write.settled.add_done_callback(self._settled)

    async def _is_reachable(self) -> bool:
        if self._loop.time() - self._rank.heard_at <= FRESH_S:
            return True
        try:
            await self._rank.greet()
        except (ConsumerUnavailable, UpstreamProtocol):
            self._consumer.forget_ranks()
            return False
        return True

    def _not_written(self) -> None:
        self._do(self._push.written(False, self._loop.time()))
        self._do(self._push.settled(self._loop.time()))

    def _written(self, outcome: asyncio.Future[bool]) -> None:
        ok = not outcome.cancelled() and outcome.result()
        self._do(self._push.written(ok, self._loop.time()))

    def _settled(self, _: asyncio.Future[None]) -> None:
        self._do(self._push.settled(self._loop.time()))
