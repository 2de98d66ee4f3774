"""Claims about the producer's machine: what it wants done, step by step."""

from __future__ import annotations

import pytest

from epdctl.domain import TransferId
from epdctl.ec.protocol import CompleteResult, Refusal
from epdctl.worker.transfer.ports import TransferOutcome
from epdctl.worker.transfer.push_steps import (
    Action,
    Cancel,
    Complete,
    Failure,
    Finish,
    Phase,
    Poll,
    ReleaseSource,
    Reserve,
    Write,
)
from tests.unit.transfer.desk import (
    ACCEPTED,
    CACHED,
    CANCELLED,
    DELIVERED,
    FULL,
    NBYTES,
    REFUSED,
    Desk,
    granted,
    status,
)

pytestmark = pytest.mark.unit


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
