"""Probes every instance on its own timer.

Rules of this file:
- One task an instance, so that at most one probe of it is in flight and a slow one delays nobody else; a
  semaphore bounds how many probes run at once.
- The tasks follow the registry's events: they begin with a registration and end with a drain or a removal.
- A result carries the generation that was asked about; the registry drops it when that is gone.
- Order of a probe: health, then models if they are due, then one report with both, so that an instance is
  never ready before it is known what it serves.
"""

from __future__ import annotations

import asyncio
import contextvars
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog

from epdctl.domain import InstanceState, InstanceUrl, ProbeOutcome
from epdctl.health.prober import Prober, ProbeResult
from epdctl.health.schedule import SchedulePolicy, next_due, spread_first
from epdctl.metrics import ControlMetrics
from epdctl.registry.commands import Event, EventKind, ProbeReport
from epdctl.registry.driver import RegistryDriver
from epdctl.registry.record import InstanceView
from epdctl.registry.states import PROBED_STATES

MAX_CONCURRENT_PROBES = 256
_MODELS_REFRESH_S = 60.0


@dataclass(slots=True)
class _Watch:
    """One instance's task, what wakes it, and who waits for its next result.

    `forgiven` failures in a row came before somebody last asked for a probe: the pauses grow with later ones.
    """

    wake: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None
    waiters: list[asyncio.Future[None]] = field(default_factory=list)
    running_generation: int | None = None
    models_generation: int | None = None
    models_due: float = 0.0
    is_first: bool = True
    asked: bool = False
    counts_from: float = 0.0
    forgiven: int = 0


class HealthLoop:
    """Owns the probe tasks; `draw` gives random numbers in [0, 1) for the phases."""

    def __init__(
        self,
        driver: RegistryDriver,
        prober: Prober,
        policy: SchedulePolicy,
        fail_threshold: int,
        metrics: ControlMetrics,
        draw: Callable[[], float],
    ) -> None:
        self._driver = driver
        self._prober = prober
        self._policy = policy
        self._fail_threshold = fail_threshold
        self._metrics = metrics
        self._draw = draw
        self._slots = asyncio.Semaphore(MAX_CONCURRENT_PROBES)
        self._watches: dict[InstanceUrl, _Watch] = {}

    def start(self) -> None:
        """Watch what is registered, and follow what happens from here on."""
        self._driver.listen(self._on_event)
        for view in self._driver.views():
            if view.state in PROBED_STATES:
                self._begin(view.spec.url)

    async def close(self) -> None:
        """End all tasks."""
        tasks = [watch.task for watch in self._watches.values() if watch.task is not None]
        for url in list(self._watches):
            self._end(url)
        await asyncio.gather(*tasks, return_exceptions=True)

    async def probe_now(self, url: InstanceUrl) -> None:
        """Wait for a probe of the present record of `url`, the running one or a new one; none if unwatched.

        Who asks knows of something new. So an evicted instance is asked again where a probe that began before
        has failed, and its pauses begin anew. Bounded by twice the probe's deadlines: the running one, ours.
        """
        watch = self._watches.get(url)
        view = self._driver.find(url)
        if watch is None or view is None:
            return
        watch.forgiven = view.probe_failures
        was_running = watch.running_generation == view.generation
        await self._next_result(url, watch)
        if was_running and self._is_evicted(url) and self._watches.get(url) is watch:
            await self._next_result(url, watch)

    def _is_evicted(self, url: InstanceUrl) -> bool:
        view = self._driver.find(url)
        return view is not None and view.state is InstanceState.EVICTED

    async def _next_result(self, url: InstanceUrl, watch: _Watch) -> None:
        view = self._driver.find(url)
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        watch.waiters.append(waiter)
        if view is None or watch.running_generation != view.generation:
            watch.asked = True
            watch.wake.set()
        try:
            await waiter
        finally:
            if waiter in watch.waiters:
                watch.waiters.remove(waiter)

    # --- following the registry ----------------------------------------------------------------------------

    def _on_event(self, event: Event) -> None:
        if event.kind is EventKind.REGISTERED:
            self._begin(event.url)
        elif event.kind in (EventKind.REMOVED, EventKind.DRAIN_STARTED):
            self._end(event.url)
        elif event.kind in (EventKind.UPDATED, EventKind.EVICTED):
            self._wake(event)

    def _begin(self, url: InstanceUrl) -> None:
        watch = self._watches[url] = _Watch()
        # A fresh context: the request that registered it has ended long before the task does.
        context = contextvars.Context()
        watch.task = asyncio.create_task(self._run(url, watch), name=f"probe {url}", context=context)

    def _end(self, url: InstanceUrl) -> None:
        watch = self._watches.pop(url, None)
        if watch is None:
            return
        if watch.task is not None and watch.task is not asyncio.current_task():
            watch.task.cancel()
        _settle(watch)

    def _wake(self, event: Event) -> None:
        watch = self._watches.get(event.url)
        if watch is None or watch.running_generation == event.generation:
            return
        # A new record is probed at once. One that traffic evicted stays out for an interval from now: its
        # `/health` may well be fine, and letting it back in at once would only fail more requests.
        watch.asked = watch.asked or event.kind is EventKind.UPDATED
        watch.counts_from = self._driver.now()
        watch.wake.set()

    # --- one instance --------------------------------------------------------------------------------------

    async def _run(self, url: InstanceUrl, watch: _Watch) -> None:
        while self._watches.get(url) is watch and (view := self._driver.find(url)) is not None:
            watch.asked = False
            watch.counts_from = self._driver.now()
            await self._probe(view, watch)
            await self._pause(url, watch)

    async def _pause(self, url: InstanceUrl, watch: _Watch) -> None:
        """Return when the next probe is due, or somebody asks for one."""
        first_due = spread_first(self._driver.now(), self._draw(), self._policy) if watch.is_first else None
        watch.is_first = False
        while not watch.asked:
            watch.wake.clear()
            due = self._next(url, watch)
            if due is not None and first_due is not None:
                due = min(due, first_due)
            if not await _woken(watch.wake, None if due is None else due - self._driver.now()):
                return

    async def _probe(self, view: InstanceView, watch: _Watch) -> None:
        watch.running_generation = view.generation
        try:
            async with self._slots:
                report = await self._ask(view, watch)
            self._driver.apply(report)
        except Exception:  # noqa: BLE001
            # The supervisor of this loop: an instance must not stay unprobed for ever because of one bug.
            structlog.get_logger().exception("probe_failed", instance=view.spec.url)
        finally:
            watch.running_generation = None
        current = self._driver.find(view.spec.url)
        if current is None or current.generation == view.generation:
            _settle(watch)

    async def _ask(self, view: InstanceView, watch: _Watch) -> ProbeReport:
        url, began = view.spec.url, time.perf_counter()
        result = await self._prober.probe(url)
        latency = time.perf_counter() - began
        self._metrics.probe_seconds.labels(outcome=result.outcome).observe(latency)
        models = await self._ask_models(view, watch, result)
        return ProbeReport(
            url=url,
            generation=view.generation,
            outcome=result.outcome,
            latency_s=latency,
            at=time.time(),
            error=result.error,
            models=models,
        )

    async def _ask_models(
        self, view: InstanceView, watch: _Watch, result: ProbeResult
    ) -> frozenset[str] | None:
        if result.outcome is not ProbeOutcome.HEALTHY:
            return None
        is_due = (
            view.state is not InstanceState.READY
            or watch.models_generation != view.generation
            or self._driver.now() >= watch.models_due
        )
        models = await self._prober.fetch_models(view.spec.url) if is_due else None
        if models is not None:
            watch.models_generation = view.generation
            watch.models_due = self._driver.now() + _MODELS_REFRESH_S
        return models

    def _next(self, url: InstanceUrl, watch: _Watch) -> float | None:
        view = self._driver.find(url)
        if view is None:
            return None
        watch.forgiven = min(watch.forgiven, view.probe_failures)
        return next_due(
            started=watch.counts_from,
            finished=self._driver.now(),
            state=view.state,
            failures_past_threshold=view.probe_failures - max(self._fail_threshold, watch.forgiven),
            policy=self._policy,
        )


def _settle(watch: _Watch) -> None:
    for waiter in watch.waiters:
        if not waiter.done():
            waiter.set_result(None)
    watch.waiters.clear()


async def _woken(wake: asyncio.Event, delay_s: float | None) -> bool:
    """Wait for `wake`, at most `delay_s`; say whether it came."""
    try:
        async with asyncio.timeout(delay_s):
            await wake.wait()
    except TimeoutError:
        return False
    return True
