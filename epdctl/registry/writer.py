"""Brings the store in line with the registry, one instance at a time and in order.

Rules of this file: writes happen on one task, so an event never waits for a disk; who needs to know that a
change is on disk waits for `written`. A store that fails is logged; it stops neither routing nor
registration.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from epdctl.domain import InstanceUrl
from epdctl.registry.store import RegistryStore, StoredInstance, StoreFailed

Lookup = Callable[[InstanceUrl], StoredInstance | None]
_CLOSE_TIMEOUT_S = 5.0


class StoreWriter:
    """Owns the writing task; `lookup` gives what is to be kept under a URL now, None for nothing."""

    def __init__(self, store: RegistryStore, lookup: Lookup) -> None:
        self._store = store
        self._lookup = lookup
        self._queue: asyncio.Queue[InstanceUrl] = asyncio.Queue()
        self._writes: dict[InstanceUrl, asyncio.Future[bool]] = {}
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to write what was and will be noted."""
        self._task = asyncio.create_task(self._run(), name="store-writer")

    def note(self, url: InstanceUrl) -> None:
        """Say that what is kept under `url` is out of date."""
        if url not in self._writes:
            self._writes[url] = asyncio.get_running_loop().create_future()
            self._queue.put_nowait(url)

    async def written(self, url: InstanceUrl) -> bool:
        """Wait until nothing noted about `url` is left to write; False when the store failed."""
        write = self._writes.get(url)
        return True if write is None else await asyncio.shield(write)

    async def close(self) -> None:
        """Write what is left, within a deadline, and end the task."""
        if self._task is None:
            return
        try:
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                await self._queue.join()
        except TimeoutError:
            structlog.get_logger().error("store_failed", error="writes were left at the end")
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            url = await self._queue.get()
            # Popped before the look-up: a change from here on is a new write.
            done = self._writes.pop(url)
            is_written = False
            try:
                is_written = await self._write(url)
            except Exception:  # noqa: BLE001 - the supervisor of this loop: whoever waits for a write must hear of it
                structlog.get_logger().exception("store_failed", instance=url)
            finally:
                done.set_result(is_written)
                self._queue.task_done()

    async def _write(self, url: InstanceUrl) -> bool:
        kept = self._lookup(url)
        try:
            if kept is None:
                await self._store.delete(url)
            else:
                await self._store.save(kept)
        except StoreFailed as error:
            structlog.get_logger().error("store_failed", instance=url, error=str(error))
            return False
        return True
