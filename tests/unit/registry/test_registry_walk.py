"""A long random walk of commands with the registry's invariants checked on the way."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable

import pytest

from epdctl.domain import InstanceSpec, InstanceState, InstanceUrl, Observation, ProbeOutcome, Role, Topology
from epdctl.errors import EpdError
from epdctl.registry.commands import (
    Acquire,
    Command,
    Drain,
    Event,
    EventKind,
    Observe,
    ProbeReport,
    Register,
    Release,
    Remove,
    Tick,
)
from epdctl.registry.registry import Registry
from tests.unit.registry.build import new_registry

pytestmark = pytest.mark.unit

STEPS = 100_000
CHECK_EVERY = 5
URLS = [InstanceUrl(f"http://host{n % 3}:{8000 + n}") for n in range(8)]


class Walk:
    """A registry, a clock that only grows, and what the walk itself knows to be in flight."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.registry: Registry = new_registry(fail_threshold=3, rise_threshold=2, ttl_s=60.0)
        self.now = 0.0
        self.leases: list[tuple[InstanceUrl, int]] = []
        self.loads: Counter[InstanceUrl] = Counter()
        self.last_generation: dict[InstanceUrl, int] = {}
        self.states: dict[InstanceUrl, InstanceState] = {}
        self.events: Counter[EventKind] = Counter()
        self.refusals: Counter[str] = Counter()

    def step(self) -> None:
        """Apply one random command."""
        self.now += self.draw.expovariate(4.0)
        command = self.next_command()
        before = self.registry.roster()
        try:
            outcome = self.registry.apply(command, self.now)
        except EpdError as error:
            self.refusals[error.code] += 1
            assert self.registry.roster() is before, "a refused command changed the roster"
            return
        self.follow(command, outcome.events)

    def next_command(self) -> Command:
        """Draw a command."""
        url = self.draw.choice(URLS)
        kind = self.draw.choices(
            ["register", "remove", "drain", "probe", "observe", "acquire", "release", "tick"],
            weights=[8, 1, 1, 40, 20, 19, 21, 3],
        )[0]
        return getattr(self, f"make_{kind}")(url)  # type: ignore[no-any-return]

    def make_register(self, url: InstanceUrl) -> Command:
        """Draw a registration, now and then with another role or label."""
        role = self.draw.choice(list(Role)) if self.draw.random() < 0.1 else list(Role)[URLS.index(url) % 3]
        labels = (("group", self.draw.choice("ab")),) if self.draw.random() < 0.3 else ()
        return Register(spec=InstanceSpec(url=url, role=role, labels=labels))

    def make_remove(self, url: InstanceUrl) -> Command:
        """A removal."""
        return Remove(url=url)

    def make_drain(self, url: InstanceUrl) -> Command:
        """A drain."""
        return Drain(url=url, deadline=self.now + self.draw.uniform(0, 20))

    def generation(self, url: InstanceUrl) -> int:
        """Return the latest generation of `url`, now and then an older one."""
        view = self.registry.find(url, self.now)
        latest = view.generation if view else self.last_generation.get(url, 1)
        return max(1, latest - (self.draw.random() < 0.1))

    def make_probe(self, url: InstanceUrl) -> Command:
        """A probe report."""
        outcome = self.draw.choices(list(ProbeOutcome), weights=[5, 4, 1])[0]
        models = frozenset(self.draw.sample(["m", "n"], k=1)) if self.draw.random() < 0.2 else None
        return ProbeReport(
            url=url, generation=self.generation(url), outcome=outcome, latency_s=0.01, at=0.0, models=models
        )

    def make_observe(self, url: InstanceUrl) -> Command:
        """Evidence from traffic."""
        return Observe(
            url=url, generation=self.generation(url), observation=self.draw.choice(list(Observation))
        )

    def make_acquire(self, url: InstanceUrl) -> Command:
        """One call more."""
        return Acquire(url=url, generation=self.generation(url))

    def make_release(self, url: InstanceUrl) -> Command:
        """One call less, now and then one that never was."""
        if self.leases and self.draw.random() < 0.95:
            url, generation = self.draw.choice(self.leases)
            return Release(url=url, generation=generation)
        return Release(url=url, generation=999_999)

    def make_tick(self, url: InstanceUrl) -> Command:
        """Time passes."""
        return Tick()

    def follow(self, command: Command, events: Iterable[Event]) -> None:
        """Keep the walk's own books, and check that each event fits what was known before it."""
        if isinstance(command, Acquire):
            self.leases.append((command.url, command.generation))
            self.loads[command.url] += 1
        if isinstance(command, Release) and (command.url, command.generation) in self.leases:
            self.leases.remove((command.url, command.generation))
            self.loads[command.url] -= 1
        for event in events:
            self.events[event.kind] += 1
            known = self.states.get(event.url)
            if event.kind is EventKind.REGISTERED:
                assert known is None
                assert event.generation > self.last_generation.get(event.url, 0)
            elif event.kind is EventKind.READY:
                assert known is InstanceState.PENDING
            elif event.kind is EventKind.READMITTED:
                assert known is InstanceState.EVICTED
            elif event.kind is EventKind.EVICTED:
                assert known is InstanceState.READY
                self.check_last_ready(command, event)
            elif event.kind is EventKind.UPDATED:
                assert event.generation == self.last_generation[event.url] + 1
            self.last_generation[event.url] = event.generation
            if event.kind is EventKind.REMOVED:
                del self.states[event.url]
            else:
                self.states[event.url] = event.state

    def check_last_ready(self, command: Command, event: Event) -> None:
        """Assert that traffic left somebody of the role."""
        if isinstance(command, Observe):
            assert self.registry.roster().by_role(event.role), "traffic evicted the last ready instance"

    def check(self) -> None:
        """Assert what must hold at any moment."""
        views = {view.spec.url: view for view in self.registry.views(self.now)}
        roster = self.registry.roster()
        assert {url: view.state for url, view in views.items()} == self.states
        assert [m.url for m in roster.members] == [
            url for url, view in views.items() if view.state is InstanceState.READY
        ]
        assert all(m.generation == views[m.url].generation for m in roster.members)
        for url in URLS:
            assert self.registry.in_flight(url) == self.loads[url]
        roles = {view.spec.role for view in views.values()}
        assert not (Role.PREFILL_DECODE in roles and roles & {Role.PREFILL, Role.DECODE})
        assert (roster.topology is Topology.EMPTY) == (not views)
        idle_drains = [v for v in views.values() if v.state is InstanceState.DRAINING and not v.in_flight]
        assert not idle_drains, "a drain with nothing in flight did not end"


def test_invariants_hold_over_a_long_random_walk() -> None:
    """100,000 random commands never break an invariant, and nothing that can happen is left out."""
    walk = Walk(seed=20260101)

    for number in range(STEPS):
        walk.step()
        if number % CHECK_EVERY == 0:
            walk.check()

    assert set(walk.events) == set(EventKind), "the walk missed a kind of event"
    assert {"topology_conflict", "role_change", "unknown_instance"} <= set(walk.refusals)


def test_everything_ends_clean() -> None:
    """When all calls are released and all instances removed, nothing is left."""
    walk = Walk(seed=7)
    for _ in range(5_000):
        walk.step()

    for url, generation in list(walk.leases):
        walk.registry.apply(Release(url=url, generation=generation), walk.now)
    for view in walk.registry.views(walk.now):
        walk.registry.apply(Remove(url=view.spec.url), walk.now)

    assert walk.registry.views(walk.now) == ()
    assert all(walk.registry.in_flight(url) == 0 for url in URLS)
    assert (walk.registry.roster().members, walk.registry.next_due()) == ((), None)
