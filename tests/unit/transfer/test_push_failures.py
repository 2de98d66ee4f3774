"""Claims about the producer's machine when something goes wrong, or the caller gives up."""

from __future__ import annotations

import pytest

from epdctl.domain import TransferId
from epdctl.ec.protocol import CompleteResult
from epdctl.worker.transfer.ports import TransferOutcome
from epdctl.worker.transfer.push_steps import (
    Cancel,
    Complete,
    Failure,
    Finish,
    Phase,
    ReleaseSource,
    Reserve,
    Withdraw,
)
from tests.unit.transfer.desk import CANCELLED, DELIVERED, Desk, granted

pytestmark = pytest.mark.unit


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

    def test_a_write_that_was_never_begun_says_why(self) -> None:
        """The reason is part of the failure that the caller is told."""
        desk = Desk()
        desk.write()

        actions = desk.push.written(False, desk.now, "it is out of reach")

        assert Finish(TransferOutcome.FAILED, Failure.WRITE_FAILED, "it is out of reach") in actions

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
