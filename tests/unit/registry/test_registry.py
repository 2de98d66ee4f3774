"""The registry's decisions."""

from __future__ import annotations

import pytest

from epdctl.domain import InstanceState, Observation, ProbeOutcome, Role, Topology
from epdctl.errors import RoleChange, StaticInstance, TopologyConflict, UnknownInstance
from epdctl.registry.commands import Drain, EventKind, Register, RemovalCause, Remove, Tick
from tests.unit.registry.build import (
    D1,
    E1,
    E2,
    E3,
    E4,
    P1,
    PD1,
    PD2,
    acquire,
    fail,
    new_registry,
    observe,
    probe,
    ready,
    register,
    release,
    spec,
    state_of,
)

pytestmark = pytest.mark.unit


def kinds(outcome: object) -> list[str]:
    """Return the kinds of the events of `outcome`."""
    return [event.kind.value for event in outcome.events]  # type: ignore[attr-defined]


class TestRegistration:
    """Who may join, and as what."""

    def test_new_is_pending_and_gets_no_traffic(self) -> None:
        """A new instance is not routable before its first healthy probe."""
        registry = new_registry()

        outcome = register(registry, spec())

        assert kinds(outcome) == ["registered"]
        assert state_of(registry, E1) is InstanceState.PENDING
        assert registry.roster().members == ()

    def test_first_healthy_probe_makes_it_ready(self) -> None:
        """The first healthy probe lets a pending instance in."""
        registry = new_registry()
        register(registry, spec())

        outcome = probe(registry, E1)

        assert kinds(outcome) == ["ready"]
        assert [m.url for m in registry.roster().by_role(Role.ENCODE)] == [E1]

    def test_identical_registration_changes_nothing(self) -> None:
        """Registering the same again resets neither state nor failure count, and says nothing happened."""
        registry = ready(new_registry(fail_threshold=3), spec())
        fail(registry, E1, times=2)

        outcome = register(registry, spec())

        assert kinds(outcome) == []
        assert kinds(fail(registry, E1)) == ["evicted"]

    def test_identical_registration_does_not_revive(self) -> None:
        """An evicted instance stays evicted when its launcher posts it again."""
        registry = ready(new_registry(fail_threshold=1), spec())
        fail(registry, E1)

        register(registry, spec())

        assert state_of(registry, E1) is InstanceState.EVICTED

    def test_changed_fields_grow_the_generation_and_keep_health(self) -> None:
        """Other fields under the same URL and role replace the record; it stays in traffic."""
        registry = ready(new_registry(), spec(PD1, Role.PREFILL_DECODE))

        outcome = register(registry, spec(PD1, Role.PREFILL_DECODE, ec_zmq_addrs=("tcp://pd1:9000",)))

        assert kinds(outcome) == ["updated"]
        (routed,) = registry.roster().members
        assert (routed.generation, routed.ec_zmq_addrs) == (2, ("tcp://pd1:9000",))

    def test_changed_fields_keep_the_failure_count(self) -> None:
        """A launcher cannot hide failures by changing a field."""
        registry = ready(new_registry(fail_threshold=3), spec())
        fail(registry, E1, times=2)

        register(registry, spec(labels=(("group", "a"),)))

        assert kinds(fail(registry, E1)) == ["evicted"]

    def test_role_change_needs_a_removal(self) -> None:
        """A URL cannot change its role while it is registered."""
        registry = ready(new_registry(), spec())

        with pytest.raises(RoleChange, match="encode"):
            register(registry, spec(E1, Role.DECODE))

        assert registry.roster().members[0].role is Role.ENCODE

    @pytest.mark.parametrize("state", ["pending", "ready", "evicted", "draining"])
    def test_mixed_topology_is_refused_in_any_state(self, state: str) -> None:
        """prefill_decode beside prefill is refused whatever state the present one is in."""
        registry = new_registry(fail_threshold=1)
        register(registry, spec(P1, Role.PREFILL))
        if state != "pending":
            probe(registry, P1)
        if state == "evicted":
            fail(registry, P1)
        if state == "draining":
            acquire(registry, P1)
            registry.apply(Drain(url=P1, deadline=99.0), 0.0)
        assert state_of(registry, P1) == state

        with pytest.raises(TopologyConflict, match="prefill"):
            register(registry, spec(PD1, Role.PREFILL_DECODE))

        assert state_of(registry, PD1) is None

    def test_order_of_registration_is_kept(self) -> None:
        """Members come in the order of registration, also after one was evicted and readmitted."""
        registry = ready(new_registry(fail_threshold=1), spec(E1), spec(E2), spec(E3))
        fail(registry, E1)
        probe(registry, E1)

        assert [m.url for m in registry.roster().members] == [E1, E2, E3]


class TestHealth:
    """What probes do."""

    def test_below_threshold_keeps_traffic(self) -> None:
        """An instance that failed fewer probes than the threshold still receives work."""
        registry = ready(new_registry(fail_threshold=3), spec())

        fail(registry, E1, times=2)

        assert state_of(registry, E1) is InstanceState.READY

    def test_at_threshold_is_evicted_once(self) -> None:
        """The threshold evicts, and further failures say nothing more."""
        registry = ready(new_registry(fail_threshold=3), spec())

        outcome = fail(registry, E1, times=3)

        assert kinds(outcome) == ["evicted"]
        assert outcome.events[0].failures == 3
        assert kinds(fail(registry, E1)) == []
        assert registry.roster().members == ()

    def test_a_success_between_failures_starts_the_count_again(self) -> None:
        """Only failures in a row evict."""
        registry = ready(new_registry(fail_threshold=2), spec())

        for _ in range(10):
            fail(registry, E1)
            probe(registry, E1)

        assert state_of(registry, E1) is InstanceState.READY

    def test_readmission_needs_rise_threshold_in_a_row(self) -> None:
        """An evicted instance comes back after enough healthy probes in a row."""
        registry = new_registry(fail_threshold=1, rise_threshold=2)
        register(registry, spec())
        probe(registry, E1)
        probe(registry, E1)
        fail(registry, E1)

        assert kinds(probe(registry, E1)) == []
        fail(registry, E1)
        assert kinds(probe(registry, E1)) == []
        assert kinds(probe(registry, E1)) == ["readmitted"]

    def test_inconclusive_counts_for_nothing(self) -> None:
        """A probe that we could not carry out neither evicts nor heals."""
        registry = ready(new_registry(fail_threshold=2), spec())
        fail(registry, E1)

        for _ in range(5):
            probe(registry, E1, ProbeOutcome.INCONCLUSIVE)

        assert state_of(registry, E1) is InstanceState.READY
        assert kinds(fail(registry, E1)) == ["evicted"]

    def test_result_about_an_older_generation_is_dropped(self) -> None:
        """A probe that was asked before the record changed says nothing about the new one."""
        registry = ready(new_registry(fail_threshold=1), spec())
        register(registry, spec(labels=(("group", "a"),)))

        outcome = probe(registry, E1, ProbeOutcome.UNHEALTHY, generation=1)

        assert kinds(outcome) == []
        assert state_of(registry, E1) is InstanceState.READY

    def test_generations_do_not_repeat_across_a_removal(self) -> None:
        """A late result about a removed instance does not touch the one registered after it."""
        registry = ready(new_registry(fail_threshold=1), spec())
        registry.apply(Remove(url=E1), 0.0)
        ready(registry, spec())

        outcome = probe(registry, E1, ProbeOutcome.UNHEALTHY, generation=1)

        assert kinds(outcome) == []
        assert registry.roster().members[0].generation == 2

    def test_result_about_a_removed_instance_is_dropped(self) -> None:
        """A late result does not bring a removed instance back."""
        registry = ready(new_registry(), spec())
        registry.apply(Remove(url=E1), 0.0)

        assert kinds(probe(registry, E1, generation=1)) == []
        assert state_of(registry, E1) is None


class TestTraffic:
    """What requests do."""

    def test_unreachable_counts_like_a_failed_probe(self) -> None:
        """Refused connections and failed probes add to one run."""
        registry = ready(new_registry(fail_threshold=3), spec(E1), spec(E2))
        fail(registry, E1)
        observe(registry, E1)

        assert kinds(observe(registry, E1)) == ["evicted"]

    def test_traffic_never_evicts_the_last_ready_of_a_role(self) -> None:
        """However often it is unreachable, the last ready encoder stays until a probe says no."""
        registry = ready(new_registry(fail_threshold=3), spec(E1), spec(PD1, Role.PREFILL_DECODE))

        for _ in range(20):
            observe(registry, E1)

        assert state_of(registry, E1) is InstanceState.READY
        assert kinds(fail(registry, E1)) == ["evicted"]

    def test_an_answer_clears_what_traffic_had_added(self) -> None:
        """Requests that are answered take back the evidence of requests that were not."""
        registry = ready(new_registry(fail_threshold=3), spec(E1), spec(E2))

        for _ in range(10):
            observe(registry, E1)
            observe(registry, E1)
            observe(registry, E1, Observation.RESPONDED)

        assert state_of(registry, E1) is InstanceState.READY

    def test_an_answer_does_not_silence_a_health_that_says_no(self) -> None:
        """An instance that answers requests but fails its probes is evicted all the same."""
        registry = ready(new_registry(fail_threshold=3), spec(E1), spec(E2))
        fail(registry, E1, times=2)
        observe(registry, E1, Observation.RESPONDED)

        assert kinds(fail(registry, E1)) == ["evicted"]

    def test_evidence_about_an_older_generation_is_dropped(self) -> None:
        """A request that began before the record changed does not count against the new one."""
        registry = ready(new_registry(fail_threshold=1), spec(E1), spec(E2))
        register(registry, spec(labels=(("group", "a"),)))

        assert kinds(observe(registry, E1, generation=1)) == []

    def test_traffic_does_not_readmit(self) -> None:
        """Only a probe brings an evicted instance back."""
        registry = ready(new_registry(fail_threshold=1), spec())
        fail(registry, E1)

        observe(registry, E1, Observation.RESPONDED)

        assert state_of(registry, E1) is InstanceState.EVICTED


class TestOwnTrouble:
    """When everybody fails at once."""

    def fleet(self, hosts: tuple[str, ...] = (E1, E2, E3)) -> object:
        """Return a registry of ready encoders."""
        return ready(new_registry(fail_threshold=2, window_s=5.0), *(spec(url) for url in hosts))

    def test_everybody_failing_at_once_holds_evictions_for_one_window(self) -> None:
        """Three instances on three hosts failing together are suspected to be our own trouble."""
        registry = self.fleet()
        for url in (E1, E2, E3):
            fail(registry, url, now=10.0)

        first = fail(registry, E1, now=14.0)
        second = fail(registry, E2, now=14.1)

        assert kinds(first) == ["evictions_held"]
        assert kinds(second) == []
        assert state_of(registry, E1) is InstanceState.READY

    def test_after_the_window_they_are_evicted(self) -> None:
        """A fleet that is really gone is evicted one window late, and is not held again."""
        registry = self.fleet()
        for now in (10.0, 14.0):
            for url in (E1, E2, E3):
                fail(registry, url, now=now)

        late = [fail(registry, url, now=19.1) for url in (E1, E2, E3)]

        assert [kinds(outcome) for outcome in late] == [["evicted"]] * 3

    def test_one_success_ends_the_suspicion(self) -> None:
        """When somebody answers, the network works and the others are evicted."""
        registry = self.fleet((E1, E2, E3, E4))
        for url in (E1, E2, E3):
            fail(registry, url, now=10.0)
        probe(registry, E4, now=14.0)

        assert kinds(fail(registry, E1, now=14.1)) == ["evicted"]

    def test_one_host_is_not_enough(self) -> None:
        """Three instances of one host failing together are that host's trouble."""
        same = tuple(f"http://e1:{port}" for port in (8001, 8002, 8003))
        registry = self.fleet(same)  # type: ignore[arg-type]
        for url in same:
            fail(registry, url, now=10.0)  # type: ignore[arg-type]

        assert kinds(fail(registry, same[0], now=14.0)) == ["evicted"]  # type: ignore[arg-type]

    def test_two_instances_are_not_enough(self) -> None:
        """Two instances failing together are evicted."""
        registry = self.fleet((E1, E2))
        for url in (E1, E2):
            fail(registry, url, now=10.0)

        assert kinds(fail(registry, E1, now=14.0)) == ["evicted"]

    def test_who_was_removed_is_no_witness(self) -> None:
        """Failures of an instance that has left do not hold the evictions of others."""
        registry = self.fleet((E1, E2, E3))
        for url in (E1, E2, E3):
            fail(registry, url, now=10.0)
        registry.apply(Remove(url=E3), 11.0)

        assert kinds(fail(registry, E1, now=14.0)) == ["evicted"]

    def test_those_who_were_down_before_do_not_count(self) -> None:
        """Failures of evicted instances do not make ours look like the culprit."""
        registry = self.fleet((E1, E2, E3))
        fail(registry, E1, times=2, now=1.0)
        fail(registry, E2, times=2, now=2.0)
        for now in (10.0, 13.0):
            fail(registry, E1, now=now)
            fail(registry, E2, now=now)

        fail(registry, E3, now=13.0)
        assert kinds(fail(registry, E3, now=14.0)) == ["evicted"]


class TestLeaving:
    """Removal, drain and time."""

    def test_removal_is_at_once(self) -> None:
        """A removed instance gets no traffic from the same moment on."""
        registry = ready(new_registry(), spec())

        outcome = registry.apply(Remove(url=E1), 0.0)

        assert outcome.events[0].cause is RemovalCause.REMOVED
        assert registry.roster().members == ()

    def test_removing_one_role_leaves_the_others(self) -> None:
        """A removal disturbs nobody else, and a second one is an error that changes nothing."""
        registry = ready(new_registry(), spec(P1, Role.PREFILL), spec(D1, Role.DECODE))
        registry.apply(Remove(url=P1), 0.0)

        with pytest.raises(UnknownInstance):
            registry.apply(Remove(url=P1), 0.0)

        assert [m.url for m in registry.roster().members] == [D1]

    def test_drain_waits_for_what_is_in_flight(self) -> None:
        """A draining instance leaves when its last call ends, and takes no new work before that."""
        registry = ready(new_registry(), spec())
        acquire(registry, E1)
        acquire(registry, E1)

        assert kinds(registry.apply(Drain(url=E1, deadline=30.0), 0.0)) == ["drain_started"]
        assert registry.roster().members == ()
        assert kinds(release(registry, E1)) == []
        last = release(registry, E1)

        assert (kinds(last), last.events[0].cause) == (["removed"], RemovalCause.DRAINED)

    def test_drain_of_an_idle_instance_ends_at_once(self) -> None:
        """With nothing in flight there is nothing to wait for."""
        registry = ready(new_registry(), spec())

        outcome = registry.apply(Drain(url=E1, deadline=30.0), 0.0)

        assert kinds(outcome) == ["drain_started", "removed"]

    def test_drain_ends_at_its_deadline(self) -> None:
        """A call that does not end cannot hold a draining instance for ever."""
        registry = ready(new_registry(), spec())
        acquire(registry, E1)
        registry.apply(Drain(url=E1, deadline=30.0), 0.0)

        assert kinds(registry.apply(Tick(), 29.9)) == []
        outcome = registry.apply(Tick(), 30.0)

        assert outcome.events[0].cause is RemovalCause.DRAIN_TIMEOUT
        assert outcome.events[0].in_flight == 1

    def test_probes_say_nothing_about_a_draining_instance(self) -> None:
        """A late probe neither readmits nor evicts what is draining."""
        registry = ready(new_registry(fail_threshold=1), spec())
        acquire(registry, E1)
        registry.apply(Drain(url=E1, deadline=30.0), 0.0)

        assert kinds(probe(registry, E1)) == kinds(fail(registry, E1)) == []
        assert state_of(registry, E1) is InstanceState.DRAINING

    def test_registering_a_draining_instance_does_not_stop_the_drain(self) -> None:
        """A worker that keeps announcing itself does not come back while it drains."""
        registry = ready(new_registry(), spec())
        acquire(registry, E1)
        registry.apply(Drain(url=E1, deadline=30.0), 0.0)

        assert kinds(register(registry, spec())) == []
        assert state_of(registry, E1) is InstanceState.DRAINING

    def test_evicted_is_forgotten_after_the_time_to_live(self) -> None:
        """What stays down is dropped, counted from its eviction."""
        registry = ready(new_registry(fail_threshold=1, ttl_s=900.0), spec())
        fail(registry, E1, now=100.0)

        assert registry.next_due() == 1000.0
        assert kinds(registry.apply(Tick(), 999.9)) == []
        outcome = registry.apply(Tick(), 1000.0)

        assert outcome.events[0].cause is RemovalCause.EXPIRED

    def test_pending_is_forgotten_after_the_time_to_live(self) -> None:
        """What never answers is dropped too."""
        registry = new_registry(ttl_s=10.0)
        register(registry, spec(), now=5.0)

        assert kinds(registry.apply(Tick(), 15.0)) == ["removed"]

    def test_time_to_live_of_zero_keeps_for_ever(self) -> None:
        """0 switches forgetting off."""
        registry = new_registry(ttl_s=0)
        register(registry, spec())

        assert registry.next_due() is None
        assert kinds(registry.apply(Tick(), 1e9)) == []


class TestStatic:
    """Instances of the command line."""

    def test_static_is_evicted_but_never_forgotten(self) -> None:
        """An instance of the command line is probed like others and stays known."""
        registry = ready(new_registry(fail_threshold=1, ttl_s=10.0), spec(static=True))

        assert kinds(fail(registry, E1, now=1.0)) == ["evicted"]
        assert kinds(registry.apply(Tick(), 1e9)) == []
        assert kinds(probe(registry, E1)) == ["readmitted"]

    def test_static_cannot_be_removed_drained_or_changed(self) -> None:
        """The API cannot contradict the command line."""
        registry = ready(new_registry(), spec(static=True))

        for command in (
            Remove(url=E1),
            Drain(url=E1, deadline=1.0),
            Register(spec=spec(labels=(("group", "a"),))),
        ):
            with pytest.raises(StaticInstance):
                registry.apply(command, 0.0)

    def test_registering_it_as_it_is_is_no_change(self) -> None:
        """A launcher may announce what the command line already names."""
        registry = ready(new_registry(), spec(static=True))

        assert kinds(register(registry, spec())) == []
        assert registry.find(E1, 0.0).spec.static  # type: ignore[union-attr]


class TestInFlight:
    """Counts of calls."""

    def test_counts_outlive_the_record(self) -> None:
        """A call that ends after its instance was removed and registered again makes no count negative."""
        registry = ready(new_registry(), spec())
        acquire(registry, E1)
        registry.apply(Remove(url=E1), 0.0)
        ready(registry, spec())

        assert registry.in_flight(E1) == 1
        release(registry, E1, generation=1)
        release(registry, E1, generation=1)

        assert registry.in_flight(E1) == 0

    def test_a_release_without_its_acquire_is_ignored(self) -> None:
        """Somebody else's call is not released by mistake."""
        registry = ready(new_registry(), spec())
        acquire(registry, E1, generation=1)

        release(registry, E1, generation=2)

        assert registry.in_flight(E1) == 1


class TestRoster:
    """What routing sees."""

    def test_same_object_until_something_changes(self) -> None:
        """Taking the roster on a request's path costs nothing."""
        registry = ready(new_registry(), spec())
        before = registry.roster()

        probe(registry, E1)
        acquire(registry, E1)

        assert registry.roster() is before

    def test_an_instance_that_is_not_ready_changes_nothing(self) -> None:
        """Routing sees no new roster when something joins that it cannot use yet."""
        registry = ready(new_registry(), spec(E1), spec(PD1, Role.PREFILL_DECODE))
        before = registry.roster()

        register(registry, spec(E2))

        assert registry.roster() is before

    def test_version_grows_with_each_change(self) -> None:
        """A new roster has a higher version."""
        registry = ready(new_registry(fail_threshold=1), spec(E1), spec(E2))
        before = registry.roster()
        fail(registry, E1)

        assert registry.roster().version > before.version

    def test_topology_counts_everybody(self) -> None:
        """The topology does not flap when an instance is evicted."""
        registry = ready(new_registry(fail_threshold=1), spec(), spec(PD1, Role.PREFILL_DECODE))
        fail(registry, E1)

        assert registry.roster().topology is Topology.E_PD

    def test_models_are_learnt_and_the_launchers_word_wins(self) -> None:
        """An instance serves what it reports, unless its launcher named a model."""
        registry = new_registry()
        register(registry, spec(PD1, Role.PREFILL_DECODE))
        register(registry, spec(PD2, Role.PREFILL_DECODE, model="given"))

        outcome = probe(registry, PD1, models=frozenset({"learnt"}))
        probe(registry, PD2, models=frozenset({"learnt"}))

        assert kinds(outcome) == [EventKind.MODELS_LEARNT, EventKind.READY]
        assert [m.models for m in registry.roster().members] == [
            frozenset({"learnt"}),
            frozenset({"given"}),
        ]
        assert registry.roster().known_models == ("given", "learnt")

    def test_an_update_keeps_the_models_until_they_are_asked_again(self) -> None:
        """A changed label does not make an instance serve any model for a moment."""
        registry = new_registry()
        register(registry, spec())
        probe(registry, E1, models=frozenset({"m"}))

        register(registry, spec(labels=(("group", "a"),)))

        assert registry.roster().members[0].models == frozenset({"m"})
