"""Claims about the producer's machine: what it wants done, step by step."""

from __future__ import annotations

import pytest

from epdctl.domain import TransferId
from epdctl.ec.protocol import CompleteResult, Refusal, Reservation, TransferStatus
from epdctl.worker.transfer.ports import TransferOutcome
from epdctl.worker.transfer.push import Answer, Push
from epdctl.worker.transfer.push_steps import (
    Action,
    Cancel,
    Complete,
    Failure,
    Finish,
    Phase,
    Poll,
    PushPolicy,
    ReleaseSource,
    Reserve,
    Withdraw,
    Write,
)

pytestmark = pytest.mark.unit

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


class TestDelivery:
    """The way on which nothing goes wrong."""

    def test_reserve_write_complete(self) -> None:
        """An item is reserved, written, released as soon as it is read, completed, and reported."""
        desk = Desk()

        assert [Reserve(TransferId("a"))] == desk.start()
        assert desk.source() == []
        assert [Write("s:1", 4096)] == desk.answer(granted())
        assert [Complete(TransferId("a"), "r")] == desk.push.written(True, desk.now)
        assert [ReleaseSource()] == desk.push.settled(desk.now)
        assert desk.answer(ACCEPTED) == [DELIVERED]
        assert desk.push.is_over
        assert desk.push.bytes_written == NBYTES

    def test_reserving_overlaps_encoding(self) -> None:
        """The reservation may come long before the bytes."""
        desk = Desk()
        desk.start()

        assert desk.answer(granted()) == []
        assert desk.push.due_at is None
        desk.now += 60
        assert [Write("s:1", 4096)] == desk.source()

    @pytest.mark.parametrize("given_first", [True, False])
    def test_an_item_that_is_there_is_not_written(self, given_first: bool) -> None:
        """`ready` ends the push at once, and the source is free whenever it comes."""
        desk = Desk()
        desk.start()
        early = desk.source() if given_first else []
        ended = desk.answer(granted(write=False, ready=True))
        late = [] if given_first else desk.source()

        assert [CACHED, ReleaseSource()] == [*early, *ended, *late]
        assert desk.push.is_over

    def test_an_item_that_nobody_wants_is_not_written(self) -> None:
        """`cancelled` ends the push without a failure, and without anything to clean up."""
        desk = Desk()
        desk.start()
        desk.source()

        assert [CANCELLED, ReleaseSource()] == desk.answer(granted(cancelled=True))
        assert desk.push.is_over

    def test_a_completion_into_nothing_is_a_cancellation(self) -> None:
        """Accepted but not made ready: it was cancelled while it was being written."""
        desk = Desk()
        desk.write()
        desk.push.written(True, desk.now)

        assert desk.answer(CompleteResult(completed=True, became_ready=False)) == [CANCELLED]

    def test_an_old_reservation_is_replaced_before_the_write(self) -> None:
        """After 150 s the reservation is given back and taken anew, under the same id."""
        desk = Desk()
        desk.start()
        desk.answer(granted())
        desk.now += 151
        refresh = Cancel(TransferId("a"), "r", abandon=True, refresh=True, fenced=True)

        assert [refresh] == desk.source()
        assert [Reserve(TransferId("a"))] == desk.answer(True)
        assert [Write("s:1", 4096)] == desk.answer(granted())

    def test_a_refresh_at_a_restarted_consumer_takes_a_new_id(self) -> None:
        """Our own refresh leaves a tombstone at a consumer that never knew the id: nobody cancelled."""
        desk = Desk()
        desk.start()
        desk.answer(granted())
        desk.now += 151
        desk.source()
        desk.answer(True)

        assert [Reserve(TransferId("a2"))] == desk.answer(granted(cancelled=True))


class TestFollowing:
    """When somebody else writes the item."""

    def follow(self) -> Desk:
        """Return a push that follows."""
        desk = Desk()
        desk.start()
        desk.source()
        assert desk.answer(granted(write=False)) == []
        return desk

    def test_it_polls_soon_and_then_more_slowly(self) -> None:
        """The first look is after 20 ms, the next ones 100 ms after each answer."""
        desk = self.follow()
        began = desk.now

        assert [Poll(TransferId("a"))] == desk.wait()
        first = desk.now - began
        desk.answer(status(ready=False))
        desk.wait()
        second = desk.now - began - first

        assert (pytest.approx(first), pytest.approx(second)) == (0.02, 0.1)

    def test_ready_ends_it(self) -> None:
        """When the other writer has delivered, so has this push."""
        desk = self.follow()
        desk.wait()

        assert [CACHED, ReleaseSource()] == desk.answer(status(ready=True))

    def test_a_lost_writer_is_replaced(self) -> None:
        """Null means that the writer is gone: the item is reserved anew under a new id, and written."""
        desk = self.follow()
        desk.wait()

        assert [Reserve(TransferId("a2"))] == desk.answer(None)
        assert [Write("s:1", 4096)] == desk.answer(granted())

    def test_it_ends_at_the_deadline(self) -> None:
        """A writer that never ends fails its followers at their deadline, and they let go."""
        desk = self.follow()
        actions: list[Action] = []
        for _ in range(1000):
            actions = desk.wait()
            if desk.push.phase is Phase.ENDED:
                break
            desk.answer(status(ready=False))

        assert Finish(TransferOutcome.FAILED, Failure.TIMEOUT) in actions
        assert Cancel(TransferId("a"), "r", abandon=True, fenced=True) in actions

    def test_a_silent_consumer_ends_it(self) -> None:
        """Two polls without an answer are enough."""
        desk = self.follow()
        desk.wait()
        desk.lose()
        desk.wait()

        assert Finish(TransferOutcome.FAILED, Failure.UNAVAILABLE) in desk.lose()


class TestRefusals:
    """When the consumer says no."""

    def test_a_full_arena_is_asked_again_and_never_cancelled(self) -> None:
        """A full consumer is asked again with growing pauses; a cancel would poison the id there."""
        desk = Desk()
        desk.start()
        desk.source()
        pauses = []
        while desk.push.phase is not Phase.ENDED:
            began = desk.now
            actions = desk.answer(FULL)
            if desk.push.phase is Phase.ENDED:
                break
            assert [Reserve(TransferId("a"))] == desk.wait()
            pauses.append(round(desk.now - began, 3))

        assert [Finish(TransferOutcome.FAILED, Failure.FULL), ReleaseSource()] == actions
        assert pauses[:8] == [0.05, 0.1, 0.2, 0.4, 0.4, 0.4, 0.4, 0.4]
        assert desk.push.is_over

    def test_room_that_appears_is_used(self) -> None:
        """A reservation granted at a later attempt is as good as any."""
        desk = Desk()
        desk.start()
        desk.source()
        desk.answer(FULL)
        desk.wait()

        assert [Write("s:1", 4096)] == desk.answer(granted())

    def test_our_consumers_reason_reaches_the_caller(self) -> None:
        """A refused contract names both dtypes; a foreign consumer's text stays in the log."""
        ours, theirs = Desk(), Desk()
        ours.start()
        theirs.start()

        assert [Finish(TransferOutcome.FAILED, Failure.REFUSED, "float32, not bfloat16")] == ours.answer(
            Refusal("float32, not bfloat16", "contract")
        )
        assert [Finish(TransferOutcome.FAILED, Failure.REFUSED)] == theirs.answer(Refusal("KeyError"))
        assert ours.push.is_over

    def test_another_size_is_not_written(self) -> None:
        """A reservation of another size is given back."""
        desk = Desk()
        desk.start()
        desk.source()
        actions = desk.answer(granted(nbytes=NBYTES - 1))

        assert Cancel(TransferId("a"), "r", abandon=True, fenced=True) in actions
        assert ReleaseSource() in actions

    def test_corrupt_bytes_are_counted_as_refused(self) -> None:
        """When the consumer does not accept the bytes the push has the same outcome at both ends."""
        desk = Desk()
        desk.write()
        desk.push.written(True, desk.now)
        desk.push.settled(desk.now)
        actions = desk.answer(REFUSED)

        assert Finish(TransferOutcome.REFUSED, Failure.CORRUPT) == actions[0]
        assert Cancel(TransferId("a"), "r", abandon=True, fenced=True) == actions[1]


class TestLoss:
    """When no answer comes."""

    def test_an_unanswered_reserve_is_cancelled_and_its_id_not_used_again(self) -> None:
        """It may have been granted: it is given back unseen, and the next attempt has another id."""
        desk = Desk()
        desk.start()

        assert [Cancel(TransferId("a"), "", abandon=True, fenced=True)] == desk.lose()
        assert [Reserve(TransferId("a2"))] == desk.answer(True)

    def test_a_consumer_that_answers_nothing_fails_the_push(self) -> None:
        """After two exchanges without an answer the caller is told, then the consumer if it can be."""
        desk = Desk()
        desk.start()
        desk.source()
        desk.lose()
        actions = desk.lose()

        assert Finish(TransferOutcome.FAILED, Failure.UNAVAILABLE) in actions
        assert ReleaseSource() in actions
        desk.lose()
        desk.lose()
        assert desk.push.is_over

    def test_an_unanswered_completion_is_repeated(self) -> None:
        """Completing is idempotent: a second time is safe, and `completed` then means delivered."""
        desk = Desk()
        desk.write()
        desk.push.written(True, desk.now)

        assert [Complete(TransferId("a"), "r")] == desk.lose()
        assert desk.answer(CompleteResult(completed=True, became_ready=False)) == [DELIVERED]

    def test_a_completion_that_is_never_answered_is_a_failure(self) -> None:
        """What is not known to have arrived, has not."""
        desk = Desk()
        desk.write()
        desk.push.written(True, desk.now)
        desk.lose()
        actions = desk.lose()

        assert Finish(TransferOutcome.FAILED, Failure.UNAVAILABLE) == actions[0]
        assert Cancel(TransferId("a"), "r", abandon=True, fenced=True) == actions[1]

    def test_an_answer_to_something_else_is_ignored(self) -> None:
        """Late and doubled answers change nothing."""
        desk = Desk()
        desk.start()
        stale = desk.push.asked
        assert stale is not None
        desk.answer(granted())

        assert desk.push.answered(stale, granted(ready=True), desk.now) == []
        assert desk.push.lost(stale, desk.now) == []
        assert Phase.WAITING_FOR_SOURCE is desk.push.phase


class TestFailedWrites:
    """A failed write is not a finished write (hazard 41)."""

    def test_the_source_is_kept_until_nothing_reads_it(self) -> None:
        """The caller hears of the failure at once; the source is free only when the engine says so."""
        desk = Desk()
        desk.write()
        actions = desk.push.written(False, desk.now)

        assert Finish(TransferOutcome.FAILED, Failure.WRITE_FAILED) in actions
        assert Withdraw() in actions
        assert ReleaseSource() not in actions
        assert [ReleaseSource()] == desk.push.settled(desk.now + 30)

    def test_the_consumer_is_told_but_keeps_the_region(self) -> None:
        """The consumer may not reuse the place yet: late bytes would land in another item."""
        desk = Desk()
        desk.write()
        actions = desk.push.written(False, desk.now)

        assert Cancel(TransferId("a"), "r", failed=True) == actions[-1]

    def test_the_region_is_given_back_when_nothing_can_land(self) -> None:
        """15 s after the engine has let go of the write the reservation is abandoned."""
        desk = Desk()
        desk.write()
        desk.push.written(False, desk.now)
        desk.answer(True)
        assert desk.push.due_at is None
        desk.now += 5
        desk.push.settled(desk.now)
        began = desk.now

        assert [Cancel(TransferId("a"), "r", abandon=True, fenced=True)] == desk.wait()
        assert desk.now - began == 15
        desk.answer(True)
        assert desk.push.is_over

    def test_the_wait_also_starts_when_the_answer_comes_last(self) -> None:
        """It does not matter whether the engine or the consumer is heard of first."""
        desk = Desk()
        desk.write()
        desk.push.written(False, desk.now)
        desk.push.settled(desk.now)
        desk.answer(True)

        assert [Cancel(TransferId("a"), "r", abandon=True, fenced=True)] == desk.wait()

    def test_a_slow_write_fails_at_its_deadline(self) -> None:
        """A write has 5 s and what its bytes take at 200 MB/s, then the caller is told."""
        desk = Desk()
        desk.write()
        began = desk.now
        actions = desk.wait()

        assert pytest.approx(desk.now - began, abs=0.01) == 5
        assert Finish(TransferOutcome.FAILED, Failure.TIMEOUT) in actions
        assert ReleaseSource() not in actions

    def test_a_write_that_succeeds_too_late_needs_no_waiting(self) -> None:
        """When every byte is known to have landed, none can land later."""
        desk = Desk()
        desk.write()
        desk.wait()
        desk.answer(True)

        assert [Cancel(TransferId("a"), "r", abandon=True, fenced=True)] == desk.push.written(True, desk.now)


class TestAbort:
    """When the caller gives up."""

    def test_before_the_answer(self) -> None:
        """A reservation granted after the abort is given back."""
        desk = Desk()
        desk.start()

        assert desk.push.abort(desk.now) == [CANCELLED]
        assert [Cancel(TransferId("a"), "r", abandon=True, fenced=True)] == desk.answer(granted())
        desk.answer(True)
        assert desk.push.is_over

    def test_with_a_reservation(self) -> None:
        """A reservation that is waiting for the bytes is given back."""
        desk = Desk()
        desk.start()
        desk.answer(granted())

        assert [CANCELLED, Cancel(TransferId("a"), "r", abandon=True, fenced=True)] == desk.push.abort(
            desk.now
        )

    def test_while_writing(self) -> None:
        """A running write is given up like a failed one: its bytes may still land."""
        desk = Desk()
        desk.write()

        actions = desk.push.abort(desk.now)

        assert [CANCELLED, Withdraw(), Cancel(TransferId("a"), "r", failed=True)] == actions

    def test_after_the_end(self) -> None:
        """Giving up what is over does nothing."""
        desk = Desk()
        desk.start()
        desk.answer(granted(cancelled=True))

        assert desk.push.abort(desk.now) == []
