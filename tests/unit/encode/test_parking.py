"""Parking: a consumer that does not answer has a share of the arena, and what is over it waits aside."""

from __future__ import annotations

import pytest

from epdctl.worker.encode.parking import BatchGate, Parking, Patience

pytestmark = pytest.mark.unit


def gate(parking: Parking, *suspects: str) -> BatchGate:
    """Return a gate for one batch, to which `suspects` are suspect."""
    return BatchGate(parking, lambda consumer: consumer in suspects)


def test_a_consumer_gets_a_quarter_and_the_rest_is_parked() -> None:
    """In an arena of 1000 bytes a batch takes two items of 100 for one consumer, not three; others go on."""
    parking = Parking(1000)
    batch = gate(parking)

    taken = [batch.takes(key, ["a"], 100) for key in ("k1", "k2", "k3")]

    assert taken == [True, True, False]
    assert [batch.takes("k4", ["b"], 100), batch.takes("k5", [None], 100)] == [True, True]
    assert (len(parking), parking.has_parked("a"), parking.has_parked("b")) == (1, True, False)


def test_one_item_is_always_taken() -> None:
    """An item larger than the share runs when nothing else of its consumer is unanswered."""
    parking = Parking(1000)

    assert gate(parking).takes("k1", ["a"], 900)
    parking.charge("c1", "a", "k1", 900, 0.0)
    assert not gate(parking).takes("k2", ["a"], 1)


def test_an_answer_gives_the_share_back() -> None:
    """What was answered, or is over, counts no more; it is settled once."""
    parking = Parking(1000)
    parking.charge("c1", "a", "k1", 250, 1.0)
    parking.charge("c2", "a", "k2", 250, 2.0)
    assert not gate(parking).takes("k3", ["a"], 250)

    assert (parking.silent_since("a"), parking.settle("c1"), parking.silent_since("a")) == (1.0, "a", 2.0)
    assert (parking.settle("c2"), parking.settle("c2"), parking.silent_since("a")) == ("a", None, None)
    assert parking.release("a") == ["k3"]
    assert (parking.release("a"), len(parking), parking.consumers()) == ([], 0, [])
    assert gate(parking).takes("k3", ["a"], 250)
    assert (len(parking._open), len(parking._charged)) == (0, 0), "nothing is kept of what is over"


def test_bytes_of_one_item_count_once() -> None:
    """Ten calls of one consumer for one embedding take its bytes once, until the last of them is settled."""
    parking = Parking(1000)
    for number in range(10):
        parking.charge(f"c{number}", "a", "k", 200, 0.0)

    assert gate(parking).takes("k", ["a"], 200)
    assert gate(parking).takes("other", ["a"], 50)
    for number in range(9):
        parking.settle(f"c{number}")
    assert not gate(parking).takes("third", ["a"], 100)


def test_a_suspect_consumer_has_one_item() -> None:
    """A consumer that failed to answer gets one item, to find out, however small the next ones are."""
    parking = Parking(1000)
    batch = gate(parking, "a")

    assert [batch.takes("k1", ["a"], 1), batch.takes("k2", ["a"], 1)] == [True, False]


def test_an_item_that_somebody_else_may_have_is_not_parked() -> None:
    """One waiting consumer with room, or a call without a consumer, lets the item run."""
    parking = Parking(1000)
    parking.charge("c1", "a", "k1", 250, 0.0)
    parking.charge("c2", "b", "k1", 250, 0.0)

    assert gate(parking).takes("k2", ["a", "live"], 100)
    assert gate(parking).takes("k3", ["a", None], 100)
    assert not gate(parking).takes("k4", ["a", "b"], 100)
    assert sorted(parking.consumers()) == ["a", "b"]
    assert parking.release("b") == ["k4"]
    assert parking.consumers() == []


def test_a_key_can_be_taken_out_alone() -> None:
    """When its calls change, one key leaves and the others of its consumer stay parked, in their order."""
    parking = Parking(1000)
    parking.charge("c", "a", "k0", 250, 0.0)
    for key in ("k1", "k2", "k3"):
        gate(parking).takes(key, ["a"], 100)

    assert [parking.release_key("k2"), parking.release_key("k2")] == [True, False]
    assert parking.release("a") == ["k1", "k3"]


def test_patience_counts_from_the_first_wait() -> None:
    """What is let go on and parked again has waited since the first time; what is over is forgotten."""
    patience = Patience(8.0)
    patience.note(["c1"], 1.0)
    patience.note(["c1", "c2"], 5.0)

    assert patience.next_end() == 9.0
    assert patience.overdue(["c1", "c2"], 8.9) == []
    assert patience.overdue(["c1", "c2"], 9.0) == ["c1"]
    assert patience.overdue(["c2"], 9.0) == []
    patience.keep(lambda call_id: call_id == "c2")
    assert (len(patience), patience.next_end()) == (1, 13.0)
    patience.keep(lambda call_id: False)
    assert (len(patience), patience.next_end()) == (0, float("inf"))
