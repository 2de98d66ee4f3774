"""Standby: what waits aside for a silent consumer goes on with its answer, fails with it, and has an end."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable

import pytest

from epdctl.errors import ConsumerUnavailable, EpdError
from epdctl.worker.encode.messages import Ask
from epdctl.worker.encode.parking import Parking
from epdctl.worker.encode.standby import Standby, StandbyEvents, StandbyPolicy
from tests.stubs.process import wait_until

pytestmark = pytest.mark.unit

HIT = Ask(key="hit", mm_hash="h", transfer_id="t", consumer_zmq="a")


class World:
    """A standby over an arena of 1000 bytes; a key names its consumer. What it did is noted."""

    def __init__(self, *, timeout_s: float = 60.0, fails: bool = True) -> None:
        self.parking = Parking(1000)
        self.suspects: set[str] = set()
        self.held: set[str] = set()
        self.unparked: list[str] = []
        self.failed: list[tuple[str, EpdError]] = []
        self.asked: list[str] = []
        self.given_up: list[tuple[str, EpdError]] = []
        events = StandbyEvents(
            consumers_of=lambda key: [key[0]],
            unpark=self._unpark,
            fail=lambda consumer, error: self.failed.append((consumer, error)),
            ask_again=lambda call_id, ask: self.asked.append(call_id),
            admit=lambda: None,
            waiting=lambda keys: [f"of {key}" for key in keys],
            is_waiting=lambda call_id: call_id not in dict(self.given_up),
            give_up=self._give_up,
        )
        self.standby = Standby(self.parking, self, events, StandbyPolicy(timeout_s=timeout_s, fails=fails))

    def is_suspect(self, consumer_zmq: str) -> bool:
        """Implement `Silence`."""
        return consumer_zmq in self.suspects

    def is_held(self, consumer_zmq: str) -> bool:
        """Implement `Silence`."""
        return consumer_zmq in self.held

    def _unpark(self, keys: Iterable[str]) -> None:
        self.unparked.extend(keys)

    def _give_up(self, calls: Collection[str], error: EpdError) -> None:
        for call_id in calls:
            self.given_up.append((call_id, error))
            self.standby.left(call_id)
            self.standby.changed(call_id.removeprefix("of "))

    def fill(self) -> None:
        """Let "a" have its share, without an answer."""
        self.parking.charge("c", "a", "a0", 250, asyncio.get_running_loop().time())

    def park(self, key: str) -> None:
        """Have the gate refuse `key`."""
        assert not self.standby.new_gate()(key, 100)
        self.standby.parked()


async def next_turn() -> None:
    """Let what was put off to the loop's next turn happen."""
    for _ in range(3):
        await asyncio.sleep(0)


async def test_an_answer_lets_what_was_parked_go_on() -> None:
    """Items and cache hits wait until their consumer answers, those of others do not."""
    world = World()
    world.fill()
    world.park("a1")
    assert world.standby.new_gate()("b1", 100)
    assert world.standby.holds("call", HIT, "a", 100)
    assert not world.standby.holds("other", HIT, "b", 100)
    assert (world.standby.is_held(["a"]), world.standby.is_held(["a", "b"])) == (True, False)

    world.parking.settle("c")
    world.standby.settled("a")
    await next_turn()
    world.standby.close()

    assert (world.unparked, world.asked, world.failed) == (["a1"], ["call"], [])
    assert not world.standby.is_held(["a"])


async def test_a_hit_that_was_left_is_not_asked_for_again() -> None:
    """A client that went away while its cache hit waited gets no delivery, which nobody would give up."""
    world = World()
    world.fill()
    assert world.standby.holds("left", HIT, "a", 100)
    assert world.standby.holds("stays", HIT, "a", 100)
    world.standby.left("left")

    world.parking.settle("c")
    world.standby.settled("a")
    await next_turn()
    world.standby.close()

    assert world.asked == ["stays"]


async def test_a_failure_fails_what_was_parked() -> None:
    """When the consumer has become suspect, what waits for it fails once, as not answered."""
    world = World()
    world.fill()
    world.park("a1")
    world.suspects.add("a")
    world.parking.settle("c")
    world.standby.settled("a")
    world.standby.settled("a")
    await next_turn()
    world.standby.close()

    assert [(consumer, type(error)) for consumer, error in world.failed] == [("a", ConsumerUnavailable)]


async def test_what_a_suspect_may_not_have_fails_at_once() -> None:
    """Beside the one item that finds out, nothing waits for a suspect consumer."""
    world = World()
    world.fill()
    world.suspects.add("a")
    world.park("a1")
    await next_turn()
    world.standby.close()

    assert [consumer for consumer, _ in world.failed] == ["a"]


async def test_without_a_push_to_wait_for_nothing_fails() -> None:
    """With --reply-after encode an item only has to be encoded: silence alone does not fail it."""
    world = World(fails=False)
    world.suspects.add("a")
    world.held.add("a")
    world.fill()
    world.park("a1")
    assert world.standby.refusal("a") is None

    world.parking.settle("c")
    world.standby.settled("a")
    await next_turn()
    world.standby.close()

    assert (world.unparked, world.failed) == (["a1"], [])


async def test_refusals_name_the_silence() -> None:
    """While a consumer is not to be asked its items are refused, and nobody else's."""
    world = World()
    world.held.add("a")

    assert "did not answer" in str(world.standby.refusal("a"))
    assert [world.standby.refusal("b"), world.standby.refusal(None)] == [None, None]


async def test_parked_items_have_an_end() -> None:
    """Without answer or failure, what is parked fails when the first question is as old as the timeout."""
    world = World(timeout_s=0.1)
    world.fill()
    world.park("a1")

    await wait_until(lambda: bool(world.failed), "the parked item failed")
    world.standby.close()

    assert [consumer for consumer, _ in world.failed][:1] == ["a"]


async def test_items_whose_consumer_owes_nothing_do_not_stay_parked() -> None:
    """An item that was parked beside batch mates that never ran is put back soon."""
    world = World()
    gate = world.standby.new_gate()
    assert gate("a1", 250)
    assert not gate("a2", 250)
    world.standby.parked()

    await wait_until(lambda: world.unparked == ["a2"], "put back")
    world.standby.close()


async def test_a_joining_call_brings_the_item_back() -> None:
    """When other calls wait for a parked item, whether it may run is asked again."""
    world = World()
    world.fill()
    world.park("a1")
    world.standby.changed("a1")
    world.standby.changed("a2")
    world.standby.close()

    assert world.unparked == ["a1"]


@pytest.mark.parametrize("fails", [True, False])
async def test_what_waits_aside_for_too_long_is_given_up(fails: bool) -> None:
    """Parked items and held cache hits end, whatever their calls are answered for, also when their consumer
    answers something now and then and so is never silent for long."""
    world = World(timeout_s=0.3, fails=fails)
    world.fill()
    world.park("a1")
    assert world.standby.holds("call", HIT, "a", 100)
    loop = asyncio.get_running_loop()
    begun = loop.time()

    def ask_anew() -> bool:
        world.parking.settle("c")
        world.fill()
        if "of a1" not in dict(world.given_up) and not world.parking.keys():
            world.park("a1")
        return len(world.given_up) == 2

    await wait_until(ask_anew, "both are given up", 10.0)
    took_s = loop.time() - begun
    await next_turn()
    world.standby.close()

    assert took_s >= 0.25
    assert {call_id for call_id, _ in world.given_up} == {"of a1", "call"}
    assert {type(error) for _, error in world.given_up} == {ConsumerUnavailable}
    assert (world.parking.keys(), world.failed) == ([], [])


async def test_a_parked_item_that_comes_back_does_not_wait_anew() -> None:
    """Being put back and parked again does not start an item's time again."""
    world = World(timeout_s=0.4, fails=False)
    world.fill()
    world.park("a1")
    ended = asyncio.get_running_loop().time() + 0.4

    def again() -> bool:
        if not world.given_up:
            world.standby.changed("a1")
            world.park("a1")
        return bool(world.given_up)

    await wait_until(again, "given up", 10.0)
    world.standby.close()

    assert asyncio.get_running_loop().time() < ended + 5.0
    assert [call_id for call_id, _ in world.given_up] == ["of a1"]
