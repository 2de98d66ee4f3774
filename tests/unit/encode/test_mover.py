"""The mover: bytes out of the arena and back, in order, owned by whoever holds them."""

from __future__ import annotations

import mmap
import threading
from pathlib import Path

import pytest

from epdctl.worker.encode.arena_memory import HostArena, copy
from epdctl.worker.encode.cache import Facts
from epdctl.worker.encode.call_thread import CallThread
from epdctl.worker.encode.dram import Slot
from epdctl.worker.encode.mover import Mover
from epdctl.worker.encode.tiers import Tiers
from epdctl.worker.transfer.arena import Arena, Region
from epdctl.worker.transfer.memory import HostMemory

pytestmark = pytest.mark.unit

MIB = 2**20
FACTS = Facts(rows=1, width=4, dtype="float32", digest="d", metadata={})


class GatedMemory(HostMemory):
    """Memory whose views wait for a gate: the mover's thread stands still until it opens."""

    def __init__(self, nbytes: int) -> None:
        super().__init__(nbytes)
        self.gate = threading.Event()

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Wait, then return the bytes."""
        self.gate.wait(10)
        return super().view(offset, nbytes)


def slot_of(nbytes: int) -> Slot:
    """Return an empty slot."""
    return Slot("k", nbytes, FACTS)


async def test_settled_waits_for_what_was_evicted() -> None:
    """A writer that waits for `settled` finds the evicted bytes copied out before it writes."""
    memory = GatedMemory(4096)
    memory._view[:4] = b"old!"
    mover = Mover(HostArena(memory))
    slot = slot_of(4)

    mover.demote(slot, Region(0, 4, 256, 1))
    assert slot.rows is None
    memory.gate.set()
    await mover.settled()

    assert slot.rows == b"old!"
    mover.close()


async def test_a_promotion_comes_after_the_demotions_before_it() -> None:
    """A slot that is promoted before it got its rows gets them first."""
    memory = HostMemory(4096)
    memory.view(0, 4)[:] = b"rows"
    mover = Mover(HostArena(memory))
    slot = slot_of(4)

    mover.demote(slot, Region(0, 4, 256, 1))
    assert await mover.promote(slot, Region(256, 4, 256, 2))

    assert memory.view(256, 4) == b"rows"
    mover.close()


async def test_a_slot_without_rows_is_no_promotion() -> None:
    """A slot that never got its rows (there was no memory) is told, and the arena is left alone."""
    memory = HostMemory(4096)
    memory.view(256, 4)[:] = b"keep"
    mover = Mover(HostArena(memory))

    assert not await mover.promote(slot_of(4), Region(256, 4, 256, 2))
    assert memory.view(256, 4) == b"keep"
    mover.close()


@pytest.mark.parametrize(("count", "nbytes"), [(128, 64 * 1024), (16, 4 * MIB)])
async def test_one_entry_of_a_batch_holds_its_own_bytes_only(count: int, nbytes: int) -> None:
    """Of many embeddings made together one is kept: the memory in use is that of one, small or large."""
    memory = HostMemory(count * nbytes)
    mover = Mover(HostArena(memory))
    tiers = Tiers(Arena(count * nbytes), nbytes, demote=mover.demote, evicted=lambda tier, count: None)
    for number in range(count):
        entry = tiers.cache.reserve(f"batch{number}", nbytes)
        assert entry is not None
        tiers.cache.publish(entry, FACTS)
        tiers.cache.unpin(entry)
    before = live_bytes()

    assert tiers.cache.reserve("large", count * nbytes) is not None
    await mover.settled()
    live = live_bytes() - before
    mover.close()

    slots = list(tiers.dram._slots.values())
    assert tiers.dram.nbytes == nbytes == sum(slot.rows.nbytes for slot in slots if slot.rows is not None)
    assert live < 3 * nbytes + MIB, "the others are gone"


def live_bytes() -> int:
    """Return this process's resident bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_copying_past_the_end_is_refused() -> None:
    """Rows that do not fit where they should go are an error, not a write behind the end."""
    with pytest.raises(ValueError, match="do not fit"):
        copy(memoryview(bytearray(5)), memoryview(bytearray(4)))


class TestCallThread:
    """Calls in order on a thread that nobody waits for."""

    async def test_results_and_failures_come_back(self) -> None:
        """A call's result, and what it raised, reach whoever waits; the next call runs all the same."""
        thread = CallThread("t")

        assert await thread.submit(divmod, 7, 2).future == (3, 1)
        with pytest.raises(ZeroDivisionError):
            await thread.submit(divmod, 7, 0).future
        assert await thread.submit(len, "abc").future == 3
        thread.close()

    async def test_a_call_that_has_not_begun_can_be_taken_back(self) -> None:
        """Behind a hanging call a later one can be given up, and never runs; the hanging one cannot."""
        thread = CallThread("t")
        gate, ran = threading.Event(), []
        began = threading.Event()

        def hang() -> None:
            began.set()
            gate.wait(10)

        hanging = thread.submit(hang)
        later = thread.submit(ran.append, 1)
        assert began.wait(10)

        assert later.give_up()
        assert not hanging.give_up()
        gate.set()
        await thread.submit(len, "").future
        assert ran == []
        thread.close()
