"""The registry's decisions about who is in it and who gets traffic."""

from __future__ import annotations

import pytest

from epdctl.domain import InstanceState, Role, Topology
from epdctl.errors import RoleChange, StaticInstance, TopologyConflict, UnknownInstance
from epdctl.registry.commands import Drain, EventKind, Register, RemovalCause, Remove, Tick
from tests.unit.registry.build import (
    D1,
    E1,
    E2,
    E3,
    P1,
    PD1,
    PD2,
    acquire,
    fail,
    kinds,
    new_registry,
    probe,
    ready,
    register,
    release,
    spec,
    state_of,
)

pytestmark = pytest.mark.unit


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
