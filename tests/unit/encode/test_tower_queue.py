"""The queue before the tower: nothing is written where an evicted embedding is still being copied out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest

from epdctl.errors import EpdError
from epdctl.metrics import WorkerMetrics
from epdctl.worker.encode.arena_memory import HostArena
from epdctl.worker.encode.cache import Entry, Facts
from epdctl.worker.encode.layout import PATCHES, ItemLayout
from epdctl.worker.encode.mover import Mover
from epdctl.worker.encode.scheduler import BatchLimits, Scheduler
from epdctl.worker.encode.tiers import Tiers
from epdctl.worker.encode.tower_queue import QueueEvents, TowerQueue
from epdctl.worker.transfer.arena import Arena
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
        queue = TowerQueue(tower, thread, HostArena(view), tiers.cache, scheduler, WorkerMetrics(), events)
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
        queue = TowerQueue(tower, thread, HostArena(view), cache, scheduler, WorkerMetrics(), events)
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
        queue = TowerQueue(tower, thread, HostArena(view), cache, scheduler, WorkerMetrics(), events)
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
