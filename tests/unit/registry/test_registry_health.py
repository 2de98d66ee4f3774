"""The registry's decisions about health: what probes and traffic say of an instance, and our own trouble."""

from __future__ import annotations

import pytest

from epdctl.domain import InstanceState, Observation, ProbeOutcome, Role
from epdctl.registry.commands import Remove
from tests.unit.registry.build import (
    E1,
    E2,
    E3,
    E4,
    PD1,
    fail,
    kinds,
    new_registry,
    observe,
    probe,
    ready,
    register,
    spec,
    state_of,
)

pytestmark = pytest.mark.unit


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
