"""Single flight: who is asked for pixels, who waits, who is served."""

from __future__ import annotations

import random

import pytest

from epdctl.worker.encode.flights import Action, AskForPixels, Flights, Forget

pytestmark = pytest.mark.unit


def asked(actions: list[Action]) -> list[str]:
    """Return the calls that are asked for pixels."""
    return [action.call_id for action in actions if isinstance(action, AskForPixels)]


def test_identical_items_are_asked_for_once_and_all_are_served() -> None:
    """Three calls for one key: one sends pixels, one forward, three deliveries."""
    flights = Flights(max_asked=4)

    joined = [flights.ask(call, "k") for call in ("a", "b", "c")]

    assert joined == [False, True, True]
    assert asked(flights.admit(room=True)) == ["a"]
    assert flights.admit(room=True) == []
    assert flights.arrived("a") == "k"
    assert flights.land("k") == ("a", "b", "c")
    assert (len(flights), flights.calls) == (0, 0)


def test_call_that_joins_while_the_tower_runs_is_served() -> None:
    """A call that comes while its item is in the tower gets that forward's result."""
    flights = Flights(max_asked=4)
    flights.ask("a", "k")
    flights.admit(room=True)
    flights.arrived("a")
    flights.run("k")

    flights.ask("late", "k")

    assert flights.admit(room=True) == []
    assert flights.land("k") == ("a", "late")


def test_no_pixels_are_asked_for_without_room() -> None:
    """Pictures are decoded only while there is room for their pixels, and only so many at a time."""
    flights = Flights(max_asked=2)
    for number in range(4):
        flights.ask(f"c{number}", f"k{number}")

    assert flights.admit(room=False) == []
    assert asked(flights.admit(room=True)) == ["c0", "c1"]
    assert flights.admit(room=True) == []
    flights.arrived("c0")
    assert asked(flights.admit(room=True)) == ["c2"]


def test_owner_that_leaves_hands_the_flight_on() -> None:
    """When the caller that was asked goes away, the next one is asked, before younger keys."""
    flights = Flights(max_asked=1)
    flights.ask("a", "k")
    flights.ask("b", "k")
    flights.ask("c", "other")
    flights.admit(room=True)

    assert flights.leave("a") == []

    assert asked(flights.admit(room=True)) == ["b"]
    assert flights.arrived("a") is None
    assert flights.arrived("b") == "k"


def test_owner_that_leaves_after_its_pixels_came_takes_nothing_away() -> None:
    """Once the pixels are there the flight goes on for those who wait."""
    flights = Flights(max_asked=1)
    flights.ask("a", "k")
    flights.ask("b", "k")
    flights.admit(room=True)
    flights.arrived("a")

    assert flights.leave("a") == []
    assert flights.land("k") == ("b",)


def test_queued_item_that_nobody_wants_is_forgotten() -> None:
    """The last caller of a queued item takes it out of the queue."""
    flights = Flights(max_asked=1)
    flights.ask("a", "k")
    flights.admit(room=True)
    flights.arrived("a")

    assert flights.leave("a") == [Forget(key="k")]
    assert len(flights) == 0


def test_running_item_that_nobody_wants_still_lands() -> None:
    """What is in the tower is finished: a new call for the key joins it instead of starting anew."""
    flights = Flights(max_asked=1)
    flights.ask("a", "k")
    flights.admit(room=True)
    flights.arrived("a")
    flights.run("k")

    assert flights.leave("a") == []
    assert flights.ask("b", "k") is True
    assert flights.land("k") == ("b",)


def test_unknown_calls_change_nothing() -> None:
    """Late or unknown messages are harmless."""
    flights = Flights(max_asked=1)

    assert flights.leave("nobody") == []
    assert flights.arrived("nobody") is None
    assert flights.land("nothing") == ()


def test_any_history_serves_each_call_once_and_ends_empty() -> None:
    """Random histories: every call is served, or left; the places for decoding never leak."""
    draw = random.Random(11)
    for _ in range(200):
        flights, waiting, queued, served = Flights(max_asked=3), set[str](), [], list[str]()
        calls = iter(range(10_000))
        pending: list[str] = []

        def step(
            flights: Flights, waiting: set[str], queued: list[str], served: list[str], pending: list[str]
        ) -> None:
            pending += asked(flights.admit(room=draw.random() < 0.7))
            if pending and draw.random() < 0.6:
                key = flights.arrived(pending.pop(draw.randrange(len(pending))))
                if key is not None:
                    queued.append(key)
            if queued and draw.random() < 0.5:
                done = flights.land(queued.pop(0))
                served += done
                waiting -= set(done)

        for _ in range(60):
            call = f"c{next(calls)}"
            waiting.add(call)
            flights.ask(call, f"k{draw.randrange(5)}")
            if draw.random() < 0.3:
                left = draw.choice(sorted(waiting))
                waiting.discard(left)
                for action in flights.leave(left):
                    assert isinstance(action, Forget)
                    queued.remove(action.key)
            step(flights, waiting, queued, served, pending)
        for _ in range(400):
            step(flights, waiting, queued, served, pending)

        assert (waiting, len(flights), flights.calls) == (set(), 0, 0)
        assert len(served) == len(set(served))


class TestLooking:
    """A key that lower tiers of the cache are looked through for."""

    def looking(self, *calls: str) -> Flights:
        """Return flights in which `calls` wait for "k", which is being looked for."""
        flights = Flights(max_asked=4)
        flights.ask(calls[0], "k")
        flights.look("k")
        for call in calls[1:]:
            assert flights.ask(call, "k")
        return flights

    def test_a_hit_serves_everyone_and_asks_nobody(self) -> None:
        """Calls that ask during one promotion share it, and none of them sends pixels."""
        flights = self.looking("a", "b", "c")

        assert flights.admit(room=True) == []
        assert flights.land("k") == ("a", "b", "c")

    def test_a_miss_asks_the_first(self) -> None:
        """When no tier has it the first call is asked for its pixels."""
        flights = self.looking("a", "b")

        flights.missed("k")

        assert asked(flights.admit(room=True)) == ["a"]
        assert flights.admit(room=True) == []

    def test_leaving_hands_on(self) -> None:
        """A call that leaves meanwhile takes nobody along, and is not asked later."""
        flights = self.looking("a", "b")

        assert flights.leave("a") == []
        flights.missed("k")

        assert asked(flights.admit(room=True)) == ["b"]

    def test_everybody_leaves(self) -> None:
        """A look-up that nobody waits for is let end: new calls join it; a miss without calls is over."""
        flights = self.looking("a")
        flights.leave("a")
        assert flights.ask("late", "k")
        flights.leave("late")

        flights.missed("k")

        assert flights.admit(room=True) == []
        assert (len(flights), flights.calls) == (0, 0)


def test_held_flights_are_looked_past_and_keep_their_place() -> None:
    """What is held is asked for no pixels, what is younger is; later it is asked for in its old order, before
    all that is younger (hazard 22)."""
    flights = Flights(max_asked=2)
    for name in "abcdef":
        flights.ask(name, f"key {name}")

    first = flights.admit(room=True, held=lambda calls: set(calls) <= {"a", "c"})
    for name in "bd":
        flights.arrived(name)
    second = flights.admit(room=True)

    assert first == [AskForPixels(call_id="b"), AskForPixels(call_id="d")]
    assert second == [AskForPixels(call_id="a"), AskForPixels(call_id="c")]


def test_a_flight_is_as_old_as_its_first_call() -> None:
    """Who joins, and whose turn it is to send pixels, does not make the item younger."""
    flights = Flights(max_asked=1)
    flights.ask("a", "k", 5.0)
    flights.admit(room=True)
    flights.ask("b", "k", 7.0)
    flights.leave("a")

    assert flights.since("k") == 5.0
