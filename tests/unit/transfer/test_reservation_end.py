"""Claims about how the consumer's reservations end: cancels, leases, and what is forgotten."""

from __future__ import annotations

import pytest

from epdctl.domain import TransferId
from epdctl.ec.protocol import Refusal
from epdctl.worker.transfer.items import Item
from epdctl.worker.transfer.notices import LeasePolicy
from tests.unit.transfer.reservation_table import Table, flags

pytestmark = pytest.mark.unit


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

    @pytest.mark.parametrize("is_cancelled", [True, False])
    def test_a_region_whose_writer_is_waited_for_no_more_rests(self, is_cancelled: bool) -> None:
        """A writer that is never heard of again may still write: whether it was cancelled or its lease ran
        out, its region is nobody's for a while first (hazards 18 and 41)."""
        table = Table(256)
        table.reserve("a")
        if is_cancelled:
            table.cancel("a")
        else:
            table.pass_time(300)
        table.pass_time(240)

        assert table.states() == {}
        assert table.arena.bytes_by_state()["quarantined"] == 256
        assert isinstance(table.ask("b", "other"), Refusal)
        table.pass_time(15)
        assert table.reserve("b", "other").write

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

        places = table.arena.nbytes // 256
        assert max(sizes) <= 50 + places
        assert len(table.all.items) == places, "nothing is named but what has a place"
        assert len(table.all._ledger._due) <= 2048
        table.now += 5
        table.all.expire(table.now)
        assert table.all.counts()["ended"] == 0

    def test_cancels_of_unknown_ids_are_bounded(self) -> None:
        """Cancels for ids that never come do not pile up."""
        table = Table(policy=LeasePolicy(max_tombstones=100))
        for number in range(10_000):
            table.cancel(f"t{number}")

        assert table.all.counts()["ended"] == 100
