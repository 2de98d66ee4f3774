"""The third tier of the embedding cache: a store that all encode workers share, and that may fail at any
time.

    shared = SharedTier(client, policy, metrics, source)
    await shared.start()            # gives the store a moment to answer; it need not
    await shared.look(key)          # -> StoredValue or None, within the deadline, never a failure
    shared.publish(key)             # some time, if the store is up and the backlog has room
    await shared.close()

While the store is down nothing is asked of it but whether it is back, with growing pauses, and not by
requests. Reads and writes have a thread each, so that a slow write delays no look-up.

Rules of this file: no failure of the store leaves this file, and none is logged but a change of its state.
A publication holds arena memory only while its rows are copied.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol, TypeVar

import structlog

from epdctl.metrics import WorkerMetrics
from epdctl.worker.duties import repeated
from epdctl.worker.encode.arena_memory import gather
from epdctl.worker.encode.breaker import Breaker
from epdctl.worker.encode.cache import Facts
from epdctl.worker.encode.call_thread import Call, CallThread
from epdctl.worker.encode.store import PutOutcome, StoreDown, StoredValue
from epdctl.worker.encode.store_value import header_of
from epdctl.worker.transfer.mooncake import TransferSetupFailed

T = TypeVar("T")


class SharedStore(Protocol):
    """What is needed of `store.StoreClient`."""

    def connect(self) -> None:
        """See there."""
        ...

    def get(self, key: str) -> StoredValue | None:
        """See there."""
        ...

    def put(self, key: str, value: bytearray) -> PutOutcome:
        """See there."""
        ...

    def close(self) -> None:
        """See there."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPolicy:
    """Seconds for a look-up, a publication, the first connection and leaving; keys in the backlog."""

    look_s: float
    publish_s: float = 5.0
    first_connect_s: float = 2.0
    close_s: float = 3.0
    backlog: int = 256
    retry_first_s: float = 0.5
    retry_most_s: float = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PinnedRows:
    """Rows in the arena that stay until `release`: `nbytes` in all, in `parts`."""

    facts: Facts
    nbytes: int
    parts: Iterable[memoryview]
    release: Callable[[], None]


class SharedTier:
    """See the module."""

    def __init__(
        self,
        store: SharedStore,
        policy: SharedPolicy,
        metrics: WorkerMetrics,
        source: Callable[[str], PinnedRows | None],
    ) -> None:
        """`source(key)` pins the rows of an embedding in the arena; None when they are not there any more."""
        self._store = store
        self._policy = policy
        self._metrics = metrics
        self._source = source
        self._breaker = Breaker(first_s=policy.retry_first_s, most_s=policy.retry_most_s)
        self._reading = CallThread("store-read")
        self._writing = CallThread("store-write")
        self._backlog: OrderedDict[str, None] = OrderedDict()
        self._published = asyncio.Event()
        self._went_down = asyncio.Event()
        self._tried = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._log = structlog.get_logger()

    @property
    def is_up(self) -> bool:
        """Whether the store answered when it was last asked."""
        return self._breaker.is_up

    async def start(self) -> None:
        """Connect, waiting for that only a moment."""
        self._went_down.set()
        loops = {"store connection": self._reconnect, "store publications": self._publish_all}
        self._tasks = [asyncio.create_task(repeated(work, name=name)) for name, work in loops.items()]
        with suppress(TimeoutError):
            await asyncio.wait_for(self._tried.wait(), self._policy.first_connect_s)

    async def close(self) -> None:
        """Stop, and leave the store if it answers; once."""
        tasks, self._tasks = self._tasks, []
        if not tasks:
            return
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self.is_up:
            with suppress(StoreDown, TimeoutError):
                await self._within(self._reading.submit(self._store.close), self._policy.close_s)
        self._reading.close()
        self._writing.close()

    async def look(self, key: str) -> StoredValue | None:
        """Return the value of `key`, or None: not there, not right, or not now."""
        if not self.is_up:
            return self._looked("skipped")
        call = self._reading.submit(self._store.get, key)
        try:
            value = await self._within(call, self._policy.look_s)
        except TimeoutError:
            return self._looked("late")
        except StoreDown as error:
            self._fail(str(error))
            return self._looked("failed")
        return self._looked("miss") if value is None else self._looked("hit", value)

    def _looked(self, result: str, value: StoredValue | None = None) -> StoredValue | None:
        self._metrics.cache_requests.labels("l3", result).inc()
        return value

    def publish(self, key: str) -> None:
        """Have the embedding of `key` written to the store, if that is possible soon."""
        if not self.is_up:
            self._count("skipped")
        elif len(self._backlog) >= self._policy.backlog:
            self._count("dropped")
        else:
            self._backlog[key] = None
            self._published.set()

    def _count(self, outcome: str) -> None:
        self._metrics.store_publications.labels(outcome).inc()

    async def _within(self, call: Call[T], deadline_s: float) -> T:
        """Return what `call` returns; TimeoutError after `deadline_s`, and a call that hangs is an outage."""
        try:
            done, _ = await asyncio.wait({call.future}, timeout=deadline_s)
        except asyncio.CancelledError:
            call.give_up()
            raise
        if done:
            return call.future.result()
        if not call.give_up():
            call.future.add_done_callback(lambda future: future.cancelled() or future.exception())
            self._fail(f"no answer within {deadline_s:g} s")
        raise TimeoutError

    def _fail(self, reason: str) -> None:
        if self._breaker.failed(asyncio.get_running_loop().time()):
            self._log.warning("store_down", reason=reason)
            self._went_down.set()

    async def _reconnect(self) -> None:
        """Try to reach the store while it is down."""
        while True:
            await self._went_down.wait()
            await asyncio.sleep(max(0.0, self._breaker.retry_at - asyncio.get_running_loop().time()))
            try:
                # However long it takes: the thread does nothing else meanwhile, and requests do not wait.
                await self._reading.submit(self._store.connect).future
            except (StoreDown, TransferSetupFailed) as error:
                self._breaker.failed(asyncio.get_running_loop().time())
                if not self._tried.is_set():
                    self._log.warning("store_down", reason=str(error))
            else:
                self._went_down.clear()
                self._breaker.succeeded()
                self._log.info("store_up")
            self._tried.set()

    async def _publish_all(self) -> None:
        while True:
            await self._published.wait()
            while self._backlog:
                key, _ = self._backlog.popitem(last=False)
                self._count(await self._publish_one(key) if self.is_up else "skipped")
            self._published.clear()

    async def _publish_one(self, key: str) -> str:
        pinned = self._source(key)
        if pinned is None:
            return "evicted"
        copied = self._writing.submit(_value_of, key, pinned).future
        copied.add_done_callback(lambda _: pinned.release())
        await asyncio.wait({copied})
        put = self._writing.submit(self._store.put, key, copied.result())
        try:
            return (await self._within(put, self._policy.publish_s)).value
        except TimeoutError:
            return "late"
        except StoreDown as error:
            self._fail(str(error))
            return "failed"


def _value_of(key: str, pinned: PinnedRows) -> bytearray:
    """Return the value to store, which owns its bytes."""
    header = header_of(key, pinned.nbytes, pinned.facts)
    value = bytearray(len(header) + pinned.nbytes)
    value[: len(header)] = header
    gather(pinned.parts, memoryview(value)[len(header) :])
    return value
