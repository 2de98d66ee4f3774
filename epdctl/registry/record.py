"""What the registry knows about one instance.

Rules of this file: plain state without decisions; only `registry.Registry` changes it. What the outside sees
is an `InstanceView`, a copy.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from epdctl.domain import InstanceSpec, InstanceState, ProbeOutcome
from epdctl.health.verdict import History
from epdctl.registry.snapshot import Member


@dataclass(frozen=True, slots=True, kw_only=True)
class LastProbe:
    """The latest probe; `at` is wall-clock seconds."""

    outcome: ProbeOutcome
    at: float
    latency_s: float
    error: str | None = None


@dataclass(slots=True, kw_only=True)
class Record:
    """One instance: what its launcher said, where it is in its life, and what was seen of it."""

    spec: InstanceSpec
    state: InstanceState
    generation: int
    since: float
    history: History = field(default_factory=History)
    learnt_models: frozenset[str] | None = None
    last_probe: LastProbe | None = None
    drain_deadline: float | None = None
    probes: dict[ProbeOutcome, int] = field(default_factory=dict)
    leases: int = 0
    unreachable: int = 0

    def models(self) -> frozenset[str] | None:
        """Return what it serves: the model its launcher named, else what it reported, else None for any."""
        return frozenset({self.spec.model}) if self.spec.model is not None else self.learnt_models

    def member(self) -> Member:
        """Return the record as routing sees it."""
        spec = self.spec
        return Member(
            url=spec.url,
            role=spec.role,
            generation=self.generation,
            dp_size=spec.dp_size,
            ec_zmq_addrs=spec.ec_zmq_addrs,
            models=self.models(),
            group=spec.label("group"),
            kv_connector=spec.label("kv_connector"),
            kv_bootstrap_addr=spec.kv_bootstrap_addr,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceView:
    """A copy of a record for people and for the health loop; `in_state_s` is the time spent in `state`."""

    spec: InstanceSpec
    state: InstanceState
    generation: int
    in_state_s: float
    in_flight: int
    consecutive_failures: int
    probe_failures: int
    models: tuple[str, ...]
    last_probe: LastProbe | None
    probes: tuple[tuple[ProbeOutcome, int], ...]
    leases: int
    unreachable: int
