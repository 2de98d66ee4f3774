"""A push on its own, with short calls, a clock that tests move, and the answers of a consumer."""

from __future__ import annotations

from epdctl.domain import TransferId
from epdctl.ec.protocol import CompleteResult, Refusal, Reservation, TransferStatus
from epdctl.worker.transfer.ports import TransferOutcome
from epdctl.worker.transfer.push import Push
from epdctl.worker.transfer.push_steps import Action, Answer, Finish, PushPolicy

NBYTES = 1000
ACCEPTED = CompleteResult(completed=True, became_ready=True)
REFUSED = CompleteResult(completed=False, became_ready=False)
DELIVERED = Finish(TransferOutcome.DELIVERED)
CACHED = Finish(TransferOutcome.CACHED)
CANCELLED = Finish(TransferOutcome.CANCELLED)
FULL = Refusal("no room", "full")


def granted(
    *, write: bool = True, ready: bool = False, cancelled: bool = False, nbytes: int = NBYTES
) -> Reservation:
    """Return an answer to a reserve."""
    if cancelled:
        return Reservation(
            reservation_id="",
            dst_session="",
            dst_ptr=0,
            nbytes=nbytes,
            write=False,
            ready=False,
            cancelled=True,
        )
    return Reservation(
        reservation_id="r",
        dst_session="s:1",
        dst_ptr=4096,
        nbytes=nbytes,
        write=write,
        ready=ready,
        cached=ready,
    )


def status(*, ready: bool) -> TransferStatus:
    """Return an answer to a poll."""
    return TransferStatus(
        mm_hash="h", ready=ready, reservation_id="r", nbytes=NBYTES, shape=(NBYTES,), dtype="uint8"
    )


class Desk:
    """A push, with short calls and a clock that tests move."""

    def __init__(self, policy: PushPolicy | None = None) -> None:
        self.push = Push(
            NBYTES,
            transfer_id=TransferId("a"),
            spare_ids=[TransferId("a2"), TransferId("a3")],
            policy=policy or PushPolicy(),
        )
        self.now = 100.0

    def start(self) -> list[Action]:
        """Begin."""
        return self.push.start(self.now)

    def source(self) -> list[Action]:
        """Give the source."""
        return self.push.give_source(self.now)

    def answer(self, answer: Answer) -> list[Action]:
        """Answer what is asked."""
        assert self.push.asked is not None
        return self.push.answered(self.push.asked, answer, self.now)

    def lose(self) -> list[Action]:
        """Leave unanswered what is asked."""
        assert self.push.asked is not None
        return self.push.lost(self.push.asked, self.now)

    def wait(self, seconds: float | None = None) -> list[Action]:
        """Move the clock, to the next due moment unless told otherwise."""
        due = self.push.due_at
        assert due is not None
        self.now = due if seconds is None else self.now + seconds
        return self.push.tick(self.now)

    def write(self) -> list[Action]:
        """Bring the push to where it writes."""
        self.start()
        self.source()
        return self.answer(granted())
