"""The producer's side of one transfer to one consumer rank.

Rules of this file:
- Every step of a push is decided here; no clock, no sockets, no engine. Callers do the actions, report what
  came of them, and call `tick` at `due_at`.
- At most one control exchange is open at a time; what was asked is told back with its answer, so a late or
  doubled answer is recognised and ignored.
- The source is released exactly once, and only when no write can still read it.
- A reservation is either completed, cancelled, or was never there. A transfer id that was refused is not
  cancelled, since that would poison it at vLLM consumers; one whose reserve went unanswered is cancelled and
  not used again, since a late copy of that cancel would hit whatever is reserved under it.
- The caller hears of the end at once; cleaning up goes on after it.

    waiting (for space, for the source) → writing → completing → ended
    waiting → following (somebody else writes) → ended, or waiting again under a new id
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from epdctl.domain import TransferId
from epdctl.ec.protocol import CompleteResult, Refusal, Reservation, TransferStatus
from epdctl.worker.transfer.ports import TransferOutcome
from epdctl.worker.transfer.push_steps import (
    Action,
    Answer,
    Cancel,
    Complete,
    Exchange,
    Failure,
    Finish,
    Held,
    Owe,
    Phase,
    Poll,
    PushPolicy,
    ReleaseSource,
    Reserve,
    Source,
    Withdraw,
    Write,
)


class Push:
    """One push of `nbytes`; `spare_ids` are for when it has to reserve anew under another id."""

    def __init__(
        self,
        nbytes: int,
        *,
        transfer_id: TransferId,
        spare_ids: Iterable[TransferId],
        policy: PushPolicy,
    ) -> None:
        self.transfer_id = transfer_id
        self.phase = Phase.RESERVING
        self.bytes_written = 0
        self.asked: Exchange | None = None
        self._nbytes = nbytes
        self._spare_ids = iter(spare_ids)
        self._policy = policy
        self._source = Source.ABSENT
        self._held: Held | None = None
        self._reservation: Reservation | None = None
        self._reserved_at = 0.0
        self._step_at: float | None = None
        self._deadline: float | None = None
        self._write_deadline: float | None = None
        self._attempts = 0
        self._full_since: float | None = None
        self._full_asked = 0
        self._renewed = False
        self._actions: list[Action] = []

    @property
    def due_at(self) -> float | None:
        """When `tick` has something to do, or None."""
        due = self._step_at
        if self.phase is Phase.ENDED:
            return due
        for time in (self._deadline, self._write_deadline):
            if time is not None and (due is None or time < due):
                due = time
        return due

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to do: told, released, cleaned up."""
        idle = self.asked is None and self._held is None
        return self.phase is Phase.ENDED and idle and self._source in (Source.ABSENT, Source.RELEASED)

    def start(self, now: float) -> list[Action]:
        """Begin by reserving."""
        self._reserve()
        return self._take()

    def give_source(self, now: float) -> list[Action]:
        """The bytes are there; the deadline runs from here."""
        self._source = Source.HELD
        self._deadline = now + self._policy.deadline_s
        if self.phase is Phase.ENDED:
            self._release_unread()
        elif self.phase is Phase.WAITING_FOR_SOURCE:
            self._write(now)
        return self._take()

    def abort(self, now: float) -> list[Action]:
        """Nobody wants the item any more."""
        self._finish(Finish(TransferOutcome.CANCELLED))
        return self._take()

    def tick(self, now: float) -> list[Action]:
        """Do what is due; before `due_at` that is nothing."""
        if self.due_at is None or now < self.due_at:
            return []
        step_is_due = self._step_at is not None and self._step_at <= now
        if self.phase is Phase.ENDED:
            self._end_linger()
        elif not step_is_due or (self._deadline is not None and self._deadline <= now):
            full = self.phase is Phase.WAITING_FOR_SPACE
            self._fail(Failure.FULL if full else Failure.TIMEOUT)
        else:
            self._step_at = None
            self._ask_again()
        return self._take()

    def written(self, ok: bool, now: float, reason: str = "") -> list[Action]:
        """The write succeeded, or one of its pieces failed (others may be in flight still)."""
        if ok:
            self.bytes_written = self._nbytes
        if self.phase is Phase.WRITING and ok:
            self._complete()
        elif self.phase is Phase.WRITING:
            self._fail(Failure.WRITE_FAILED, reason)
        elif ok and self._held is not None:
            # Too late for the caller, but now nothing can land any more.
            self._held.may_land = False
            self._clean_up()
        return self._take()

    def settled(self, now: float) -> list[Action]:
        """The engine reads the source no more."""
        if self._source is Source.READ:
            self._source = Source.RELEASED
            self._actions.append(ReleaseSource())
        self._linger(now)
        return self._take()

    def answered(self, asked: Exchange, answer: Answer, now: float) -> list[Action]:
        """The consumer answered what was asked."""
        if asked is not self.asked:
            return []
        self.asked = None
        match asked, answer:
            case Reserve(), Reservation():
                self._reserved(answer, now)
            case Reserve(), Refusal():
                self._refused(answer, now)
            case Complete(), CompleteResult():
                self._completed(answer)
            case Poll(), TransferStatus() | None:
                self._polled(answer, now)
            case Cancel(), bool():
                self._cancelled(asked, answer, now)
        return self._take()

    def lost(self, asked: Exchange, now: float, *, garbled: bool = False) -> list[Action]:
        """No answer came, or (`garbled`) none that is in the protocol: whether it was done is unknown."""
        if asked is not self.asked:
            return []
        self.asked = None
        self._attempts += 1
        if isinstance(asked, Cancel):
            self._cancel_lost(asked, now)
        elif self.phase is Phase.ENDED:
            self._clean_up()
        elif self._attempts >= self._policy.control_attempts:
            self._fail(Failure.GARBLED if garbled else Failure.UNAVAILABLE)
        elif isinstance(asked, Reserve):
            self._renew(refresh=False)
        elif isinstance(asked, Complete):
            self._ask(Complete(asked.transfer_id, asked.reservation_id))
        else:
            self._step_at = now
        return self._take()

    # Reserving

    def _reserve(self) -> None:
        self.phase = Phase.RESERVING
        self._held = Held(self.transfer_id)
        self._ask(Reserve(self.transfer_id))

    def _reserved(self, answer: Reservation, now: float) -> None:
        self._held = None if answer.is_cancelled else Held(self.transfer_id, answer.reservation_id)
        if self.phase is Phase.ENDED:
            self._clean_up()
        elif answer.is_cancelled:
            self._not_wanted()
        elif answer.nbytes != self._nbytes:
            self._fail(Failure.REFUSED, "the consumer reserved another number of bytes")
        elif answer.ready:
            self._held = None
            self._finish(Finish(TransferOutcome.CACHED))
        elif answer.write:
            self._may_write(answer, now)
        else:
            self.phase = Phase.FOLLOWING
            self._attempts = 0
            self._step_at = now + self._policy.first_poll_s

    def _refused(self, refusal: Refusal, now: float) -> None:
        self._held = None
        if self.phase is Phase.ENDED:
            return
        if not refusal.is_full:
            # Only a consumer of ours words its reasons for others to read.
            self._fail(Failure.REFUSED, refusal.error if refusal.code is not None else "")
            return
        self._full_since = now if self._full_since is None else self._full_since
        if now - self._full_since >= self._policy.full_patience_s:
            self._fail(Failure.FULL)
            return
        self.phase = Phase.WAITING_FOR_SPACE
        pause = self._policy.full_retry_s * 2**self._full_asked
        self._step_at = now + min(pause, self._policy.full_retry_max_s)
        self._full_asked += 1

    def _not_wanted(self) -> None:
        if self._renewed:
            # Our own cancel reached a consumer that never saw the reserve, and left a tombstone there.
            self._replace_id()
        else:
            self._finish(Finish(TransferOutcome.CANCELLED))

    def _renew(self, *, refresh: bool) -> None:
        held, self.phase = self._held, Phase.RENEWING
        assert held is not None
        self._ask(Cancel(held.transfer_id, held.reservation_id, abandon=True, refresh=refresh, fenced=True))

    def _replace_id(self) -> None:
        spare = next(self._spare_ids, None)
        if spare is None:
            self._fail(Failure.WRITER_GONE)
            return
        self.transfer_id = spare
        self._renewed = False
        self._reserve()

    def _ask_again(self) -> None:
        if self.phase is Phase.WAITING_FOR_SPACE:
            self._reserve()
        elif self.phase is Phase.FOLLOWING:
            self._ask(Poll(self.transfer_id))

    def _polled(self, status: TransferStatus | None, now: float) -> None:
        self._attempts = 0
        if self.phase is Phase.ENDED:
            self._clean_up()
        elif status is None:
            self._held = None
            self._replace_id()
        elif status.ready:
            self._held = None
            self._finish(Finish(TransferOutcome.CACHED))
        else:
            self._step_at = now + self._policy.poll_s

    # Writing and completing

    def _may_write(self, reservation: Reservation, now: float) -> None:
        self.phase = Phase.WAITING_FOR_SOURCE
        self._reservation, self._reserved_at = reservation, now
        self._attempts = 0
        if self._source is Source.HELD:
            self._write(now)

    def _write(self, now: float) -> None:
        assert self._reservation is not None
        if now - self._reserved_at > self._policy.refresh_age_s:
            self._renew(refresh=True)
            return
        self.phase = Phase.WRITING
        self._source = Source.READ
        self._write_deadline = now + self._policy.write_deadline_s(self._nbytes)
        self._actions.append(Write(self._reservation.dst_session, self._reservation.dst_ptr))

    def _complete(self) -> None:
        assert self._held is not None
        self.phase = Phase.COMPLETING
        self._write_deadline = None
        self._attempts = 0
        self._ask(Complete(self._held.transfer_id, self._held.reservation_id))

    def _completed(self, result: CompleteResult) -> None:
        if result.completed:
            self._held = None
        if self.phase is Phase.ENDED:
            self._clean_up()
        elif not result.completed:
            self._fail(Failure.CORRUPT)
        elif result.became_ready or self._attempts:
            self._finish(Finish(TransferOutcome.DELIVERED))
        else:
            # Accepted without becoming ready: it was cancelled, or had expired, while it was being written.
            self._finish(Finish(TransferOutcome.CANCELLED))

    # Ending and cleaning up

    def _fail(self, failure: Failure, detail: str = "") -> None:
        outcome = TransferOutcome.REFUSED if failure is Failure.CORRUPT else TransferOutcome.FAILED
        self._finish(Finish(outcome, failure, detail))

    def _finish(self, finish: Finish) -> None:
        if self.phase is Phase.ENDED:
            return
        was_writing = self.phase is Phase.WRITING
        self.phase = Phase.ENDED
        self._step_at = None
        self._actions.append(finish)
        if was_writing and self._held is not None:
            self._held.may_land = True
            self._actions.append(Withdraw())
        self._release_unread()
        self._clean_up()

    def _release_unread(self) -> None:
        if self._source is Source.HELD:
            self._source = Source.RELEASED
            self._actions.append(ReleaseSource())

    def _clean_up(self) -> None:
        if self.phase is not Phase.ENDED or self.asked is not None or self._held is None:
            return
        held = self._held
        if not held.may_land:
            self._step_at = None
            self._attempts = 0
            self._ask(Cancel(held.transfer_id, held.reservation_id, abandon=True, fenced=True))
        elif not held.told:
            self._attempts = 0
            self._ask(Cancel(held.transfer_id, held.reservation_id, failed=True))

    def _cancelled(self, asked: Cancel, ok: bool, now: float) -> None:
        if asked.failed:
            self._was_told(now)
        elif self.phase is not Phase.RENEWING:
            self._held = None if ok or not asked.refresh else self._held
            self._clean_up()
        elif asked.refresh:
            # A refusal says that the id is ready, cancelled or expired: reserving it tells which.
            self._renewed = ok
            self._reserve()
        else:
            self._held = None
            self._replace_id()

    def _cancel_lost(self, asked: Cancel, now: float) -> None:
        if self._attempts < self._policy.control_attempts:
            self._ask(replace(asked))
        elif asked.failed:
            self._was_told(now)
        elif self.phase is Phase.RENEWING:
            self._fail(Failure.UNAVAILABLE)
        elif asked.refresh:
            self._clean_up()
        else:
            # Nobody answers: who does later is told then, else the consumer's lease ends what it may hold.
            self._held = None
            self._actions.append(Owe(asked))

    def _was_told(self, now: float) -> None:
        if self._held is not None:
            self._held.told = True
        self._linger(now)
        self._clean_up()

    def _linger(self, now: float) -> None:
        held = self._held
        if held is None or not held.may_land or not held.told or self._step_at is not None:
            return
        if self._source is Source.RELEASED:
            self._step_at = now + self._policy.linger_s

    def _end_linger(self) -> None:
        self._step_at = None
        if self._held is not None:
            self._held.may_land = False
            self._clean_up()

    def _ask(self, exchange: Exchange) -> None:
        self.asked = exchange
        self._actions.append(exchange)

    def _take(self) -> list[Action]:
        actions, self._actions = self._actions, []
        return actions
