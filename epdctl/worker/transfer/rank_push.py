"""Carries out one push to one rank: does what `push.Push` wants done, and reports back what came of it.

Rules of this file: order of steps only. Everything runs on one event loop; what is asked for alone is a task,
owned and ended here. Nothing is written to a consumer that was not heard of lately. Whatever raises in one of
the steps ends the push at once, with a log line; its source is still kept while a write may be reading it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, Protocol, TypeVarTuple

from epdctl.domain import TransferId
from epdctl.ec.client import ConsumerSilent
from epdctl.ec.protocol import CompleteItem, Refusal, Reservation, ReserveItem
from epdctl.errors import ConsumerUnavailable, EpdError, TransferFailed, UpstreamProtocol
from epdctl.worker.transfer.callbacks import call_back, guarded, watched
from epdctl.worker.transfer.lanes import Piece
from epdctl.worker.transfer.links import ConsumerLink, RankLink
from epdctl.worker.transfer.mooncake import OnNews, TransferSetupFailed
from epdctl.worker.transfer.ports import (
    PushAnnouncement,
    PushSource,
    RecordSink,
    Side,
    TransferOutcome,
    TransferRecord,
)
from epdctl.worker.transfer.push import Push
from epdctl.worker.transfer.push_steps import (
    Action,
    Answer,
    Cancel,
    Complete,
    Exchange,
    Failure,
    Finish,
    Owe,
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

Ts = TypeVarTuple("Ts")


class WriteEngine(Protocol):
    """What a push needs of the transfer engine."""

    def submit(self, session: str, pieces: Sequence[Piece], on_news: OnNews) -> int:
        """Queue one write; `on_news` is called in a later turn of the loop."""
        ...

    def withdraw(self, job: int) -> None:
        """Give a write up."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What all deliveries of a sender share."""

    engine: WriteEngine
    policy: PushPolicy
    observe: RecordSink
    new_id: Callable[[], TransferId]
    log: Any


def _step(step: Callable[[RankPush, *Ts], None]) -> Callable[[RankPush, *Ts], None]:
    """Return `step` so that a bug in it ends its push, and nobody else's."""

    @wraps(step)
    def safe(push: RankPush, *arguments: *Ts) -> None:
        guarded(push.break_off, step, push, *arguments)

    return safe


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
        self._write: int | None = None
        self._is_writing = False
        self._is_read = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._tasks: set[asyncio.Task[Any]] = set()
        self._started_at = self._loop.time()
        self._is_finished = self._is_freed = self._over = False
        self._is_broken = False
        self.has_answer = False
        """Whether the consumer has answered a reservation."""
        self.is_silent = True
        """Whether the consumer, as far as it was asked, only kept silent."""
        self._stopped = False

    @property
    def transfer_id(self) -> TransferId:
        """The id that is in use."""
        return self._push.transfer_id

    @property
    def bytes_written(self) -> int:
        """What Mooncake has moved."""
        return self._push.bytes_written

    @property
    def is_asking(self) -> bool:
        """Whether an answer of the consumer is waited for."""
        return not self._stopped and (self._push.asked is not None or bool(self._tasks))

    @_step
    def start(self) -> None:
        """Begin to reserve."""
        self._do(self._push.start(self._loop.time()))

    @_step
    def give_source(self, source: PushSource) -> None:
        """The bytes are there."""
        self._source = source
        if self._is_broken:
            self._end_broken()
        else:
            self._do(self._push.give_source(self._loop.time()))

    @_step
    def abort(self) -> None:
        """Nobody wants the item any more."""
        if not self._is_broken:
            self._do(self._push.abort(self._loop.time()))

    def stop(self) -> None:
        """Drop what is under way and start nothing more; a source in use is still given back later."""
        self._stopped = True
        if self._timer is not None:
            self._timer.cancel()
        for task in self._tasks:
            task.cancel()

    def break_off(self) -> None:
        """End after a bug, called where it is caught; what the consumer holds ends with its own lease."""
        self._around.log.exception("push_broken", transfer_id=self.transfer_id)
        if self._is_broken:
            return
        self._is_broken = True
        self.stop()
        if self._is_read and self._write is not None:
            call_back(self._around.engine.withdraw, self._write)
        call_back(self._finish, Finish(TransferOutcome.FAILED, Failure.BROKEN))
        self._end_broken()

    def _end_broken(self) -> None:
        if self._is_read:
            return
        if self._source is not None:
            self._free()
        self._end()

    def _do(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case ReleaseSource():
                    self._free()
                case Finish():
                    self._finish(action)
                case _ if self._stopped:
                    continue
                case Reserve():
                    self._rank.reserve(self._to_reserve(action), partial(self._answered, action))
                case Write():
                    self._start_write(action)
                case Complete():
                    self._rank.complete(self._to_complete(action), partial(self._answered, action))
                case Poll():
                    self._ask(action, self._rank.status(action.transfer_id))
                case Cancel():
                    self._ask(action, self._rank.cancel(action))
                case Owe():
                    self._rank.owe(action.cancel)
                case Withdraw():
                    if self._write is not None:
                        self._around.engine.withdraw(self._write)
        self._set_timer()
        if self._push.is_over:
            self._end()

    def _free(self) -> None:
        if not self._is_freed:
            self._is_freed = True
            self._on_free()

    def _end(self) -> None:
        if not self._over:
            self._over = True
            self._on_over()

    def _set_timer(self) -> None:
        due = None if self._stopped else self._push.due_at
        if self._timer is not None:
            if due is not None and self._timer_at <= due:
                return
            self._timer.cancel()
            self._timer = None
        if due is not None:
            # One that fires too early is set again then: cheaper than a new one for each step.
            self._timer_at = min(due, self._loop.time() + self._around.policy.write_base_s)
            self._timer = self._loop.call_at(self._timer_at, self._tick)

    @_step
    def _tick(self) -> None:
        # The loop may call a little early: the push does nothing then, and the timer is set again.
        self._timer = None
        self._do(self._push.tick(self._loop.time()))

    def _finish(self, finish: Finish) -> None:
        if self._is_finished:
            return
        self._is_finished = True
        record = TransferRecord(
            side=Side.PRODUCER,
            outcome=finish.outcome,
            nbytes=self._push.bytes_written,
            seconds=self._loop.time() - self._started_at,
        )
        call_back(self._around.observe, record)
        self._on_finish(self, finish)

    def _track(self, work: Callable[[], Awaitable[None]], on_bug: Callable[[], None]) -> None:
        task = self._loop.create_task(watched(work, on_bug))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _ask(self, asked: Exchange, question: Coroutine[Any, Any, Answer]) -> None:
        async def ask() -> None:
            try:
                answer: Answer | EpdError = await question
            except EpdError as error:
                answer = error
            self._answered(asked, answer)

        self._track(ask, partial(self._lose, asked))

    def _lose(self, asked: Exchange) -> None:
        """Go on after a bug as after any exchange that is lost."""
        self._around.log.exception("ec_exchange_broken", transfer_id=self.transfer_id)
        self._answered(asked, ConsumerUnavailable("the exchange with the EC consumer failed"))

    @_step
    def _answered(self, asked: Exchange, answer: Answer | EpdError) -> None:
        if self._stopped:
            return
        now = self._loop.time()
        if isinstance(answer, EpdError):
            self._consumer.forget_ranks()
            self.is_silent &= isinstance(answer, ConsumerSilent)
            op = type(asked).__name__.lower()
            self._around.log.info(
                "ec_exchange_lost", op=op, transfer_id=self.transfer_id, error=answer.message
            )
            self._do(self._push.lost(asked, now, garbled=isinstance(answer, UpstreamProtocol)))
            return
        if isinstance(answer, Reservation):
            if answer.dst_session:
                self._consumer.saw_session(self._rank, answer.dst_session)
            self._heard()
        elif isinstance(answer, Refusal):
            self._heard()
        self._do(self._push.answered(asked, answer, now))

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
            self._track(partial(self._greet_and_write, wanted), self.break_off)
        elif (reason := self._submit(wanted)) is not None:
            self._loop.call_soon(self._not_written, reason)

    async def _greet_and_write(self, wanted: Write) -> None:
        try:
            await self._rank.greet()
        except (ConsumerUnavailable, UpstreamProtocol):
            self._consumer.forget_ranks()
            self._not_written("")
        else:
            self._write_greeted(wanted)

    @_step
    def _write_greeted(self, wanted: Write) -> None:
        # The push may have been given up while we asked: then not a byte must go out.
        if self._push.phase is not Phase.WRITING:
            self._not_written("")
        elif (reason := self._submit(wanted)) is not None:
            self._not_written(reason)

    def _submit(self, wanted: Write) -> str | None:
        """Hand the write to the engine; return why that was not done."""
        if self._source is None:
            return "there is nothing to write"
        piece = Piece(self._source.address, wanted.destination, self._item.nbytes)
        try:
            self._write = self._around.engine.submit(wanted.session, (piece,), self._take_news)
        except TransferSetupFailed as error:
            return str(error)
        except TransferFailed as error:
            return error.message
        self._is_writing = self._is_read = True
        return None

    @_step
    def _take_news(self, failed: bool, settled: bool) -> None:
        self._is_read = self._is_read and not settled
        if self._is_broken:
            self._end_broken()
            return
        now = self._loop.time()
        actions: list[Action] = []
        if self._is_writing:
            self._is_writing = False
            actions += self._push.written(not failed, now)
        if settled:
            actions += self._push.settled(now)
        self._do(actions)

    @_step
    def _not_written(self, reason: str) -> None:
        now = self._loop.time()
        self._do(self._push.written(False, now, reason) + self._push.settled(now))
