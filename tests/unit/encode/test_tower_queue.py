"""The queue before the tower: nothing is written where an evicted embedding is still being copied out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from epdctl.errors import EpdError, Overloaded
from epdctl.metrics import WorkerMetrics
from epdctl.worker.encode.arena_memory import HostArena
from epdctl.worker.encode.cache import EmbeddingCache, Entry, Facts
from epdctl.worker.encode.layout import PATCHES, ItemLayout
from epdctl.worker.encode.mover import Mover
from epdctl.worker.encode.scheduler import BatchLimits, Scheduler
from epdctl.worker.encode.tiers import Tiers
from epdctl.worker.encode.tower_queue import QueueEvents, TowerQueue
from epdctl.worker.transfer.arena import Arena
from epdctl.worker.transfer.memory import HostMemory
from tests.stubs.process import wait_until
from tests.unit.encode.test_mover import GatedMemory

pytestmark = [pytest.mark.unit, pytest.mark.worker]

UNIT = 256
LAYOUT = ItemLayout(rows=1, pixel_shape=(4,), forward_group=PATCHES)


class FilledRows:
    """Outputs whose rows are all one byte."""

    def copy_rows(self, index: int, target: memoryview) -> None:
        """Write them."""
        target[:] = b"n" * target.nbytes


class FakeTower:
    """A tower whose every item gives one row of `UNIT` bytes."""

    width, dtype = 64, "float32"

    @property
    def fence(self) -> FakeTower:
        """Return what is waited for after a batch."""
        return self

    def wait(self) -> None:
        """Wait for nothing."""

    def takes(self, layout: ItemLayout) -> bool:
        """Take everything."""
        return True

    def nbytes_of(self, rows: int) -> int:
        """Bytes of an embedding."""
        return rows * UNIT

    def encode(self, items: Any) -> FilledRows:
        """Run at once."""
        return FilledRows()


async def test_a_batch_waits_for_what_it_evicted() -> None:
    """The tower writes into an evicted embedding's place only when its rows are safe in host memory."""
    memory = GatedMemory(UNIT)
    memory._view[:] = b"o" * UNIT
    mover = Mover(HostArena(memory))
    tiers = Tiers(Arena(UNIT), 4 * UNIT, demote=mover.demote, evicted=lambda tier, count: None)
    entry = tiers.cache.reserve("old", UNIT)
    assert entry is not None
    tiers.cache.publish(entry, Facts(rows=1, width=64, dtype="float32", digest="d", metadata={}))
    tiers.cache.unpin(entry)
    running: list[str] = []
    landed: list[Entry | EpdError] = []
    events = QueueEvents(
        running=lambda items: running.extend(key for key, _ in items),
        landed=lambda key, result: landed.append(result),
        may_run=lambda: True,
        settled=mover.settled,
    )
    tower: Any = FakeTower()
    view: Any = Ungated(memory)
    scheduler = Scheduler(BatchLimits(max_tokens=8, max_items=8))
    with ThreadPoolExecutor(1) as thread:
        # The tower's own view is not gated: only the copy of what was evicted stands still.
        queue = TowerQueue(
            tower, thread, HostArena(view), tiers.cache, scheduler, WorkerMetrics(), events, room_wait_s=60
        )
        task = asyncio.create_task(queue.run())
        queue.add("new", memoryview(bytearray(16)), LAYOUT)
        await wait_until(lambda: running == ["new"], "its arena space is taken")
        for _ in range(20):
            await asyncio.sleep(0.005)
            assert bytes(memory._view) == b"o" * UNIT and landed == []

        memory.gate.set()
        await wait_until(lambda: bool(landed), "encoded")
        task.cancel()
    mover.close()

    slot = tiers.dram.get("old")
    assert slot is not None and slot.rows == b"o" * UNIT
    assert bytes(memory._view) == b"n" * UNIT


class Ungated:
    """Views of a gated memory without its gate."""

    def __init__(self, memory: GatedMemory) -> None:
        self._memory = memory

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Return the bytes."""
        return self._memory._view[offset : offset + nbytes]


async def test_parked_items_stand_aside_and_come_back_in_order() -> None:
    """What the gate refuses neither runs nor counts as waiting pixels; unparked it runs in its old order,
    before what came later, and what is removed while parked is gone."""
    memory = GatedMemory(8 * UNIT)
    cache = Tiers(
        Arena(8 * UNIT), 0, demote=lambda slot, region: None, evicted=lambda tier, count: None
    ).cache
    running: list[str] = []
    refused = {"z", "y", "x"}
    may_run = [True]
    parked: list[int] = []

    async def settled() -> None:
        return None

    events = QueueEvents(
        running=lambda items: running.extend(key for key, _ in items),
        landed=lambda key, result: None,
        may_run=lambda: may_run[0],
        settled=settled,
        new_gate=lambda: lambda key, nbytes: key not in refused,
        parked=lambda: parked.append(1),
    )
    tower: Any = FakeTower()
    view: Any = Ungated(memory)
    scheduler = Scheduler(BatchLimits(max_tokens=8, max_items=8))
    with ThreadPoolExecutor(1) as thread:
        queue = TowerQueue(
            tower, thread, HostArena(view), cache, scheduler, WorkerMetrics(), events, room_wait_s=60
        )
        for key in "zyxd":
            queue.add(key, memoryview(bytearray(16)), LAYOUT)
        task = asyncio.create_task(queue.run())
        await wait_until(lambda: running == ["d"] and queue.pixel_bytes == 0, "the one that may run has run")
        assert parked

        may_run[0] = False
        queue.add("later", memoryview(bytearray(16)), LAYOUT)
        queue.remove("y")
        refused.clear()
        queue.unpark(["x", "y", "z", "unknown"])
        may_run[0] = True
        await wait_until(lambda: len(running) == 4 and queue.pixel_bytes == 0, "all have run")
        task.cancel()

    assert running == ["d", "z", "x", "later"]


async def test_without_arena_space_for_the_oldest_nothing_younger_runs() -> None:
    """A small item that would fit does not take the space for which a large one waits (hazard 22)."""
    memory = GatedMemory(4 * UNIT)
    cache = Tiers(
        Arena(4 * UNIT), 0, demote=lambda slot, region: None, evicted=lambda tier, count: None
    ).cache
    pushed = cache.reserve("pushed", 2 * UNIT)
    assert pushed is not None
    running: list[str] = []
    batches: list[int] = []

    async def settled() -> None:
        return None

    def new_gate() -> Callable[[str, int], bool]:
        batches.append(1)
        return lambda key, nbytes: True

    events = QueueEvents(
        running=lambda items: running.extend(key for key, _ in items),
        landed=lambda key, result: None,
        may_run=lambda: True,
        settled=settled,
        new_gate=new_gate,
    )
    tower: Any = FakeTower()
    view: Any = Ungated(memory)
    scheduler = Scheduler(BatchLimits(max_tokens=8, max_items=8))
    with ThreadPoolExecutor(1) as thread:
        queue = TowerQueue(
            tower, thread, HostArena(view), cache, scheduler, WorkerMetrics(), events, room_wait_s=60
        )
        queue.add("large", memoryview(bytearray(16)), msgspec.structs.replace(LAYOUT, rows=3))
        queue.add("small", memoryview(bytearray(16)), LAYOUT)
        task = asyncio.create_task(queue.run())
        await wait_until(lambda: bool(batches), "a batch was looked for")
        cache.drop(pushed)
        cache.unpin(pushed)
        queue.wake()
        await wait_until(lambda: queue.pixel_bytes == 0, "both have run")
        task.cancel()

    assert running == ["large", "small"]


class FullArena:
    """A queue before an arena of eight units, `pinned` of which are kept by deliveries."""

    def __init__(self, thread: ThreadPoolExecutor, *, pinned: int, room_wait_s: float) -> None:
        self.landed: dict[str, Entry | EpdError] = {}
        self.running: list[str] = []
        memory = HostMemory(8 * UNIT)
        self.cache = EmbeddingCache(Arena(8 * UNIT))
        entry = self.cache.reserve("pinned", pinned * UNIT)
        assert entry is not None
        self.pinned = entry
        tower: Any = FakeTower()
        self.queue = TowerQueue(
            tower,
            thread,
            HostArena(memory),
            self.cache,
            Scheduler(BatchLimits(max_tokens=8, max_items=8)),
            WorkerMetrics(),
            QueueEvents(
                running=lambda items: self.running.extend(key for key, _ in items),
                landed=self.landed.__setitem__,
                may_run=lambda: True,
                settled=self._settled,
            ),
            room_wait_s=room_wait_s,
        )
        self.task = asyncio.create_task(self.queue.run())

    async def _settled(self) -> None:
        return None

    def add(self, key: str, rows: int, **options: float) -> None:
        """Queue an item of so many units."""
        layout = msgspec.structs.replace(LAYOUT, rows=rows)
        self.queue.add(key, memoryview(bytearray(16)), layout, **options)

    def let_go(self) -> None:
        """The deliveries are over."""
        self.cache.drop(self.pinned)
        self.cache.unpin(self.pinned)
        self.queue.wake()

    async def until_landed(self, count: int) -> None:
        """Wait until so many items have ended."""
        await wait_until(lambda: len(self.landed) == count, f"{count} items have ended", 20.0)


async def test_what_finds_no_room_in_time_ends_and_makes_way() -> None:
    """The oldest item, for which there is no room, fails with 429 and its pixels are let go; the smaller one
    that waited behind it, as it must, has room and runs. One log line tells of it."""
    with ThreadPoolExecutor(1) as thread, capture_logs() as logs:
        arena = FullArena(thread, pinned=6, room_wait_s=0.3)
        arena.add("large", rows=3)
        arena.add("small", rows=2)
        await arena.until_landed(2)
        arena.task.cancel()

    assert isinstance(arena.landed["large"], Overloaded)
    assert "--cache-bytes" in arena.landed["large"].message
    assert isinstance(arena.landed["small"], Entry)
    assert arena.running == ["small"]
    assert arena.queue.pixel_bytes == 0
    assert [(line["event"], line["items"], line["largest_bytes"]) for line in logs] == [
        ("arena_full", 1, 3 * UNIT)
    ]


async def test_all_for_whom_there_is_no_room_end_together() -> None:
    """With an arena that is pinned whole nobody waits for the end of another: items of every size have had
    no room for as long as the oldest."""
    with ThreadPoolExecutor(1) as thread, capture_logs() as logs:
        arena = FullArena(thread, pinned=8, room_wait_s=0.5)
        for rows in (3, 1, 2):
            arena.add(f"item of {rows}", rows=rows)
        await arena.until_landed(3)
        arena.task.cancel()

    assert all(isinstance(result, Overloaded) for result in arena.landed.values())
    assert [(line["event"], line["items"]) for line in logs] == [("arena_full", 3)]
    assert arena.queue.pixel_bytes == 0


async def test_what_was_asked_for_long_ago_does_not_wait_anew() -> None:
    """An item whose pixels come late, since others before it waited for room, has waited with them."""
    with ThreadPoolExecutor(1) as thread:
        arena = FullArena(thread, pinned=8, room_wait_s=0.5)
        arena.add("first", rows=1)
        await arena.until_landed(1)
        arena.queue._room._timeout_s = 60.0
        now = asyncio.get_running_loop().time()
        arena.queue._room._most_since = [(0, now - 61.0)]
        arena.add("fresh", rows=1)
        arena.add("of old", rows=1, wanted=now - 61.0)
        for _ in range(5):
            await asyncio.sleep(0.01)
        assert set(arena.landed) == {"first"}, "the oldest in the queue is fresh, and waits"
        arena.queue.remove("fresh")
        arena.queue.wake()
        await arena.until_landed(2)
        arena.task.cancel()

    assert isinstance(arena.landed["of old"], Overloaded)


async def test_room_in_time_is_used() -> None:
    """Space that comes back before the end is the oldest item's, and nobody fails."""
    with ThreadPoolExecutor(1) as thread, capture_logs() as logs:
        arena = FullArena(thread, pinned=8, room_wait_s=60.0)
        for key in ("a", "b"):
            arena.add(key, rows=5)
        await wait_until(lambda: arena.queue._room.is_watching, "there is no room", 20.0)
        arena.let_go()
        await arena.until_landed(2)
        arena.task.cancel()

    assert all(isinstance(result, Entry) for result in arena.landed.values())
    assert logs == []
