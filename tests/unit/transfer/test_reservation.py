"""Claims about the consumer's reservations: sections 3 and 10 of the protocol, and our bounds."""

from __future__ import annotations

import math

import pytest

from epdctl.domain import MmHash, TransferId
from epdctl.ec.protocol import CompleteResult, Refusal, Reservation, ReserveItem
from epdctl.worker.transfer.arena import Arena
from epdctl.worker.transfer.items import Item
from epdctl.worker.transfer.ledger import State
from epdctl.worker.transfer.notices import BecameReady, Counted, LeasePolicy, Lost
from epdctl.worker.transfer.ports import TransferOutcome
from epdctl.worker.transfer.reservation import Reservations
from epdctl.worker.transfer.tensors import TensorContract
from epdctl.worker.transfer.tombstones import End

pytestmark = pytest.mark.unit

POLICY = LeasePolicy(lease_s=300, pending_s=240, quarantine_s=15, tombstone_s=300)
BASE = 1 << 40
ACCEPTED = CompleteResult(completed=True, became_ready=True)
REPEATED = CompleteResult(completed=True, became_ready=False)
NOT_COMPLETED = CompleteResult(completed=False, became_ready=False)


class Table:
    """Reservations with short calls and a clock that tests move."""

    def __init__(
        self,
        nbytes: int = 4096,
        *,
        policy: LeasePolicy = POLICY,
        contract: TensorContract | None = None,
    ) -> None:
        self.arena = Arena(nbytes)
        self.all = Reservations(
            self.arena, session="s:1", base_address=BASE, policy=policy, contract=contract
        )
        self.now = 0.0
        self.serial = 0

    def ask(
        self,
        transfer_id: str,
        mm_hash: str = "h",
        shape: tuple[int, ...] = (4, 32),
        dtype: str = "bfloat16",
        nbytes: int = 0,
    ) -> Reservation | Refusal:
        """Reserve, and return whatever comes back."""
        self.serial += 1
        item = ReserveItem(
            transfer_id=transfer_id,
            mm_hash=mm_hash,
            nbytes=nbytes or math.prod(shape) * 2,
            shape=shape,
            dtype=dtype,
        )
        return self.all.reserve(item, reservation_id=f"r{self.serial}", now=self.now)

    def reserve(self, transfer_id: str, mm_hash: str = "h", shape: tuple[int, ...] = (4, 32)) -> Reservation:
        """Reserve what must be granted."""
        answer = self.ask(transfer_id, mm_hash, shape)
        assert isinstance(answer, Reservation), answer
        return answer

    def complete(self, transfer_id: str, reservation_id: str, *, intact: bool = True) -> CompleteResult:
        """Complete."""
        return self.all.complete(TransferId(transfer_id), reservation_id, intact=intact, now=self.now)

    def ready(self, transfer_id: str, mm_hash: str = "h", shape: tuple[int, ...] = (4, 32)) -> Reservation:
        """Reserve and complete."""
        answer = self.reserve(transfer_id, mm_hash, shape)
        assert self.complete(transfer_id, answer.reservation_id) == ACCEPTED
        return answer

    def cancel(self, transfer_id: str, reservation_id: str = "", **flags: bool) -> bool:
        """Cancel."""
        return self.all.cancel(TransferId(transfer_id), reservation_id, now=self.now, **flags)

    def take(self, transfer_id: str | None, mm_hash: str | None = "h") -> Item:
        """Take what must be there."""
        item = self.find(transfer_id, mm_hash)
        assert isinstance(item, Item), item
        self.all.take(TransferId(transfer_id) if transfer_id else None, item, self.now)
        return item

    def find(self, transfer_id: str | None, mm_hash: str | None = "h") -> Item | Lost | None:
        """Look for an item."""
        return self.all.find(
            TransferId(transfer_id) if transfer_id else None, MmHash(mm_hash) if mm_hash else None
        )

    def pass_time(self, seconds: float) -> None:
        """Move the clock and let what is due expire."""
        self.now += seconds
        self.all.expire(self.now)

    def states(self) -> dict[str, int]:
        """Return the live reservations by state, without the states that have none."""
        return {name: count for name, count in self.all.counts().items() if count and name != "ended"}

    def ready_events(self) -> list[str]:
        """Return the transfers announced as ready since the last call."""
        return [notice.transfer_id for notice in self.all.collect() if isinstance(notice, BecameReady)]

    def counted(self) -> list[tuple[TransferOutcome, int]]:
        """Return what was counted since the last call."""
        return [(n.outcome, n.nbytes) for n in self.all.collect() if isinstance(n, Counted)]

    def held_bytes(self) -> int:
        """Return the bytes that are neither free nor evictable."""
        return self.arena.nbytes - self.arena.bytes_by_state()["free"] - self.all.items.resident_bytes


def flags(answer: Reservation | Refusal) -> tuple[bool, bool, bool]:
    """Return write, ready and cached of a granted reservation."""
    assert isinstance(answer, Reservation)
    return answer.write, answer.ready, answer.cached is True


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


class TestCancel:
    """Section 3.6, one test for each row."""

    def test_an_unknown_id_leaves_a_tombstone(self) -> None:
        """A cancel that comes first is remembered, with any flags."""
        for flags_given in ({}, {"abandon": True}, {"abandon": True, "refresh": True}):
            table = Table()

            assert table.cancel("a", **flags_given)
            assert table.reserve("a").is_cancelled

    def test_a_writer_that_is_not_wanted_keeps_its_region(self) -> None:
        """Without `abandon` the region waits for its writer."""
        table = Table()
        table.reserve("a")

        assert table.cancel("a")
        assert table.states() == {"cancel_pending": 1}
        assert table.arena.bytes_by_state()["used"] == 256

    def test_an_abandoned_region_rests_before_it_is_reused(self) -> None:
        """Late bytes of a writer that gave up find the region still unused (hazards 18 and 41)."""
        table = Table(256)
        table.reserve("a")
        table.cancel("a", abandon=True)

        assert isinstance(table.ask("b", "other"), Refusal)
        table.pass_time(15)
        assert table.reserve("b", "other").write

    def test_a_fenced_region_is_free_at_once(self) -> None:
        """When the producer knows that nothing can land any more, the region need not rest."""
        table = Table(256)
        table.reserve("a")
        table.cancel("a", abandon=True, fenced=True)

        assert table.reserve("b", "other").write

    def test_followers_of_an_abandoned_writer_end_visibly(self) -> None:
        """A follower whose writer gave up sees `status` null, and may reserve anew as the writer."""
        table = Table()
        table.reserve("a")
        table.reserve("b")
        table.cancel("a", abandon=True)

        assert table.all.status(TransferId("b")) is None
        assert table.reserve("b2").write

    def test_a_failed_writer_ends_its_followers_but_keeps_its_region(self) -> None:
        """`failed` lets followers go on at once while late bytes may still land in the old place."""
        table = Table()
        writer = table.reserve("a")
        table.reserve("b")
        table.cancel("a", writer.reservation_id, failed=True)
        successor = table.reserve("b2")

        assert successor.write
        assert writer.dst_ptr != successor.dst_ptr
        assert table.states() == {"cancel_pending": 1, "writing": 1}

    def test_a_refreshed_id_is_usable(self) -> None:
        """abandon and refresh free the place and keep the id."""
        table = Table()
        first = table.reserve("a")

        assert table.cancel("a", first.reservation_id, abandon=True, refresh=True)
        again = table.reserve("a")
        assert again.write
        assert first.reservation_id != again.reservation_id

    def test_a_late_copy_of_a_cancel_does_not_hit_the_new_reservation(self) -> None:
        """A cancel that names another reservation of the same id changes nothing."""
        table = Table()
        first = table.reserve("a")
        table.cancel("a", first.reservation_id, abandon=True, refresh=True)
        table.reserve("a")

        assert not table.cancel("a", first.reservation_id, abandon=True)
        assert table.states() == {"writing": 1}

    def test_a_follower_is_cancelled(self) -> None:
        """A follower goes without touching the writer; with refresh its id stays usable."""
        table = Table()
        table.reserve("a")
        table.reserve("b")
        table.reserve("c")

        assert table.cancel("b")
        assert table.cancel("c", abandon=True, refresh=True)
        assert table.reserve("b").is_cancelled
        assert flags(table.reserve("c")) == (False, False, False)

    def test_a_ready_item_is_freed(self) -> None:
        """A ready item that nobody wants gives its bytes back at once, but not for a refresh."""
        table = Table()
        table.ready("a")

        assert not table.cancel("a", abandon=True, refresh=True)
        assert table.cancel("a")
        assert table.held_bytes() == 0

    def test_a_ready_item_that_others_use_stays(self) -> None:
        """One request's cancel does not take the item from the others."""
        table = Table()
        table.ready("a")
        table.reserve("b")
        table.cancel("a")

        assert isinstance(table.find("b"), Item)

    def test_an_expired_writer_can_be_abandoned(self) -> None:
        """An expired lease is freed by abandon, and its id is usable after a refresh."""
        for refresh in (False, True):
            table = Table()
            table.reserve("a")
            table.pass_time(301)

            assert table.cancel("a")
            assert table.states() == {"expire_pending": 1}
            assert table.cancel("a", abandon=True, refresh=refresh)
            assert refresh is not table.reserve("a").is_cancelled

    def test_a_cancelled_writer_cannot_be_refreshed(self) -> None:
        """Who is not wanted any more cannot come back under the same id."""
        table = Table()
        table.reserve("a")
        table.cancel("a")

        assert not table.cancel("a", abandon=True, refresh=True)
        assert table.cancel("a", abandon=True)
        assert table.states() == {}

    def test_an_ended_id(self) -> None:
        """A cancelled id is cancelled again, an expired one is not, and a wrong reservation never is."""
        table = Table()
        table.cancel("a")
        table.ready("b")
        live = table.reserve("c", "other")
        table.pass_time(0)
        table.now += 301
        table.all.expire(table.now)

        assert not table.cancel("b")
        assert not table.cancel("c", "wrong")
        assert table.cancel("c", live.reservation_id)


class TestBounds:
    """Nothing is kept for ever (hazards 10, 27, 40)."""

    def test_a_dead_producers_region_comes_back(self) -> None:
        """A producer that reserves and dies costs its bytes for a bounded time, without any other request."""
        table = Table()
        table.reserve("a")
        for _ in range(600):
            table.pass_time(1)

        assert table.arena.nbytes == table.arena.bytes_by_state()["free"]
        assert table.states() == {}

    def test_a_cancelled_region_of_a_dead_producer_comes_back(self) -> None:
        """So does one that was cancelled while it was being written."""
        table = Table()
        table.reserve("a")
        table.cancel("a")
        table.pass_time(240)
        table.pass_time(15)

        assert table.arena.nbytes == table.arena.bytes_by_state()["free"]

    def test_followers_end_with_the_wait_for_their_writer(self) -> None:
        """Followers of a writer that is never heard of again do not outlive its wait."""
        table = Table()
        table.reserve("a")
        table.pass_time(299)
        table.reserve("b")
        for _ in range(250):
            table.pass_time(1)

        assert table.all.status(TransferId("b")) is None

    def test_a_ready_item_that_nobody_fetches_is_freed(self) -> None:
        """A ready item is held for the lease and no longer."""
        table = Table()
        table.ready("a")
        table.pass_time(300)

        assert table.held_bytes() == 0

    def test_ended_transfers_are_forgotten(self) -> None:
        """100,000 transfers, a tenth of them failing, leave no growing table behind."""
        table = Table(policy=LeasePolicy(tombstone_s=5, max_tombstones=50))
        sizes = []
        for number in range(100_000):
            answer = table.reserve(f"t{number}", f"h{number}")
            if number % 10 == 0:
                table.cancel(f"t{number}", answer.reservation_id, abandon=True, fenced=True)
            else:
                table.complete(f"t{number}", answer.reservation_id)
                table.all.release(table.take(f"t{number}", f"h{number}"))
            table.now += 0.01
            table.all.collect()
            if number % 1000 == 999:
                sizes.append(sum(table.all.counts().values()) + len(table.all.items))

        assert max(sizes) <= 50 + 1 + len(table.all.items)
        assert len(table.all._ledger._due) <= 2048

    def test_cancels_of_unknown_ids_are_bounded(self) -> None:
        """Cancels for ids that never come do not pile up."""
        table = Table(policy=LeasePolicy(max_tombstones=100))
        for number in range(10_000):
            table.cancel(f"t{number}")

        assert table.all.counts()["ended"] == 100


class TestTake:
    """What a request gets, and how long it keeps it."""

    def test_an_item_is_found_by_its_transfer_or_its_hash(self) -> None:
        """Either the transfer id or any delivery of the hash will do."""
        table = Table()
        table.ready("a")

        assert table.find("a", None) is table.find(None, "h") is table.find("other", "h")

    def test_a_reader_keeps_its_bytes(self) -> None:
        """Hazard 9: a second item waits for the place until its reader has let go of it."""
        table = Table(256)
        table.ready("a")
        item = table.take("a")

        assert isinstance(table.ask("b", "other"), Refusal)
        table.all.release(item)
        assert table.reserve("b", "other").write

    def test_a_released_item_stays_for_the_next(self) -> None:
        """An item that was used is kept as long as there is room, and offered without writing it again."""
        table = Table()
        table.ready("a")
        table.all.release(table.take("a"))

        assert flags(table.reserve("b")) == (False, True, True)

    def test_the_least_recently_used_item_goes_first(self) -> None:
        """Room is made from the items that were not used for longest, and never from those in use."""
        table = Table(1024)
        for name in ("a", "b", "c", "d"):
            table.ready(name, name)
        items = {name: table.take(name, name) for name in ("a", "b", "c", "d")}
        for name in ("b", "a", "d"):
            table.all.release(items[name])
        table.reserve("x", "x", (8, 32))

        assert table.find(None, "b") is None
        assert table.find(None, "a") is None
        assert isinstance(table.find(None, "c"), Item)
        assert isinstance(table.find(None, "d"), Item)

    def test_a_second_delivery_of_a_taken_item_is_not_written(self) -> None:
        """A request satisfied by another delivery of the hash lets its own producer stop (hazard 38)."""
        table = Table()
        table.ready("a")
        table.take("a")
        table.take("b")

        assert table.reserve("b").is_cancelled
        assert table.arena.pins(table.take(None).region) - 1 == 2

    def test_a_request_learns_why_nothing_comes(self) -> None:
        """A wait ends with the transfer's own end, not with a time-out (hazards 14 and 37)."""
        table = Table()
        writer = table.reserve("a", "1")
        table.cancel("a", writer.reservation_id, failed=True)
        table.reserve("b", "2")
        table.cancel("b")
        table.cancel("c")

        assert {"a": Lost(End.CANCELLED), "b": Lost(End.CANCELLED), "c": Lost(End.CANCELLED)} == {
            "a": table.find("a", "1"),
            "b": table.find("b", "2"),
            "c": table.find("c", "3"),
        }

    def test_a_lost_transfer_is_no_loss_while_another_is_on_its_way(self) -> None:
        """As long as somebody writes the same item, whoever waits for it goes on waiting."""
        table = Table()
        writer = table.reserve("a")
        table.cancel("a", writer.reservation_id, failed=True)
        table.reserve("b")

        assert table.find("a") is None

    def test_a_refresh_is_no_loss(self) -> None:
        """Between the two halves of a refresh a waiting request goes on waiting."""
        table = Table()
        first = table.reserve("a")
        table.cancel("a", first.reservation_id, abandon=True, refresh=True)

        assert table.find("a") is None


class TestCounting:
    """Each reservation is counted once, with the bytes that its writer wrote."""

    def test_one_count_for_each_transfer(self) -> None:
        """Delivered ones carry their bytes, followers and residents none; later cancels change nothing."""
        table = Table()
        writer = table.reserve("a")
        table.reserve("b")
        table.complete("a", writer.reservation_id)
        table.reserve("c")
        for name in ("a", "b", "c"):
            table.cancel(name)

        assert table.counted() == [
            (TransferOutcome.DELIVERED, 256),
            (TransferOutcome.CACHED, 0),
            (TransferOutcome.CACHED, 0),
        ]

    def test_a_cancelled_write_counts_its_bytes(self) -> None:
        """Bytes that were written for nobody were written all the same: both ends agree on them."""
        table = Table()
        writer = table.reserve("a")
        table.cancel("a")
        table.complete("a", writer.reservation_id)

        assert table.counted() == [(TransferOutcome.CANCELLED, 256)]

    def test_a_refresh_is_not_a_transfer(self) -> None:
        """A reservation that is only replaced is not counted; its successor is."""
        table = Table()
        first = table.reserve("a")
        table.cancel("a", first.reservation_id, abandon=True, refresh=True, fenced=True)
        table.ready("a")

        assert table.counted() == [(TransferOutcome.DELIVERED, 256)]


def test_states_are_those_of_the_protocol() -> None:
    """The live states are section 10's, with followers told apart from writers."""
    assert {"writing", "following", "ready", "cancel_pending", "expire_pending"} == set(State)
