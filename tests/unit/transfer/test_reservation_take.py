"""Claims about reserved items that requests take, and how transfers are counted."""

from __future__ import annotations

import pytest

from epdctl.ec.protocol import Refusal
from epdctl.worker.transfer.items import Item
from epdctl.worker.transfer.notices import Lost
from epdctl.worker.transfer.ports import TransferOutcome
from epdctl.worker.transfer.tombstones import End
from tests.unit.transfer.reservation_table import Table, flags

pytestmark = pytest.mark.unit


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
