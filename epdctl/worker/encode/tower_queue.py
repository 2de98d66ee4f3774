"""Feeds the tower: pixels wait here, batches run on the compute thread, rows end up in the cache.

Rules of this file: a batch runs only when there is arena space for all of its rows, so embeddings cannot
pile up without a place; space comes back when deliveries end. The oldest item goes first, however large; when
there has been no space for it for too long it ends, and those behind it have their turn. What runs is never
interrupted. An item that may not run now is parked: out of the way of all others until `unpark` puts it back
in its old order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

import structlog

from epdctl.errors import EncodeFailed, EpdError, MediaUnavailable
from epdctl.metrics import WorkerMetrics
from epdctl.worker.encode.arena_memory import ArenaMemory
from epdctl.worker.encode.cache import EmbeddingCache, Entry, Facts
from epdctl.worker.encode.forward import Job, run_batch
from epdctl.worker.encode.layout import ItemLayout
from epdctl.worker.encode.room import RoomWait, no_room
from epdctl.worker.encode.scheduler import Scheduler
from epdctl.worker.encode.vision import Tower

UNHEALTHY_AFTER_FAILURES = 3
SELF_TEST_INTERVAL_S = 2.0
STUCK_AFTER_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """Pixels of one item: float32 values as bytes, their layout.

    `since` is the loop's time of their arrival, `wanted` of when the item was first asked for.
    """

    pixels: memoryview
    layout: ItemLayout
    since: float
    wanted: float


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueEvents:
    """Who is told: `running` (keys, rows) before a forward, `landed` with each result.

    `may_run` is asked before a batch, and `settled` is awaited before anything is written where it reserved.
    `new_gate` gives what says of one batch's items (key, bytes) whether they may run; the others are parked,
    and `parked` is told that some were.
    """

    running: Callable[[Sequence[tuple[str, int]]], None]
    landed: Callable[[str, Entry | EpdError], None]
    may_run: Callable[[], bool]
    settled: Callable[[], Awaitable[None]]
    new_gate: Callable[[], Callable[[str, int], bool]] = lambda: lambda key, nbytes: True
    parked: Callable[[], None] = lambda: None


class TowerQueue:
    """The waiting items and the loop that runs them; `run` is its only task."""

    def __init__(
        self,
        tower: Tower,
        thread: Executor,
        memory: ArenaMemory,
        cache: EmbeddingCache,
        scheduler: Scheduler,
        metrics: WorkerMetrics,
        events: QueueEvents,
        *,
        room_wait_s: float,
    ) -> None:
        """`room_wait_s`: how long there may be no arena space for an item."""
        self._tower = tower
        self._thread = thread
        self._memory = memory
        self._cache = cache
        self._scheduler = scheduler
        self._metrics = metrics
        self._events = events
        self._waiting: dict[str, Waiting] = {}
        self._changed = asyncio.Event()
        self._failures = 0
        self._busy_since: float | None = None
        self._log = structlog.get_logger()
        self._parked: dict[str, None] = {}
        self._room = RoomWait(cache.largest, room_wait_s)
        self._look_at: float | None = None
        self.pixel_bytes = 0
        """Bytes of the pixels that wait for the tower or are in it; what is parked is not among them."""

    def add(self, key: str, pixels: memoryview, layout: ItemLayout, *, wanted: float | None = None) -> None:
        """Queue an item that is asked for since `wanted` (the loop's time; None: now).

        Raises:
            EncodeFailed: the pixels are not those of the layout, or the layout is none of this tower's.
            MediaUnavailable: its rows are larger than the whole cache.
        """
        self._check(pixels, layout)
        now = asyncio.get_running_loop().time()
        wanted = now if wanted is None else wanted
        self._waiting[key] = Waiting(pixels=pixels, layout=layout, since=now, wanted=wanted)
        self.pixel_bytes += pixels.nbytes
        self._scheduler.add(key, layout.rows, layout.forward_group)
        self._changed.set()

    def _check(self, pixels: memoryview, layout: ItemLayout) -> None:
        if pixels.nbytes != layout.pixel_nbytes or not self._tower.takes(layout):
            text = f"{pixels.nbytes} bytes of pixels do not belong to {layout.rows} rows of this tower"
            raise EncodeFailed(f"{text} (shape {list(layout.pixel_shape)}, geometry {list(layout.geometry)})")
        nbytes = self._tower.nbytes_of(layout.rows)
        if not self._cache.fits(nbytes):
            text = f"the {layout.modality}'s embedding of {nbytes} bytes is larger than the embedding cache"
            raise MediaUnavailable(f"{text} (--cache-bytes)")

    def remove(self, key: str) -> None:
        """Forget an item that nobody wants any more; one that runs already is let run."""
        if key in self._parked:
            del self._parked[key]
            del self._waiting[key]
        elif self._scheduler.remove(key):
            self._let_go(key)

    def unpark(self, keys: Iterable[str]) -> None:
        """Put parked items back to the front, in the order in which they came."""
        back = sorted((key for key in keys if key in self._parked), key=lambda key: self._waiting[key].since)
        for key in back:
            del self._parked[key]
            self.pixel_bytes += self._waiting[key].pixels.nbytes
        self._put_back(back)
        self._changed.set()

    def wake(self) -> None:
        """Say that something changed: arena space came back, or a delivery ended."""
        self._changed.set()

    def trouble(self) -> str | None:
        """Return why the tower cannot be relied on now, or None."""
        if self._failures >= UNHEALTHY_AFTER_FAILURES:
            return f"the vision tower failed {self._failures} times in a row"
        if self._busy_since is not None:
            busy_s = asyncio.get_running_loop().time() - self._busy_since
            if busy_s > STUCK_AFTER_S:
                return f"the vision tower has been in one batch for {busy_s:.0f} s"
        return None

    async def run(self) -> None:
        """Run batches until cancelled."""
        while True:
            await self._await_change()
            self._changed.clear()
            self._look_at = None
            while self._events.may_run() and (batch := self._reserve_batch()):
                await self._run_batch(batch)

    async def _await_change(self) -> None:
        """Wait for work, or until an item has had no room for too long.

        A tower in trouble is tested meanwhile, since no traffic may come to heal it.
        """
        is_in_trouble = self._failures >= UNHEALTHY_AFTER_FAILURES
        timeouts = [SELF_TEST_INTERVAL_S] if is_in_trouble else []
        if self._look_at is not None:
            timeouts.append(max(0.0, self._look_at - asyncio.get_running_loop().time()))
        try:
            await asyncio.wait_for(self._changed.wait(), min(timeouts, default=None))
        except TimeoutError:
            if is_in_trouble:
                await self._self_test()

    async def _self_test(self) -> None:
        try:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._tower.self_test)
        except EncodeFailed:
            self._failures += 1
        else:
            self._failures = 0

    def _reserve_batch(self) -> list[tuple[str, Entry]]:
        """Return the next batch with its arena space; items without space go back to the front."""
        batch: list[tuple[str, Entry]] = []
        over: list[str] = []
        if self._room.is_watching:
            self._look_for_room()
        while not batch and (keys := self._next_keys()):
            batch = self._reserved(keys)
            self._put_back(keys[len(batch) :])
            if not batch:
                if not self._has_waited_too_long(keys[0]):
                    break
                self._scheduler.remove(keys[0])
                over.append(keys[0])
        self._end_without_room(over)
        return batch

    def _reserved(self, keys: Iterable[str]) -> list[tuple[str, Entry]]:
        batch: list[tuple[str, Entry]] = []
        for key in keys:
            entry = self._cache.reserve(key, self._nbytes(key))
            if entry is None:
                break
            batch.append((key, entry))
        return batch

    def _has_waited_too_long(self, key: str) -> bool:
        """Return whether there has been no room for the oldest item for too long; else look again then."""
        self._look_for_room()
        self._look_at = self._room.ends_at(self._nbytes(key), self._waiting[key].wanted)
        return asyncio.get_running_loop().time() >= self._look_at

    def _look_for_room(self) -> None:
        self._room.look(self._cache.reach(), asyncio.get_running_loop().time())

    def _end_without_room(self, keys: Sequence[str]) -> None:
        if not keys:
            return
        error = no_room()
        sizes = sorted(self._nbytes(key) for key in keys)
        facts = {"items": len(keys), "smallest_bytes": sizes[0], "largest_bytes": sizes[-1]}
        self._log.warning("arena_full", **facts, error_code=error.code, reason=error.message)
        for key in keys:
            self._let_go(key)
            self._events.landed(key, error)

    def _nbytes(self, key: str) -> int:
        return self._tower.nbytes_of(self._waiting[key].layout.rows)

    def _next_keys(self) -> tuple[str, ...]:
        """Return the items of the next batch, and park those that may not run."""
        gate = self._events.new_gate()
        parked: list[str] = []

        def takes(key: str, rows: int) -> bool:
            if gate(key, self._tower.nbytes_of(rows)):
                return True
            parked.append(key)
            return False

        keys = self._scheduler.next_batch(takes)
        for key in parked:
            self._parked[key] = None
            self.pixel_bytes -= self._waiting[key].pixels.nbytes
        if parked:
            self._events.parked()
        return keys

    def _put_back(self, keys: Iterable[str]) -> None:
        layouts = [(key, self._waiting[key].layout) for key in keys]
        self._scheduler.put_back([(key, layout.rows, layout.forward_group) for key, layout in layouts])

    async def _run_batch(self, batch: list[tuple[str, Entry]]) -> None:
        self._events.running([(key, self._waiting[key].layout.rows) for key, _ in batch])
        await self._events.settled()
        loop = asyncio.get_running_loop()
        self._busy_since = begun = loop.time()
        for key, _ in batch:
            self._metrics.encode_queue_seconds.observe(begun - self._waiting[key].since)
        jobs = [self._job(key, entry) for key, entry in batch]
        try:
            results = await loop.run_in_executor(self._thread, run_batch, self._tower, jobs)
        except Exception:  # noqa: BLE001 - the one supervisor of this loop: it costs the batch only
            self._log.exception("encode_batch_failed", items=len(batch))
            results = [EncodeFailed("the vision tower failed on this item")] * len(batch)
        finally:
            self._busy_since = None
        self._metrics.encode_batch_items.observe(len(batch))
        self._metrics.encode_seconds.observe(loop.time() - begun)
        for (key, entry), result in zip(batch, results, strict=True):
            self._land(key, entry, result)

    def _job(self, key: str, entry: Entry) -> Job:
        waiting = self._waiting[key]
        return Job(pixels=waiting.pixels, layout=waiting.layout, memory=self._memory, region=entry.region)

    def _land(self, key: str, entry: Entry, result: str | EncodeFailed) -> None:
        layout = self._waiting[key].layout
        self._let_go(key)
        if isinstance(result, EncodeFailed):
            self._failures += 1
            self._log.error("encode_failed", key=key, reason=result.message)
            self._cache.drop(entry)
            self._events.landed(key, result)
        else:
            self._failures = 0
            facts = Facts(
                rows=layout.rows,
                width=self._tower.width,
                dtype=self._tower.dtype,
                digest=result,
                metadata=layout.metadata,
            )
            self._cache.publish(entry, facts)
            self._events.landed(key, entry)
        # The writer's pin goes last: whoever waited has pinned the entry by now.
        self._cache.unpin(entry)

    def _let_go(self, key: str) -> None:
        waiting = self._waiting.pop(key)
        self.pixel_bytes -= waiting.pixels.nbytes
