"""Probing every instance on its own timer, with a prober that a test controls."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import pytest
import structlog

from epdctl.domain import InstanceSpec, InstanceState, InstanceUrl, Observation, ProbeOutcome, Role
from epdctl.health.loop import HealthLoop
from epdctl.health.prober import ProbeResult
from epdctl.health.schedule import SchedulePolicy
from epdctl.health.verdict import VerdictPolicy
from epdctl.metrics import ControlMetrics
from epdctl.registry.commands import Drain, Register, Remove
from epdctl.registry.driver import RegistryDriver
from epdctl.registry.registry import Registry, RegistryPolicy
from epdctl.registry.store import MemoryStore
from tests.stubs.process import wait_until
from tests.unit.registry.build import E1, E2, spec

pytestmark = pytest.mark.unit

HEALTHY = ProbeResult(outcome=ProbeOutcome.HEALTHY)
UNHEALTHY = ProbeResult(outcome=ProbeOutcome.UNHEALTHY, error="connection refused")
INTERVAL_S = 0.02


class FakeProber:
    """Answers what a test says; a URL in `hanging` waits until it is let go."""

    def __init__(self) -> None:
        self.results: dict[str, ProbeResult] = {}
        self.models: dict[str, frozenset[str] | None] = {}
        self.hanging: dict[str, asyncio.Event] = {}
        self.probes: Counter[str] = Counter()
        self.model_calls: Counter[str] = Counter()
        self.running: Counter[str] = Counter()
        self.most_running: Counter[str] = Counter()
        self.broken = False

    async def probe(self, url: InstanceUrl) -> ProbeResult:
        """Answer what the test says about `url`."""
        self.probes[url] += 1
        self.running[url] += 1
        self.most_running[url] = max(self.most_running[url], self.running[url])
        try:
            if self.broken:
                raise ZeroDivisionError("a bug")
            if url in self.hanging:
                await self.hanging[url].wait()
            return self.results.get(url, HEALTHY)
        finally:
            self.running[url] -= 1

    async def fetch_models(self, url: InstanceUrl) -> frozenset[str] | None:
        """List what the test says."""
        self.model_calls[url] += 1
        return self.models.get(url, frozenset())


@dataclass
class World:
    """A driver, a health loop and the prober that the test controls."""

    driver: RegistryDriver
    loop: HealthLoop
    prober: FakeProber

    def state(self, url: InstanceUrl = E1) -> InstanceState | None:
        """Return the state of `url`."""
        view = self.driver.find(url)
        return None if view is None else view.state

    def register(self, instance: InstanceSpec) -> None:
        """Register `instance`."""
        self.driver.apply(Register(spec=instance))

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait until `condition` holds."""
        await wait_until(condition, what, 10.0)


async def build(interval_s: float = INTERVAL_S, static: tuple[InstanceSpec, ...] = ()) -> World:
    """Return a started world."""
    prober, metrics = FakeProber(), ControlMetrics()
    verdict = VerdictPolicy(fail_threshold=3)
    driver = RegistryDriver(
        Registry(RegistryPolicy(verdict=verdict)), MemoryStore(), metrics, asyncio.get_running_loop().time
    )
    schedule = SchedulePolicy(interval_s=interval_s, timeout_s=1.0)
    loop = HealthLoop(driver, prober, schedule, verdict.fail_threshold, metrics, lambda: 0.5)
    await driver.start(static)
    loop.start()
    return World(driver, loop, prober)


async def close(world: World) -> None:
    """Stop everything."""
    await world.loop.close()
    await world.driver.close()


@pytest.fixture
async def world() -> AsyncIterator[World]:
    """A world with a short interval."""
    world = await build()
    yield world
    await close(world)


@pytest.fixture
async def slow() -> AsyncIterator[World]:
    """A world whose periodic probes never come within a test."""
    world = await build(interval_s=3600.0)
    yield world
    await close(world)


async def test_registration_is_probed_at_once(slow: World) -> None:
    """A new instance is probed without waiting for an interval, and its models are known with it."""
    slow.prober.models[E1] = frozenset({"m"})
    slow.register(spec())

    await slow.loop.probe_now(E1)

    assert slow.state() is InstanceState.READY
    assert slow.driver.roster().members[0].models == {"m"}
    assert slow.prober.probes[E1] == 1


async def test_what_was_there_before_the_start_is_probed(slow: World) -> None:
    """Static and restored instances are probed at once."""
    world = await build(interval_s=3600.0, static=(spec(E2, static=True),))

    await world.until(lambda: world.state(E2) is InstanceState.READY, "static instance ready")

    await close(world)


async def test_eviction_and_readmission(world: World) -> None:
    """An instance that stops answering is evicted, and comes back by itself."""
    world.register(spec())
    await world.until(lambda: world.state() is InstanceState.READY, "ready")

    world.prober.results[E1] = UNHEALTHY
    await world.until(lambda: world.state() is InstanceState.EVICTED, "evicted")
    world.prober.results[E1] = HEALTHY
    await world.until(lambda: world.state() is InstanceState.READY, "readmitted")


async def evict(world: World) -> None:
    """Let E1 join, and fail until it is evicted."""
    world.register(spec())
    await world.loop.probe_now(E1)
    world.prober.results[E1] = UNHEALTHY
    for _ in range(3):
        await world.loop.probe_now(E1)
    assert world.state() is InstanceState.EVICTED


async def test_asking_reaches_an_evicted_one_whose_probe_is_under_way(slow: World) -> None:
    """A registration that comes while a probe of the time before fails is answered by a probe of its own: an
    instance that is back is readmitted at once."""
    await evict(slow)
    gate = slow.prober.hanging[E1] = asyncio.Event()
    early = asyncio.create_task(slow.loop.probe_now(E1))
    await slow.until(lambda: slow.prober.running[E1] == 1, "a probe of the time before")
    registrations = [asyncio.create_task(slow.loop.probe_now(E1)) for _ in range(2)]
    await asyncio.sleep(0)
    second_gate = slow.prober.hanging[E1] = asyncio.Event()
    gate.set()
    await asyncio.wait_for(early, 5)
    slow.prober.results[E1] = HEALTHY
    second_gate.set()

    await asyncio.wait_for(asyncio.gather(*registrations), 5)

    assert slow.state() is InstanceState.READY
    assert slow.prober.most_running[E1] == 1


async def test_asking_begins_the_pauses_anew() -> None:
    """Pauses that have grown begin with the interval again when an evicted instance is registered again, also
    when it is not quite there at that moment; without that they stay as long as they are."""
    world = await build(interval_s=0.2)
    try:
        await evict(world)
        for _ in range(9):
            await world.loop.probe_now(E1)
        watch = world.loop._watches[E1]
        after_asking = (world.loop._next(E1, watch) or 0.0) - watch.counts_from
        watch.forgiven = 0
        without = (world.loop._next(E1, watch) or 0.0) - watch.counts_from
        await world.loop.probe_now(E1)
        world.prober.results[E1] = HEALTHY

        await wait_until(lambda: world.state() is InstanceState.READY, "readmitted", 10.0)
    finally:
        await close(world)

    assert (after_asking < 1.0, without > 20.0) == (True, True)


async def test_one_that_hangs_delays_nobody(world: World) -> None:
    """While a probe hangs, others are probed at their own pace."""
    world.prober.hanging[E1] = asyncio.Event()
    world.register(spec(E1))
    world.register(spec(E2))

    await world.until(lambda: world.prober.probes[E2] >= 10, "ten probes of the other")

    assert world.prober.probes[E1] == 1


async def test_at_most_one_probe_of_an_instance_at_a_time(slow: World) -> None:
    """Registering again and again while a probe runs does not start a second one beside it."""
    gate = slow.prober.hanging[E1] = asyncio.Event()
    slow.register(spec())
    waits = [asyncio.create_task(slow.loop.probe_now(E1)) for _ in range(5)]
    await slow.until(lambda: slow.prober.running[E1] == 1, "probe running")

    gate.set()
    await asyncio.gather(*waits)

    assert (slow.prober.most_running[E1], slow.prober.probes[E1]) == (1, 1)


async def test_a_changed_record_gets_its_own_probe(slow: World) -> None:
    """A probe that was asked about the old record neither counts for the new one nor is waited for alone."""
    gate = slow.prober.hanging[E1] = asyncio.Event()
    slow.register(spec())
    await slow.until(lambda: slow.prober.running[E1] == 1, "probe running")
    slow.register(spec(labels=(("group", "a"),)))
    wait = asyncio.create_task(slow.loop.probe_now(E1))
    await asyncio.sleep(0)

    second_gate = slow.prober.hanging[E1] = asyncio.Event()
    gate.set()
    await slow.until(lambda: slow.prober.probes[E1] == 2, "second probe running")
    assert not wait.done()
    assert slow.state() is InstanceState.PENDING
    second_gate.set()
    await asyncio.wait_for(wait, 5)

    assert slow.prober.probes[E1] == 2
    assert slow.driver.roster().members[0].generation == 2


async def test_removal_ends_the_probing(world: World) -> None:
    """A removed instance is not asked again, and who waited for its probe is let go."""
    world.prober.hanging[E1] = asyncio.Event()
    world.register(spec())
    waiting = asyncio.create_task(world.loop.probe_now(E1))
    await world.until(lambda: world.prober.running[E1] == 1, "probe running")

    world.driver.apply(Remove(url=E1))
    await asyncio.wait_for(waiting, 5)
    await world.until(lambda: world.prober.running[E1] == 0, "probe cancelled")

    assert world.prober.probes[E1] == 1


async def test_draining_ends_the_probing(world: World) -> None:
    """A draining instance is not probed: what it says does not matter any more."""
    world.register(spec())
    await world.until(lambda: world.state() is InstanceState.READY, "ready")
    world.driver.acquire(world.driver.roster().members[0])
    world.driver.apply(Drain(url=E1, deadline=world.driver.now() + 60))
    before = world.prober.probes[E1]
    world.register(spec(E2))

    await world.until(lambda: world.prober.probes[E2] >= 10, "ten intervals later")

    assert world.prober.probes[E1] == before


async def test_evicted_by_traffic_is_out_for_an_interval(slow: World) -> None:
    """One that traffic evicts is not let back in at once by a health page that is fine."""
    for url in (E1, E2):
        slow.register(spec(url))
        await slow.loop.probe_now(url)
    member = slow.driver.roster().members[0]
    before = slow.prober.probes[E1]

    for _ in range(3):
        slow.driver.observe(member, Observation.UNREACHABLE)
    for _ in range(10):
        await asyncio.sleep(0)

    assert (slow.state(), slow.prober.probes[E1]) == (InstanceState.EVICTED, before)


async def test_with_interval_zero_an_evicted_one_is_still_asked() -> None:
    """Without periodic probes, an instance that traffic evicted comes back all the same."""
    world = await build(interval_s=0.0)
    for url in (E1, E2):
        world.register(spec(url))
        await world.loop.probe_now(url)
    assert world.prober.probes[E1] == 1

    for _ in range(3):
        world.driver.observe(world.driver.roster().members[0], Observation.UNREACHABLE)
    assert world.state() is InstanceState.EVICTED

    await world.until(lambda: world.state() is InstanceState.READY, "readmitted")
    await close(world)


async def test_models_are_asked_once_and_again_after_an_absence(world: World) -> None:
    """A ready instance's models are not asked with every probe, but again when it comes back."""
    world.register(spec())
    await world.until(lambda: world.prober.probes[E1] >= 10, "ten probes")
    assert world.prober.model_calls[E1] == 1

    world.prober.results[E1] = UNHEALTHY
    await world.until(lambda: world.state() is InstanceState.EVICTED, "evicted")
    world.prober.models[E1] = frozenset({"other"})
    world.prober.results[E1] = HEALTHY
    await world.until(lambda: world.state() is InstanceState.READY, "readmitted")

    assert world.driver.roster().known_models == ("other",)


async def test_models_that_could_not_be_asked_are_asked_again(world: World) -> None:
    """A list that did not come is asked for with the next probe."""
    world.prober.models[E1] = None
    world.register(spec())
    await world.until(lambda: world.prober.model_calls[E1] >= 3, "asked again")

    world.prober.models[E1] = frozenset({"m"})
    await world.until(lambda: world.driver.roster().known_models == ("m",), "models known")


async def test_a_bug_in_a_probe_does_not_end_the_probing(world: World) -> None:
    """An unexpected failure is logged and the instance is probed again."""
    world.prober.broken = True
    with structlog.testing.capture_logs() as logs:
        world.register(spec())
        await world.until(lambda: world.prober.probes[E1] >= 2, "probed again")
    world.prober.broken = False

    await world.until(lambda: world.state() is InstanceState.READY, "ready")

    assert any(log["event"] == "probe_failed" and log["instance"] == E1 for log in logs)


async def test_registry_calls_take_no_time_while_a_hundred_probes_hang(slow: World) -> None:
    """Routing reads and counts are not held up by probes that wait."""
    urls = [InstanceUrl(f"http://e{n}:8001") for n in range(100)]
    for url in urls:
        slow.prober.hanging[url] = asyncio.Event()
        slow.register(spec(url))
    slow.register(spec(E1, Role.ENCODE, model="m"))
    await slow.until(lambda: sum(slow.prober.running.values()) == 100, "all hang")
    clock = asyncio.get_running_loop().time

    started = clock()
    for _ in range(1000):
        slow.driver.roster()
        slow.driver.in_flight(E1)
        slow.driver.service()
    elapsed = clock() - started

    assert elapsed / 1000 < 0.001


async def test_closing_ends_every_task() -> None:
    """After closing, no probe task is left."""
    world = await build()
    world.prober.hanging[E1] = asyncio.Event()
    world.register(spec(E1))
    world.register(spec(E2))
    await world.until(lambda: world.prober.probes[E2] >= 2, "running")

    await close(world)

    assert [task for task in asyncio.all_tasks() if task.get_name().startswith("probe ")] == []
