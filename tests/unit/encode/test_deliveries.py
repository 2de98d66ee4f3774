"""Deliveries: whatever becomes of a push, the front is told once and the arena bytes are let go once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from structlog.testing import capture_logs

from epdctl.domain import TransferId
from epdctl.errors import ConsumerFull, EngineUnavailable, Overloaded
from epdctl.worker.channel import ErrorBody, Message
from epdctl.worker.encode.cache import EmbeddingCache, Entry, Facts
from epdctl.worker.encode.deliveries import Deliveries, DeliveryPolicy
from epdctl.worker.encode.messages import Ask, Done
from epdctl.worker.encode.parking import Parking
from epdctl.worker.transfer.arena import Arena
from epdctl.worker.transfer.ports import PushAnnouncement, PushResult, PushSource, TransferOutcome

pytestmark = pytest.mark.unit

FACTS = Facts(rows=1, width=4, dtype="float32", digest="d", metadata={"image_grid_thw": [1, 2, 2]})
ASK = Ask(key="k", mm_hash="h", transfer_id="t", consumer_zmq="tcp://127.0.0.1:1")


class FakePusher:
    """Implements `ports.Pusher` and `ports.Delivery` in memory; the test says how pushes end."""

    def __init__(self) -> None:
        self.announced: list[PushAnnouncement] = []
        self.sources: list[PushSource] = []
        self.aborted = 0
        self.refusal: Exception | None = None
        self.end: asyncio.Future[PushResult] = asyncio.get_running_loop().create_future()

    def announce(self, announcement: PushAnnouncement) -> FakePusher:
        """Take or refuse an announcement."""
        if self.refusal is not None:
            raise self.refusal
        self.announced.append(announcement)
        return self

    async def push(self, source: PushSource) -> PushResult:
        """Wait for the end that the test sets."""
        self.sources.append(source)
        return await asyncio.shield(self.end)

    def abort(self) -> None:
        """Count."""
        self.aborted += 1

    def deliver(self) -> None:
        """End every push well."""
        outcome = TransferOutcome.DELIVERED
        result = PushResult(transfer_id=TransferId("t2"), outcome=outcome, nbytes_written=16, seconds=0.1)
        self.end.set_result(result)


class World:
    """Deliveries over a cache with one ready entry."""

    def __init__(self, *, reply_after_push: bool = True, max_deliveries: int = 4) -> None:
        self.arena = Arena(1024)
        self.cache = EmbeddingCache(self.arena)
        self.pusher = FakePusher()
        self.sent: list[Message] = []
        self.room = 0
        self.parking = Parking(1024)
        self.settled: list[str] = []
        self.unsent: list[str] = []
        self.deliveries = Deliveries(
            self.pusher,  # type: ignore[arg-type]
            self.cache,
            self._send,
            policy=DeliveryPolicy(reply_after_push=reply_after_push, max_deliveries=max_deliveries),
            parking=self.parking,
            on_settled=self.settled.append,
            address_of=lambda entry: 4096 + entry.region.offset,
            on_room=self._count_room,
            on_unsent=lambda error: self.unsent.append(error.code),
        )
        self.entry = self._filled()

    def _filled(self) -> Entry:
        entry = self.cache.reserve("k", 16)
        assert entry is not None
        self.cache.publish(entry, FACTS)
        self.cache.unpin(entry)
        return entry

    async def _send(self, message: Message) -> None:
        self.sent.append(message)

    def _count_room(self) -> None:
        self.room += 1

    @property
    def pinned(self) -> int:
        """Bytes that may not be given away."""
        return self.arena.bytes_by_state()["pinned"]

    async def settle(self) -> None:
        """Let everything that can run, run."""
        for _ in range(10):
            await asyncio.sleep(0)


@pytest.fixture
async def world() -> AsyncIterator[World]:
    """Return a world whose pushes wait."""
    built = World()
    yield built
    await built.deliveries.close()


async def test_delivery_ends_with_done_and_bytes_let_go(world: World) -> None:
    """The front hears `done` with the transfer's id once the consumer has the bytes."""
    world.deliveries.begin("c", ASK, world.entry, "cached")
    await world.settle()
    assert (world.sent, world.pinned) == ([], 256)

    world.pusher.deliver()
    world.pusher.sources[0].on_free()
    await world.settle()

    expected = Done(rows=1, metadata={"image_grid_thw": [1, 2, 2]}, transfer_id="t2", source="cached")
    assert [message.parse(Done) for message in world.sent] == [expected]
    assert (world.pinned, len(world.deliveries)) == (0, 0)
    assert world.room > 0


async def test_what_a_consumer_has_not_answered_is_charged_to_it(world: World) -> None:
    """From being asked until it answers, or the delivery is over, a consumer owes an answer for the bytes."""
    world.deliveries.begin("c", ASK, world.entry, "cached")
    assert world.parking.silent_since("tcp://127.0.0.1:1") is not None
    await world.settle()

    answer = world.pusher.announced[0].on_answer
    assert answer is not None
    answer()
    answer()
    assert world.parking.silent_since("tcp://127.0.0.1:1") is None
    assert world.settled == ["tcp://127.0.0.1:1"]

    world.deliveries.announce("d", ASK, 16, (1, 4), "float32")
    world.deliveries.withdraw("d")
    assert world.settled == ["tcp://127.0.0.1:1"] * 2


async def test_bytes_stay_while_a_failed_write_may_still_read_them(world: World) -> None:
    """A push may fail long before its source is free: the bytes stay pinned until the pusher says so."""
    world.deliveries.begin("c", ASK, world.entry, "cached")
    await world.settle()

    world.pusher.end.set_exception(ConsumerFull("full"))
    await world.settle()

    assert world.sent[0].parse(ErrorBody).name == "ConsumerFull"
    assert world.pinned == 256
    world.pusher.sources[0].on_free()
    world.pusher.sources[0].on_free()
    assert world.pinned == 0


@pytest.mark.parametrize("started", [False, True], ids=["before it began", "while it pushes"])
async def test_cancelled_delivery_lets_its_bytes_go(world: World, started: bool) -> None:
    """A call that is left pins nothing, at whatever moment it is left; nobody is told."""
    world.deliveries.begin("c", ASK, world.entry, "cached")
    if started:
        await world.settle()

    world.deliveries.cancel("c")
    await world.settle()
    for source in world.pusher.sources:
        source.on_free()

    assert (world.pinned, world.sent, len(world.deliveries)) == (0, [], 0)


async def test_refused_announcement_fails_the_call(world: World) -> None:
    """A consumer with too much waiting is told as that, and nothing stays pinned."""
    world.pusher.refusal = Overloaded("too much", retry_after_s=1)

    with capture_logs() as logs:
        world.deliveries.announce("c", ASK, 16, (1, 4), "float32")
        world.deliveries.begin("c", ASK, world.entry, "encoded")
        await world.settle()

    assert world.sent[0].parse(ErrorBody).name == "Overloaded"
    assert (world.pinned, world.unsent) == (0, ["overloaded"])
    facts = {
        "transfer_id": "t",
        "consumer": ASK.consumer_zmq,
        "error_code": "overloaded",
        "reason": "too much",
    }
    assert [line for line in logs if facts.items() <= line.items()] == logs != []


@pytest.mark.parametrize("where", ["announce", "push"])
async def test_a_bug_in_a_delivery_costs_that_one(world: World, where: str) -> None:
    """What has no name is logged and answered as internal, once; nothing waits and nothing escapes."""
    if where == "announce":
        world.pusher.refusal = RuntimeError("a bug")
    else:
        world.pusher.end.set_exception(RuntimeError("a bug"))

    with capture_logs() as logs:
        world.deliveries.begin("c", ASK, world.entry, "cached")
        await world.settle()

    assert [(m.kind, m.parse(ErrorBody).name) for m in world.sent] == [("error", "InternalFailure")]
    assert [(line["event"], line["log_level"]) for line in logs] == [("push_failed", "error")]
    assert len(world.deliveries) == 0


async def test_space_is_asked_for_once(world: World) -> None:
    """What was announced while the tower ran is used, not announced again."""
    world.deliveries.announce("c", ASK, 16, (1, 4), "float32")
    world.deliveries.begin("c", ASK, world.entry, "encoded")
    await world.settle()

    assert len(world.pusher.announced) == 1
    assert len(world.deliveries._announced) == 0
    assert world.pusher.announced[0].shape == (1, 4)
    assert world.pusher.sources[0].address == 4096 + world.entry.region.offset


async def test_announced_space_is_given_back(world: World) -> None:
    """An item that fails, or is left, gives its consumer's space back."""
    world.deliveries.announce("a", ASK, 16, (1, 4), "float32")
    world.deliveries.announce("b", ASK, 16, (1, 4), "float32")

    world.deliveries.withdraw("a")
    world.deliveries.cancel("b")
    world.deliveries.cancel("b")

    assert world.pusher.aborted == 2


async def test_deliveries_are_bounded(world: World) -> None:
    """Beyond the bound the engine is told that no more are taken, also for cache hits."""
    for number in range(4):
        assert not world.deliveries.is_full
        world.deliveries.begin(f"c{number}", ASK, world.entry, "cached")

    assert world.deliveries.is_full


async def test_without_a_consumer_nothing_is_announced(world: World) -> None:
    """An item without a consumer is done as soon as it is there."""
    world.deliveries.begin("c", Ask(key="k", mm_hash="h"), world.entry, "encoded")
    await world.settle()

    assert [message.kind for message in world.sent] == ["done"]
    assert (world.pusher.announced, world.pinned) == ([], 0)


async def test_reply_may_come_before_the_push() -> None:
    """Where the reply does not wait, the front hears `done` at once, and nothing of the push's failure."""
    world = World(reply_after_push=False)
    world.deliveries.begin("c", ASK, world.entry, "encoded")
    await world.settle()
    assert [message.kind for message in world.sent] == ["done"]

    world.pusher.end.set_exception(ConsumerFull("full"))
    world.pusher.sources[0].on_free()
    await world.settle()

    assert [message.kind for message in world.sent] == ["done"]
    assert world.pinned == 0


async def test_absent_front_ends_nothing_badly() -> None:
    """A front that is gone cannot be told, and that is all: bytes are let go."""
    world = World()

    async def gone(message: Message) -> None:
        raise EngineUnavailable("gone")

    world.deliveries._send = gone
    world.deliveries.begin("c", Ask(key="k", mm_hash="h"), world.entry, "encoded")
    await world.settle()

    assert (world.pinned, len(world.deliveries)) == (0, 0)


async def test_a_place_that_all_items_go_to_needs_no_consumer() -> None:
    """Into a shared folder an item is delivered whoever asks, and its answer names no transfer."""
    world = World()
    world.deliveries._policy = DeliveryPolicy(reply_after_push=True, every_item=True)
    nobody = Ask(key="k", mm_hash="h")
    world.deliveries.begin("c", nobody, world.entry, "cached")
    await world.settle()
    assert world.sent == []

    outcome = TransferOutcome.DELIVERED
    world.pusher.end.set_result(
        PushResult(transfer_id=TransferId(""), outcome=outcome, nbytes_written=16, seconds=0.1)
    )
    world.pusher.sources[0].on_free()
    await world.settle()

    assert world.pusher.announced[0].mm_hash == "h"
    assert world.sent[0].parse(Done).transfer_id is None
    assert world.pinned == 0
    await world.deliveries.close()
