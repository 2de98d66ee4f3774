"""Claims about the consumer's reservations: sections 3 and 10 of the protocol, and our bounds."""

from __future__ import annotations

import math

import pytest

from epdctl.domain import TransferId
from epdctl.ec.protocol import Refusal
from epdctl.worker.transfer.items import Item
from epdctl.worker.transfer.ledger import State
from epdctl.worker.transfer.notices import LeasePolicy, Lost
from epdctl.worker.transfer.ports import TransferOutcome
from epdctl.worker.transfer.tensors import TensorContract
from epdctl.worker.transfer.tombstones import End
from tests.unit.transfer.reservation_table import ACCEPTED, BASE, NOT_COMPLETED, REPEATED, Table, flags

pytestmark = pytest.mark.unit


class TestReserve:
    """The outcomes of section 3.3, one row each."""

    def test_a_new_item_is_to_be_written(self) -> None:
        """The first to reserve an item writes it, at an address inside the arena."""
        answer = Table().reserve("a")

        assert flags(answer) == (True, False, False)
        assert (answer.dst_ptr, answer.dst_session, answer.nbytes) == (BASE, "s:1", 256)

    def test_an_available_item_needs_no_writing(self) -> None:
        """An item that is there is offered under every new id, with a ready event of its own."""
        table = Table()
        table.ready("a")
        table.all.collect()

        assert flags(table.reserve("b")) == (False, True, True)
        assert table.ready_events() == ["b"]

    def test_an_item_being_written_gets_a_follower(self) -> None:
        """Whoever asks for an item that somebody writes shares the place, and does not write."""
        table = Table()
        writer, follower = table.reserve("a"), table.reserve("b")

        assert flags(follower) == (False, False, False)
        assert writer.dst_ptr == follower.dst_ptr
        assert writer.reservation_id != follower.reservation_id

    def test_asking_again_while_writing_renews_the_lease(self) -> None:
        """A repeated reserve gets the same reservation, writes nothing, and starts the lease anew."""
        table = Table()
        first = table.reserve("a")
        table.pass_time(200)
        again = table.reserve("a")
        table.pass_time(200)

        assert (first.reservation_id, (False, False, False)) == (again.reservation_id, flags(again))
        assert table.states() == {"writing": 1}

    def test_asking_again_when_ready_repeats_the_event(self) -> None:
        """A repeated reserve of a ready item sends the event again, for a scheduler that missed it."""
        table = Table()
        table.ready("a")
        table.all.collect()

        assert flags(table.reserve("a")) == (False, True, False)
        assert table.ready_events() == ["a"]

    def test_another_item_under_a_live_id_is_refused(self) -> None:
        """A transfer id is for one item only."""
        table = Table()
        table.reserve("a")

        for other in (table.ask("a", "other"), table.ask("a", "h", (2, 64))):
            assert isinstance(other, Refusal)
            assert other.code == "conflict"

    def test_another_shape_under_a_known_hash_is_refused(self) -> None:
        """Items of one hash have one shape, whether available or being written."""
        table = Table()
        table.ready("a")
        table.reserve("w", "x")

        for refused in (table.ask("b", "h", (2, 32)), table.ask("c", "x", (2, 32))):
            assert isinstance(refused, Refusal)
            assert refused.code == "conflict"

    def test_a_cancelled_id_is_told_so(self) -> None:
        """A reserve after the cancel is answered `cancelled`, for as long as the tombstone lives."""
        table = Table()
        table.cancel("a")

        assert table.reserve("a").is_cancelled
        table.pass_time(301)
        assert table.reserve("a").write

    def test_an_id_cancelled_while_written_is_told_so(self) -> None:
        """So is the producer that asks again while its region still waits for it."""
        table = Table()
        table.reserve("a")
        table.cancel("a")

        assert table.reserve("a").is_cancelled

    def test_an_expired_id_is_new_again(self) -> None:
        """An id whose ready item was never fetched may be used anew."""
        table = Table()
        table.ready("a")
        table.pass_time(301)

        assert table.reserve("a").write

    def test_an_expired_writer_is_still_accounted_for(self) -> None:
        """While the region of an expired lease waits for its writer, its id is refused."""
        table = Table()
        table.reserve("a")
        table.pass_time(301)

        assert isinstance(table.ask("a"), Refusal)

    def test_a_full_arena_refuses_and_keeps_no_record(self) -> None:
        """A refused reserve leaves nothing behind: the same id succeeds when there is room."""
        table = Table(256)
        table.ready("a")

        refused = table.ask("b", "other")
        table.cancel("a")

        assert isinstance(refused, Refusal)
        assert refused.is_full
        assert table.reserve("b", "other").write

    def test_nothing_is_granted_while_closing(self) -> None:
        """A consumer that shuts down refuses."""
        table = Table()
        table.all.close()

        refused = table.ask("a")

        assert isinstance(refused, Refusal)
        assert refused.code == "shutting_down"

    def test_reservations_are_bounded(self) -> None:
        """Followers take no arena, so their number has a limit of its own."""
        table = Table(policy=LeasePolicy(max_reservations=3))
        for name in ("a", "b", "c"):
            table.reserve(name)

        refused = table.ask("d")

        assert isinstance(refused, Refusal)
        assert refused.code == "busy"


class TestBadShapes:
    """Hazard 43: what does not add up is refused before anything is allocated."""

    @pytest.mark.parametrize(
        ("shape", "dtype", "nbytes"),
        [
            ((4, 32), "bfloat16", 255),
            ((4, 32), "float32", 256),
            ((4, 32), "nonsense", 256),
            ((2**40, 2**40), "float32", 256),
            ((4,), "uint8", 5),
        ],
    )
    def test_what_does_not_add_up_is_refused(self, shape: tuple[int, ...], dtype: str, nbytes: int) -> None:
        """A refused shape leaves the arena's accounting unchanged."""
        table = Table()
        before = table.arena.bytes_by_state()

        assert isinstance(table.ask("a", "h", shape, dtype, nbytes), Refusal)
        assert before == table.arena.bytes_by_state()

    def test_more_than_the_arena_is_full(self) -> None:
        """An item larger than the whole arena is refused without evicting for it what could be used."""
        table = Table(4096)
        table.ready("a")
        table.all.release(table.take("a"))

        assert isinstance(table.ask("b", "big", (1024, 1024)), Refusal)
        assert isinstance(table.find(None), Item)


class TestContract:
    """The model's contract is checked at the first reserve."""

    @pytest.mark.parametrize(
        ("shape", "dtype", "said"),
        [
            ((4, 32), "bfloat16", "takes float32, the item is bfloat16"),
            ((4, 16), "float32", "takes rows of width 32, the item's are 16"),
            ((4, 2, 16), "float32", "[rows, width]"),
        ],
    )
    def test_another_tensor_is_refused_by_name(self, shape: tuple[int, ...], dtype: str, said: str) -> None:
        """A wrong dtype or width is refused, and the refusal names both."""
        table = Table(contract=TensorContract(dtype="float32", widths=frozenset({32})))
        nbytes = math.prod(shape) * (2 if dtype == "bfloat16" else 4)

        refused = table.ask("a", "h", shape, dtype, nbytes)

        assert isinstance(refused, Refusal)
        assert said in refused.error
        assert refused.code == "contract"


class TestComplete:
    """Section 3.5."""

    def test_a_written_item_becomes_ready_once(self) -> None:
        """The first completion publishes, a repeated one is accepted and changes nothing."""
        table = Table()
        answer = table.reserve("a")

        assert table.complete("a", answer.reservation_id) == ACCEPTED
        assert table.complete("a", answer.reservation_id) == REPEATED
        assert table.ready_events() == ["a"]

    def test_a_completion_repeated_after_the_item_was_taken_is_accepted(self) -> None:
        """A producer that lost the first answer learns that its item arrived, though it is in use already."""
        table = Table()
        answer = table.ready("a")
        table.take("a")

        assert table.complete("a", answer.reservation_id) == REPEATED

    def test_followers_become_ready_with_their_writer(self) -> None:
        """Everybody who waited for the item has it, each with its own event."""
        table = Table()
        writer = table.reserve("a")
        table.reserve("b")
        table.reserve("c")
        table.complete("a", writer.reservation_id)

        assert table.ready_events() == ["a", "b", "c"]
        assert table.states() == {"ready": 3}

    def test_only_the_writer_completes(self) -> None:
        """Followers, unknown ids and wrong reservations publish nothing."""
        table = Table()
        table.reserve("a")
        follower = table.reserve("b")

        assert table.complete("b", follower.reservation_id) == NOT_COMPLETED
        assert table.complete("ghost", "r1") == NOT_COMPLETED
        assert table.complete("a", "wrong") == NOT_COMPLETED
        assert table.states() == {"writing": 1, "following": 1}

    def test_a_cancelled_writer_completes_into_nothing(self) -> None:
        """Its completion is accepted, frees the region, and announces nothing."""
        table = Table()
        answer = table.reserve("a")
        table.cancel("a")

        assert table.complete("a", answer.reservation_id) == REPEATED
        assert table.ready_events() == []
        assert table.arena.nbytes == table.arena.bytes_by_state()["free"]

    def test_followers_of_a_cancelled_writer_still_get_the_item(self) -> None:
        """That one request is gone does not take the item from the others."""
        table = Table()
        answer = table.reserve("a")
        table.reserve("b")
        table.cancel("a")
        table.complete("a", answer.reservation_id)

        assert table.ready_events() == ["b"]
        assert table.states() == {"ready": 1}

    def test_corrupt_bytes_are_refused_and_counted(self) -> None:
        """Bytes that do not match their digest are never ready, and a refusal of that size is counted."""
        table = Table()
        answer = table.reserve("a")

        assert table.complete("a", answer.reservation_id, intact=False) == NOT_COMPLETED
        assert table.counted() == [(TransferOutcome.REFUSED, 256)]
        assert Lost(End.REFUSED) == table.find("a")
        assert table.arena.bytes_by_state()["quarantined"] == 256

    def test_followers_of_corrupt_bytes_end(self) -> None:
        """Followers must not wait for bytes that were refused."""
        table = Table()
        answer = table.reserve("a")
        table.reserve("b")
        table.complete("a", answer.reservation_id, intact=False)

        assert table.all.status(TransferId("b")) is None
        assert Lost(End.WRITER_GONE) == table.find("b")


def test_states_are_those_of_the_protocol() -> None:
    """The live states are section 10's, with followers told apart from writers."""
    assert {"writing", "following", "ready", "cancel_pending", "expire_pending"} == set(State)
