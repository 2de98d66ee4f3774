"""The data-parallel engines of an encode worker: where an item goes, and once more when that engine is lost.

Rules of this file: order of steps; `placement` decides. An item is tried on at most two engines. Only the
loss of an engine process is a reason for the second try: what an engine says about an item is final.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import msgspec
import structlog

from epdctl.errors import EngineUnavailable
from epdctl.metrics import WorkerMetrics
from epdctl.worker.encode.messages import ReadyFacts
from epdctl.worker.encode.placement import Placement
from epdctl.worker.supervisor import EngineCall, EngineState, EngineStatus, Supervisor

T = TypeVar("T")

Attempt = Callable[[EngineCall, bool], Awaitable[T]]
"""Takes an item through one call; the flag says that an engine which had the item before was lost."""


class EncodeEngines:
    """All engines of the worker; each has a cache, a single flight and a way to the consumers of its own."""

    def __init__(self, engines: Sequence[Supervisor], metrics: WorkerMetrics) -> None:
        self._engines = engines
        self._placement = Placement(len(engines))
        self._retries = metrics.retries.labels("encode", "engine_unavailable")
        self._log = structlog.get_logger()

    def loads(self) -> Sequence[int]:
        """Return how many items each engine has now."""
        return tuple(self._placement.loads)

    def facts(self) -> ReadyFacts:
        """Return what the engines said of their model; raises EngineUnavailable before the first is ready."""
        known = (status.facts for status in self._statuses() if status.facts)
        facts = next(known, None)
        if facts is None:
            raise self._engines[0].unavailable()
        return msgspec.convert(dict(facts), ReadyFacts)

    async def run(self, key: str, attempt: Attempt[T]) -> T:
        """Take an item of `key` through an engine, and through another one if the first is lost meanwhile.

        Raises:
            EngineUnavailable: no engine serves, or none but the lost one, or the second was lost as well.
            EpdError: what the engine said about the item.
        """
        engine = self._place(key)
        if engine is None:
            raise self._engines[0].unavailable()
        try:
            with self._leaving(key, engine):
                return await self._call(engine, attempt, is_retry=False)
        except EngineUnavailable:
            other = self._place(key, avoid=engine)
            if other is None:
                raise
        self._retries.inc()
        self._log.warning("item_retried", lost_engine=engine, engine=other)
        with self._leaving(key, other):
            return await self._call(other, attempt, is_retry=True)

    async def _call(self, engine: int, attempt: Attempt[T], *, is_retry: bool) -> T:
        async with self._engines[engine].call() as call:
            return await attempt(call, is_retry)

    def _place(self, key: str, avoid: int | None = None) -> int | None:
        return self._placement.place(key, self._serving(), avoid=avoid)

    @contextmanager
    def _leaving(self, key: str, engine: int) -> Iterator[None]:
        try:
            yield
        finally:
            self._placement.leave(key, engine)

    def _statuses(self) -> list[EngineStatus]:
        return [engine.status() for engine in self._engines]

    def _serving(self) -> list[bool]:
        """Return which engines take items: the ready ones; those in trouble only when there is no other."""
        statuses = self._statuses()
        ready = [status.state is EngineState.READY for status in statuses]
        well = [is_ready and status.reason is None for is_ready, status in zip(ready, statuses, strict=True)]
        return well if any(well) else ready
