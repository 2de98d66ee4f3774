"""What can be asked of the registry, and what it says has happened.

Rules of this file: frozen data, no behaviour. Times (`now`, `deadline`) are monotonic seconds and handed in;
`at` is wall-clock seconds, for people.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from epdctl.domain import InstanceSpec, InstanceState, InstanceUrl, Observation, ProbeOutcome, Role


@dataclass(frozen=True, slots=True, kw_only=True)
class Register:
    """Add an instance, or replace its fields; `generation` is set only when a stored one is restored."""

    spec: InstanceSpec
    generation: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Remove:
    """Forget an instance, whatever it is doing."""

    url: InstanceUrl


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain:
    """Give an instance no new work, and forget it when nothing is in flight or at `deadline`."""

    url: InstanceUrl
    deadline: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeReport:
    """The result of one probe of the record of `generation`; `models` None means they were not asked for."""

    url: InstanceUrl
    generation: int
    outcome: ProbeOutcome
    latency_s: float
    at: float
    error: str | None = None
    models: frozenset[str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Observe:
    """Evidence from traffic about the record of `generation`."""

    url: InstanceUrl
    generation: int
    observation: Observation


@dataclass(frozen=True, slots=True, kw_only=True)
class Acquire:
    """One more call in flight."""

    url: InstanceUrl
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """One call less in flight; also after the record is gone."""

    url: InstanceUrl
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """Time has passed: apply what is due."""


Command = Register | Remove | Drain | ProbeReport | Observe | Acquire | Release | Tick


class EventKind(StrEnum):
    """What has happened; the value is the label of `epdctl_instance_transitions_total`."""

    REGISTERED = "registered"
    UPDATED = "updated"
    READY = "ready"
    EVICTED = "evicted"
    READMITTED = "readmitted"
    DRAIN_STARTED = "drain_started"
    REMOVED = "removed"
    MODELS_LEARNT = "models_learnt"
    EVICTIONS_HELD = "evictions_held"


class RemovalCause(StrEnum):
    """Why an instance has left."""

    REMOVED = "removed"
    DRAINED = "drained"
    DRAIN_TIMEOUT = "drain_timeout"
    EXPIRED = "expired"


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One thing that has happened to one instance; `state` is the present one, or the one it left from."""

    kind: EventKind
    url: InstanceUrl
    role: Role
    generation: int
    state: InstanceState
    failures: int = 0
    error: str | None = None
    in_flight: int = 0
    cause: RemovalCause | None = None
    models: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a command has caused, in order."""

    events: tuple[Event, ...] = ()

    def has(self, kind: EventKind) -> bool:
        """Say whether an event of `kind` is among them."""
        return any(event.kind is kind for event in self.events)


NOTHING = Outcome()
