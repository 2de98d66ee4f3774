"""The registry at work: reads the clock, applies commands, and tells everybody what has happened.

Rules of this file:
- Commands are applied synchronously and take microseconds; whatever waits (the store, a drain) waits outside.
- Each event goes once to the sink (one log line, one counter), to the store's writer and to each listener.
- It implements the proxy's `RoutingPort`; the proxy never sees the registry itself.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Sequence

import structlog

from epdctl.domain import InstanceSpec, InstanceUrl, Observation
from epdctl.metrics import ControlMetrics
from epdctl.registry.addresses import complaint
from epdctl.registry.commands import (
    Acquire,
    Command,
    Drain,
    Event,
    EventKind,
    Observe,
    Outcome,
    Register,
    Release,
    RemovalCause,
    Tick,
)
from epdctl.registry.record import InstanceView
from epdctl.registry.registry import Registry
from epdctl.registry.sink import EventSink
from epdctl.registry.snapshot import Member, Roster
from epdctl.registry.store import RegistryStore, StoredInstance, StoreFailed
from epdctl.registry.topology import Service, find_conflict, judge_service
from epdctl.registry.writer import StoreWriter

_STORED_KINDS = frozenset({EventKind.REGISTERED, EventKind.UPDATED, EventKind.REMOVED})

Listener = Callable[[Event], None]
Clock = Callable[[], float]


class RegistryDriver:
    """One registry with its clock, sink, store and timers; lives on one event loop."""

    def __init__(
        self, registry: Registry, store: RegistryStore, metrics: ControlMetrics, clock: Clock
    ) -> None:
        self._registry = registry
        self._store = store
        self._writer = StoreWriter(store, self._kept)
        self._sink = EventSink(metrics)
        self._clock = clock
        self._listeners: list[Listener] = []
        self._drains: dict[InstanceUrl, list[asyncio.Future[RemovalCause]]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._service: tuple[Roster, Service] | None = None

    # --- the proxy's view (RoutingPort) --------------------------------------------------------------------

    def roster(self) -> Roster:
        """Return the present roster; the same object until the registry changes."""
        return self._registry.roster()

    def in_flight(self, url: InstanceUrl) -> int:
        """Return how many calls are in flight on `url`."""
        return self._registry.in_flight(url)

    def acquire(self, member: Member) -> None:
        """Count one call more on `member`."""
        self.apply(Acquire(url=member.url, generation=member.generation))

    def release(self, member: Member) -> None:
        """Count one call less on `member`; a drain that waited for it ends here."""
        self.apply(Release(url=member.url, generation=member.generation))

    def observe(self, member: Member, observation: Observation) -> None:
        """Take evidence from traffic about `member`."""
        self.apply(Observe(url=member.url, generation=member.generation, observation=observation))

    # --- the control plane's view --------------------------------------------------------------------------

    def apply(self, command: Command) -> Outcome:
        """Apply `command` now, publish its events, and return them; raises what the registry raises."""
        outcome = self._registry.apply(command, self._clock())
        if outcome.events:
            self._publish(outcome.events)
        elif isinstance(command, Drain):
            # A drain asked for again moves its deadline without an event.
            self._set_timer()
        return outcome

    def find(self, url: InstanceUrl) -> InstanceView | None:
        """Return a copy of the record of `url`."""
        return self._registry.find(url, self._clock())

    def views(self) -> tuple[InstanceView, ...]:
        """Return copies of all records, in the order of registration."""
        return self._registry.views(self._clock())

    def service(self) -> Service:
        """Say whether a request with media can be served now; judged once for each roster."""
        roster = self.roster()
        if self._service is None or self._service[0] is not roster:
            self._service = (roster, judge_service(roster.members, roster.topology))
        return self._service[1]

    def now(self) -> float:
        """Return the registry's time, in monotonic seconds."""
        return self._clock()

    def listen(self, listener: Listener) -> None:
        """Call `listener` with each event from now on, in order."""
        self._listeners.append(listener)

    # --- life cycle ----------------------------------------------------------------------------------------

    async def start(self, static: Sequence[InstanceSpec]) -> None:
        """Register the `static` instances, then what the store kept, as pending; then follow changes.

        Raises:
            StoreFailed: the store cannot be opened or read, or a record contradicts a static instance.
        """
        await self._store.open()
        for spec in static:
            self.apply(Register(spec=spec))
        named = {spec.url for spec in static}
        for kept in await self._store.load():
            if (wrong := complaint(kept.spec)) is not None:
                # Taken by an older release; it could neither be reached nor be named in a removal.
                structlog.get_logger().warning(
                    "stored_instance_dropped", instance=kept.spec.url, reason=wrong
                )
                await self._store.delete(kept.spec.url)
                continue
            refuse_contradiction(kept.spec, static)
            if kept.spec.url not in named:
                self.apply(Register(spec=kept.spec, generation=kept.generation))
        self._writer.start()

    async def close(self) -> None:
        """Write what is left, and end timers and tasks; drains that wait are cancelled."""
        if self._timer is not None:
            self._timer.cancel()
        for waiters in self._drains.values():
            for waiter in waiters:
                waiter.cancel()
        await self._writer.close()
        await self._store.close()

    async def stored(self, url: InstanceUrl) -> bool:
        """Wait until the store knows what the registry knows about `url`; False when it failed."""
        return await self._writer.written(url)

    async def drained(self, url: InstanceUrl) -> RemovalCause:
        """Wait until the draining instance `url` has left, and return why; its drain's deadline bounds it."""
        waiter: asyncio.Future[RemovalCause] = asyncio.get_running_loop().create_future()
        waiters = self._drains.setdefault(url, [])
        waiters.append(waiter)
        try:
            return await waiter
        finally:
            waiters.remove(waiter)
            if not waiters:
                self._drains.pop(url, None)

    # --- publishing ----------------------------------------------------------------------------------------

    def _publish(self, events: Sequence[Event]) -> None:
        for event in events:
            self._sink.publish(event)
            if event.kind in _STORED_KINDS and not self._is_static(event.url):
                self._writer.note(event.url)
            if event.kind is EventKind.REMOVED:
                self._end_drains(event)
            for listener in self._listeners:
                listener(event)
        self._set_timer()

    def _end_drains(self, event: Event) -> None:
        for waiter in self._drains.get(event.url, ()):
            if not waiter.done():
                waiter.set_result(event.cause or RemovalCause.REMOVED)

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        due = self._registry.next_due()
        if due is None:
            self._timer = None
            return
        self._timer = asyncio.get_running_loop().call_later(
            max(0.0, due - self._clock()), self._tick, context=contextvars.Context()
        )

    def _tick(self) -> None:
        self._timer = None
        if not self.apply(Tick()).events:
            # Woken a hair too early: the loop's clock and ours differ.
            self._set_timer()

    def _is_static(self, url: InstanceUrl) -> bool:
        view = self.find(url)
        return view is not None and view.spec.static

    def _kept(self, url: InstanceUrl) -> StoredInstance | None:
        view = self.find(url)
        return None if view is None else StoredInstance(spec=view.spec, generation=view.generation)


def refuse_contradiction(kept: InstanceSpec, static: Sequence[InstanceSpec]) -> None:
    """Raise StoreFailed, naming both, when a stored instance cannot stand beside the static ones."""
    for spec in static:
        same = spec.url == kept.url
        if (same and spec.role is not kept.role) or (not same and find_conflict(kept.role, (spec.role,))):
            raise StoreFailed(
                f"the stored instance {kept.url} ({kept.role}) contradicts the static instance {spec.url} "
                f"({spec.role}): change the static flags, or give another store with --store"
            )
