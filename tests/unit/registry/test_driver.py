"""The registry at work: publishing, storing, draining, time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest
import structlog
from structlog.testing import capture_logs

from epdctl.domain import InstanceSpec, InstanceUrl, Role
from epdctl.health.verdict import VerdictPolicy
from epdctl.metrics import ControlMetrics
from epdctl.registry.commands import Drain, Register, RemovalCause, Remove
from epdctl.registry.driver import RegistryDriver
from epdctl.registry.registry import Registry, RegistryPolicy
from epdctl.registry.store import StoredInstance, StoreFailed
from tests.unit.registry.build import E1, P1, PD1, spec

pytestmark = pytest.mark.unit


class ListStore:
    """A store that remembers in a dict; `broken` makes every write fail."""

    def __init__(self, *kept: StoredInstance) -> None:
        self.kept = {instance.spec.url: instance for instance in kept}
        self.broken = False

    async def open(self) -> None:
        """Get ready."""
        pass

    async def load(self) -> tuple[StoredInstance, ...]:
        """Return what is kept."""
        return tuple(self.kept.values())

    async def save(self, instance: StoredInstance) -> None:
        """Keep `instance`."""
        self._check()
        self.kept[instance.spec.url] = instance

    async def delete(self, url: InstanceUrl) -> None:
        """Forget `url`."""
        self._check()
        self.kept.pop(url, None)

    async def close(self) -> None:
        """Do nothing."""
        pass

    def _check(self) -> None:
        if self.broken:
            raise StoreFailed("r.db: the disk is full")


class Clock:
    """Monotonic seconds that a test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now


def build(store: ListStore, clock: Callable[[], float], ttl_s: float = 900.0) -> RegistryDriver:
    """Return a driver that is not started."""
    policy = RegistryPolicy(verdict=VerdictPolicy(), ttl_s=ttl_s)
    return RegistryDriver(Registry(policy), store, ControlMetrics(), clock)


@pytest.fixture
async def store() -> ListStore:
    """An empty store."""
    return ListStore()


@pytest.fixture
async def driver(store: ListStore) -> AsyncIterator[RegistryDriver]:
    """A started driver."""
    driver = build(store, asyncio.get_running_loop().time)
    await driver.start(())
    yield driver
    await driver.close()


async def test_registrations_and_removals_reach_the_store(driver: RegistryDriver, store: ListStore) -> None:
    """What is registered is kept, with its generation; what is removed is not."""
    driver.apply(Register(spec=spec()))
    driver.apply(Register(spec=spec(model="m")))
    assert await driver.stored(E1)
    assert store.kept[E1] == StoredInstance(spec=spec(model="m"), generation=2)

    driver.apply(Remove(url=E1))
    assert await driver.stored(E1)
    assert store.kept == {}


async def test_a_failing_store_is_said_and_does_not_stop_routing(
    driver: RegistryDriver, store: ListStore
) -> None:
    """When the disk is full, instances still register, the caller learns of it, and the log has it."""
    store.broken = True
    with structlog.testing.capture_logs() as logs:
        driver.apply(Register(spec=spec()))

        assert await driver.stored(E1) is False

    assert driver.find(E1) is not None
    assert [log["event"] for log in logs] == ["instance_registered", "store_failed"]
    store.broken = False


async def test_what_was_kept_comes_back_pending_and_static_is_not_kept() -> None:
    """After a restart stored instances are pending; the command line's are there, and not stored."""
    store = ListStore(StoredInstance(spec=spec(), generation=7))
    driver = build(store, asyncio.get_running_loop().time)
    await driver.start((spec(PD1, Role.PREFILL_DECODE, static=True),))

    views = {view.spec.url: view for view in driver.views()}
    await driver.close()

    assert views[E1].state == "pending"
    assert views[E1].generation == 7
    assert set(store.kept) == {E1}


@pytest.mark.parametrize(
    "kept",
    [spec(InstanceUrl("http://a..b:5")), spec(PD1, Role.PREFILL_DECODE, ec_zmq_addrs=("tcp://a..b:5",))],
)
async def test_what_would_not_be_registered_now_does_not_come_back(kept: InstanceSpec) -> None:
    """A record that an older release took, and that no removal could name, is dropped with a log line."""
    store = ListStore(StoredInstance(spec=kept, generation=1), StoredInstance(spec=spec(), generation=7))
    driver = build(store, asyncio.get_running_loop().time)
    with capture_logs() as logs:
        await driver.start(())

    known = [view.spec.url for view in driver.views()]
    await driver.close()

    assert known == [E1] == list(store.kept)
    assert ("stored_instance_dropped", kept.url) in [(log["event"], log["instance"]) for log in logs]


@pytest.mark.parametrize(
    ("kept", "static"),
    [
        (spec(P1, Role.PREFILL), spec(PD1, Role.PREFILL_DECODE, static=True)),
        (spec(E1, Role.ENCODE), spec(E1, Role.PREFILL_DECODE, static=True)),
    ],
)
async def test_a_record_that_contradicts_the_command_line_stops_the_start(
    kept: object, static: object
) -> None:
    """Both the stored and the static instance are named."""
    driver = build(ListStore(StoredInstance(spec=kept, generation=1)), Clock())  # type: ignore[arg-type]

    with pytest.raises(StoreFailed) as raised:
        await driver.start((static,))  # type: ignore[arg-type]

    await driver.close()
    assert f"{kept.url} ({kept.role})" in str(raised.value)  # type: ignore[attr-defined]
    assert f"{static.url} ({static.role})" in str(raised.value)  # type: ignore[attr-defined]


async def test_a_record_that_the_command_line_names_too_is_the_command_lines() -> None:
    """Same URL and role: the flags win, and nothing is wrong."""
    driver = build(ListStore(StoredInstance(spec=spec(model="old"), generation=3)), Clock())
    await driver.start((spec(static=True),))

    (view,) = driver.views()
    await driver.close()

    assert (view.spec.static, view.spec.model) == (True, None)


async def test_drained_returns_when_the_last_call_ends(driver: RegistryDriver) -> None:
    """Whoever waits for a drain is told how it ended."""
    driver.apply(Register(spec=spec()))
    report_ready(driver)
    (member,) = driver.roster().members
    driver.acquire(member)
    driver.apply(Drain(url=E1, deadline=driver.now() + 60))
    waiting = asyncio.create_task(driver.drained(E1))
    await asyncio.sleep(0)

    driver.release(member)

    assert await asyncio.wait_for(waiting, 5) is RemovalCause.DRAINED


async def test_a_drain_ends_at_its_deadline_without_help(driver: RegistryDriver) -> None:
    """The driver's own timer applies the deadline."""
    driver.apply(Register(spec=spec()))
    report_ready(driver)
    (member,) = driver.roster().members
    driver.acquire(member)

    driver.apply(Drain(url=E1, deadline=driver.now() + 60))
    driver.apply(Drain(url=E1, deadline=driver.now() + 0.05))

    assert await asyncio.wait_for(driver.drained(E1), 5) is RemovalCause.DRAIN_TIMEOUT


async def test_time_to_live_ends_without_help() -> None:
    """An instance that never answers is forgotten by the driver's own timer."""
    driver = build(ListStore(), asyncio.get_running_loop().time, ttl_s=0.05)
    await driver.start(())
    gone = asyncio.Event()
    driver.listen(lambda event: gone.set() if event.cause is RemovalCause.EXPIRED else None)

    driver.apply(Register(spec=spec()))

    await asyncio.wait_for(gone.wait(), 5)
    await driver.close()


async def test_each_event_is_logged_and_counted_once(driver: RegistryDriver) -> None:
    """A transition is one log line and one count, and the gauge follows."""
    metrics = driver._sink._metrics  # the counters are what this test is about
    with structlog.testing.capture_logs() as logs:
        driver.apply(Register(spec=spec()))
        report_ready(driver)

    assert [log["event"] for log in logs] == ["instance_registered", "instance_ready"]
    text = metrics.render().decode()
    assert 'epdctl_instance_transitions_total{event="ready",role="encode"} 1.0' in text
    assert 'epdctl_instances{role="encode",state="ready"} 1.0' in text
    assert 'epdctl_instances{role="encode",state="pending"} 0.0' in text


async def test_service_is_judged_once_a_roster(driver: RegistryDriver) -> None:
    """Asking whether requests can be served costs nothing until the roster changes."""
    before = driver.service()
    assert driver.service() is before

    driver.apply(Register(spec=spec()))

    assert driver.service().reason != before.reason


def report_ready(driver: RegistryDriver) -> None:
    """Report a healthy probe of the first encoder."""
    from epdctl.domain import ProbeOutcome
    from epdctl.registry.commands import ProbeReport

    driver.apply(
        ProbeReport(url=E1, generation=1, outcome=ProbeOutcome.HEALTHY, latency_s=0.0, at=0.0, models=None)
    )
