"""Where items of an encode worker go when engines are lost, and what a lost engine leaves at a consumer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any

import pytest
import zmq.asyncio

from epdctl.ec.client import ControlClient
from epdctl.ec.protocol import ReserveItem
from epdctl.errors import ConsumerFull, EngineUnavailable
from epdctl.metrics import WorkerMetrics
from epdctl.worker.encode.engines import EncodeEngines
from epdctl.worker.encode.reclaim import reclaim
from epdctl.worker.supervisor import EngineState, EngineStatus
from tests.stubs.consumer import StubConsumer

pytestmark = pytest.mark.unit

FACTS = {
    "model_type": "m",
    "model_identity": "i",
    "dtype": "float32",
    "width": 4,
    "merge": 2,
    "parameters": [],
    "session": "s",
}


class FakeEngine:
    """A supervisor, and every call of it."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.state = EngineState.READY
        self.reason: str | None = None
        self.facts: dict[str, Any] = {}
        self.open = 0

    def status(self) -> EngineStatus:
        """Say how it is."""
        return EngineStatus(state=self.state, reason=self.reason, facts=self.facts, restarts=0, pid=1)

    def unavailable(self) -> EngineUnavailable:
        """Say that it is not there."""
        return EngineUnavailable("down", retry_after_s=1)

    def call(self) -> FakeEngine:
        """Open a call."""
        if self.state is not EngineState.READY:
            raise self.unavailable()
        return self

    async def __aenter__(self) -> FakeEngine:
        self.open += 1
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.open -= 1


class World:
    """Engines of which the test says which are lost while an item is on them."""

    def __init__(self, count: int = 3) -> None:
        self.fakes = [FakeEngine(number) for number in range(count)]
        self.metrics = WorkerMetrics()
        self.engines = EncodeEngines(self.fakes, self.metrics)  # type: ignore[arg-type]
        self.tries: list[tuple[int, bool]] = []
        self.lost: set[int] = set()
        self.failure: Exception | None = None

    async def attempt(self, call: Any, is_retry: bool) -> int:
        """Take the item through `call`."""
        self.tries.append((call.number, is_retry))
        if call.number in self.lost:
            call.state = EngineState.DOWN
            raise EngineUnavailable("the engine process was ended by signal 9")
        if self.failure is not None:
            raise self.failure
        return int(call.number)

    @property
    def retries(self) -> float:
        """What the counter says."""
        value = self.metrics.registry.get_sample_value(
            "epdctl_retries_total", {"stage": "encode", "reason": "engine_unavailable"}
        )
        return value or 0.0


async def test_an_item_of_a_lost_engine_is_tried_once_more_elsewhere() -> None:
    """The second try says that it is one, is counted, and nothing of the item is left on any engine."""
    world = World()
    home = await world.engines.run("k", world.attempt)
    world.lost = {home}
    world.tries.clear()

    served = await world.engines.run("k", world.attempt)

    assert served != home
    assert world.tries == [(home, False), (served, True)]
    assert world.retries == 1
    assert list(world.engines.loads()) == [0, 0, 0]


async def test_the_second_loss_is_final() -> None:
    """An item that takes two engines along is not given to a third."""
    world = World()
    world.lost = {0, 1, 2}

    with pytest.raises(EngineUnavailable, match="signal 9"):
        await world.engines.run("k", world.attempt)

    assert len(world.tries) == 2
    assert list(world.engines.loads()) == [0, 0, 0]


async def test_with_one_engine_the_loss_is_told_at_once() -> None:
    """Without another engine there is no second try, and while none serves there is not even a first."""
    world = World(1)
    world.lost = {0}

    for _ in range(2):
        with pytest.raises(EngineUnavailable):
            await world.engines.run("k", world.attempt)

    assert (world.tries, world.retries) == ([(0, False)], 0)


async def test_what_an_engine_says_about_an_item_is_final() -> None:
    """A failure of the item is raised as it is, after one try."""
    world = World()
    world.failure = ConsumerFull("the consumer has no space")

    with pytest.raises(ConsumerFull):
        await world.engines.run("k", world.attempt)

    assert (len(world.tries), world.retries) == (1, 0)


async def test_a_request_that_leaves_takes_its_item_off_the_engine() -> None:
    """Cancelled while it is on an engine, an item counts nowhere any more."""
    world = World()

    async def for_ever(call: Any, is_retry: bool) -> None:
        await asyncio.Event().wait()

    task = asyncio.create_task(world.engines.run("k", for_ever))
    await asyncio.sleep(0)
    assert sum(world.engines.loads()) == 1
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)

    assert list(world.engines.loads()) == [0, 0, 0]
    assert [fake.open for fake in world.fakes] == [0, 0, 0]


async def test_an_engine_in_trouble_serves_only_when_there_is_no_other() -> None:
    """A failing tower gets no items while another one works, and all of them when none does."""
    world = World(2)
    home = await world.engines.run("k", world.attempt)
    world.fakes[home].reason = "the vision tower failed 3 times in a row"

    assert await world.engines.run("k", world.attempt) == 1 - home
    world.fakes[1 - home].state = EngineState.DOWN
    assert await world.engines.run("k", world.attempt) == home


async def test_facts_are_those_of_any_engine_that_was_ready() -> None:
    """The front needs one engine to know the model; before the first one there is nothing to know."""
    world = World()
    with pytest.raises(EngineUnavailable):
        world.engines.facts()
    world.fakes[2].facts = FACTS

    assert world.engines.facts().model_identity == "i"


@pytest.fixture
async def consumer() -> AsyncIterator[StubConsumer]:
    """Run a consumer that holds a reservation `t` of a lost engine."""
    async with StubConsumer() as running:
        client = ControlClient(running.address, 2.0)
        item = ReserveItem(transfer_id="t", mm_hash="h", nbytes=16, shape=(1, 4), dtype="float32")
        await client.reserve(item)
        await client.close()
        yield running


async def call_reclaim(address: str, transfer_id: str = "t", deadline_s: float = 5.0) -> str:
    """Reclaim with a context of the call's own."""
    context = zmq.asyncio.Context()
    try:
        return await reclaim(context, address, transfer_id, deadline_s=deadline_s)
    finally:
        context.destroy(linger=0)


@pytest.mark.parametrize("transfer_id", ["t", "not-reserved-yet"])
async def test_what_a_lost_engine_reserved_is_abandoned(consumer: StubConsumer, transfer_id: str) -> None:
    """An unfinished transfer is given up without a claim that nothing can land, and a new id is used; so is
    one that the consumer has not heard of, whose reservation may be on its way."""
    fresh = await call_reclaim(consumer.address, transfer_id)

    assert fresh not in (transfer_id, "")
    (cancel,) = consumer.calls_to("cancel")
    assert (cancel.body["transfer_id"], cancel.body["abandon"]) == (transfer_id, True)
    assert not cancel.body.get("fenced")


async def test_what_has_arrived_is_kept(consumer: StubConsumer) -> None:
    """A transfer that was completed before the engine was lost keeps its id and is not cancelled."""
    consumer.reservations["t"].state = "ready"

    assert await call_reclaim(consumer.address) == "t"
    assert consumer.cancelled_ids() == []


@pytest.mark.parametrize("way", ["silent", "malformed"])
async def test_a_consumer_that_does_not_answer_delays_the_retry_by_its_deadline_at_most(way: str) -> None:
    """Whatever a consumer does, the item goes on with a new id."""
    async with StubConsumer({"*": way}) as consumer:
        begun = asyncio.get_running_loop().time()
        fresh = await call_reclaim(consumer.address, deadline_s=0.3)

        assert fresh != "t"
        assert asyncio.get_running_loop().time() - begun < 2.0
