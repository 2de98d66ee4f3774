"""Copies embeddings between the arena, host memory and the store's buffers, on one thread, in order.

    mover = Mover(memory)
    mover.demote(slot, region)              # arena -> slot
    await mover.settled()                   # every demotion asked for so far has been copied
    await mover.promote(slot, region)       # slot -> arena; false: the slot never got its rows
    await mover.fill(rows, region)          # the store's buffer -> arena

Copies run in the order in which they were asked for. So a promotion finds what an earlier demotion copied,
and writes only where everything that was evicted has been copied out. Whoever else writes into the arena
awaits `settled` after it reserved.

Rules of this file: moves bytes, decides nothing.
"""

from __future__ import annotations

import asyncio
import mmap

from epdctl.worker.encode.arena_memory import ArenaMemory, gather
from epdctl.worker.encode.call_thread import CallThread
from epdctl.worker.encode.dram import Slot
from epdctl.worker.transfer.arena import Region

_MAPPED_FROM = 128 * 1024


class Mover:
    """See the module."""

    def __init__(self, memory: ArenaMemory) -> None:
        self._memory = memory
        self._thread = CallThread("mover")
        self._demotion: asyncio.Future[bool] | None = None

    def demote(self, slot: Slot, region: Region) -> None:
        """Copy the rows of `region` into `slot`."""
        self._demotion = self._thread.submit(self._copy_out, slot, region).future

    async def settled(self) -> None:
        """Return when every demotion asked for so far has been copied."""
        await self._end_of(self._demotion)

    async def promote(self, slot: Slot, region: Region) -> bool:
        """Copy the rows of `slot` into `region`; return whether it had any. Not to be cancelled."""
        return await self._thread.submit(self._copy_in, slot, region).future

    async def fill(self, rows: memoryview, region: Region) -> None:
        """Copy `rows` into `region`. Not to be cancelled."""
        await self._thread.submit(self._memory.write, region.offset, rows).future

    def close(self) -> None:
        """Let the thread end."""
        self._thread.close()

    async def _end_of(self, future: asyncio.Future[bool] | None) -> None:
        if future is not None and not future.done():
            await asyncio.wait({future})

    def _copy_out(self, slot: Slot, region: Region) -> bool:
        """Give `slot` its rows; false (and no rows) when there is no memory for them."""
        try:
            rows = own_memory(region.nbytes)
        except (MemoryError, OSError):
            return False
        gather(self._memory.parts(region.offset, region.nbytes), rows)
        slot.rows = rows
        return True

    def _copy_in(self, slot: Slot, region: Region) -> bool:
        if slot.rows is None:
            return False
        self._memory.write(region.offset, slot.rows)
        return True


def own_memory(nbytes: int) -> memoryview:
    """Return new memory that goes back to the system with its last view.

    Of entries that come and go the heap keeps up to 1.4 times their bytes, a mapping each 1.06 times. For
    small ones a mapping is too dear, and a process has 65,530 of them at most (Linux).
    """
    if nbytes < _MAPPED_FROM:
        return memoryview(bytearray(nbytes))
    return memoryview(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
