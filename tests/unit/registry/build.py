"""Short ways to build what registry tests talk about."""

from __future__ import annotations

from typing import Any

from epdctl.domain import InstanceSpec, InstanceState, InstanceUrl, Observation, ProbeOutcome, Role
from epdctl.health.verdict import VerdictPolicy
from epdctl.registry.commands import Acquire, Observe, Outcome, ProbeReport, Register, Release
from epdctl.registry.registry import Registry, RegistryPolicy
from epdctl.registry.snapshot import Member

E1, E2, E3, E4 = (InstanceUrl(f"http://e{n}:8001") for n in (1, 2, 3, 4))
P1, D1, PD1, PD2 = (InstanceUrl(f"http://{name}:8002") for name in ("p1", "d1", "pd1", "pd2"))


def spec(url: InstanceUrl = E1, role: Role = Role.ENCODE, **fields: Any) -> InstanceSpec:
    """Return what a launcher says about an instance."""
    return InstanceSpec(url=url, role=role, **fields)


def member(url: InstanceUrl = E1, role: Role = Role.ENCODE, **fields: Any) -> Member:
    """Return a ready instance as routing sees it."""
    return Member(url=url, role=role, generation=fields.pop("generation", 1), **fields)


def new_registry(
    *, fail_threshold: int = 3, rise_threshold: int = 1, ttl_s: float = 900.0, window_s: float = 5.0
) -> Registry:
    """Return an empty registry."""
    verdict = VerdictPolicy(fail_threshold=fail_threshold, rise_threshold=rise_threshold)
    return Registry(RegistryPolicy(verdict=verdict, ttl_s=ttl_s, window_s=window_s))


def register(registry: Registry, instance: InstanceSpec, now: float = 0.0) -> Outcome:
    """Register `instance`."""
    return registry.apply(Register(spec=instance), now)


def probe(
    registry: Registry,
    url: InstanceUrl,
    outcome: ProbeOutcome = ProbeOutcome.HEALTHY,
    now: float = 0.0,
    *,
    generation: int | None = None,
    models: frozenset[str] | None = None,
) -> Outcome:
    """Report a probe about the present generation, or about `generation`."""
    view = registry.find(url, now)
    asked = generation if generation is not None else view.generation if view else 1
    report = ProbeReport(
        url=url, generation=asked, outcome=outcome, latency_s=0.01, at=1000.0 + now, error=None, models=models
    )
    return registry.apply(report, now)


def fail(registry: Registry, url: InstanceUrl, times: int = 1, now: float = 0.0) -> Outcome:
    """Report `times` unhealthy probes and return the last outcome."""
    outcomes = [probe(registry, url, ProbeOutcome.UNHEALTHY, now) for _ in range(times)]
    return outcomes[-1]


def observe(
    registry: Registry,
    url: InstanceUrl,
    observation: Observation = Observation.UNREACHABLE,
    now: float = 0.0,
    *,
    generation: int = 1,
) -> Outcome:
    """Report evidence from traffic."""
    return registry.apply(Observe(url=url, generation=generation, observation=observation), now)


def acquire(registry: Registry, url: InstanceUrl, generation: int = 1) -> Outcome:
    """Count one call more."""
    return registry.apply(Acquire(url=url, generation=generation), 0.0)


def release(registry: Registry, url: InstanceUrl, generation: int = 1, now: float = 0.0) -> Outcome:
    """Count one call less."""
    return registry.apply(Release(url=url, generation=generation), now)


def ready(registry: Registry, *instances: InstanceSpec, now: float = 0.0) -> Registry:
    """Register `instances` and let each pass its first probe."""
    for instance in instances:
        register(registry, instance, now)
        probe(registry, instance.url, now=now)
    return registry


def state_of(registry: Registry, url: InstanceUrl, now: float = 0.0) -> InstanceState | None:
    """Return the state of `url`, None when it is not registered."""
    view = registry.find(url, now)
    return None if view is None else view.state


def kinds(outcome: Outcome) -> list[str]:
    """Return the kinds of the events of `outcome`."""
    return [event.kind.value for event in outcome.events]
