"""Who exists and who may get traffic.

Rules of this file:
- Every change of an instance's state happens in `Registry.apply`; the pairs that may change are in
  `states.TRANSITIONS`, nowhere else. What happened comes back as events; nothing here logs, counts or waits.
- It never reads a clock: callers pass `now` (monotonic seconds).
- A report about another generation than the record's changes nothing: it was asked about something that is
  gone. Generations of one URL never repeat, also not across a removal.
- An identical registration is no change at all: neither state nor failure count moves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from urllib.parse import urlsplit

from epdctl.domain import InstanceSpec, InstanceState, InstanceUrl, Observation, ProbeOutcome, Topology
from epdctl.errors import RoleChange, StaticInstance, UnknownInstance
from epdctl.health.trouble import OwnTrouble
from epdctl.health.verdict import Verdict, VerdictPolicy, judge_observation, judge_probe
from epdctl.registry.commands import (
    NOTHING,
    Acquire,
    Command,
    Drain,
    Event,
    EventKind,
    Observe,
    Outcome,
    ProbeReport,
    Register,
    Release,
    RemovalCause,
    Remove,
    Tick,
)
from epdctl.registry.leases import Leases
from epdctl.registry.record import InstanceView, LastProbe, Record
from epdctl.registry.snapshot import EMPTY_ROSTER, Roster
from epdctl.registry.states import Trigger, applies, next_state
from epdctl.registry.topology import check_join, derive_topology

_CAUSES = {
    Trigger.REMOVE: RemovalCause.REMOVED,
    Trigger.IDLE: RemovalCause.DRAINED,
    Trigger.DEADLINE: RemovalCause.DRAIN_TIMEOUT,
    Trigger.EXPIRE: RemovalCause.EXPIRED,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistryPolicy:
    """The registry's numbers: thresholds, `ttl_s` (0 keeps for ever) and the two windows of own trouble."""

    verdict: VerdictPolicy = field(default_factory=VerdictPolicy)
    ttl_s: float = 900.0
    window_s: float = 5.0
    result_s: float = 7.0


class Registry:
    """The machine. Feed it commands with the time, read its roster."""

    def __init__(self, policy: RegistryPolicy) -> None:
        self._policy = policy
        # The whole mutable state: records in the order of registration, calls in flight, and what was seen
        # lately of everybody together.
        self._records: dict[InstanceUrl, Record] = {}
        self._leases = Leases()
        self._generation_floor = 0
        self._trouble = OwnTrouble(policy.window_s, policy.result_s)
        self._roster = EMPTY_ROSTER
        self._roster_is_current = True
        self._handlers: dict[type[Command], Callable[..., Iterator[Event]]] = {
            Register: self._register,
            Remove: self._remove,
            Drain: self._drain,
            ProbeReport: self._probe_report,
            Observe: self._observe,
            Acquire: self._acquire,
            Release: self._release,
            Tick: self._tick,
        }

    def apply(self, command: Command, now: float) -> Outcome:
        """Carry out `command` and return what has happened.

        Raises:
            TopologyConflict, RoleChange, StaticInstance: a registration or removal that is not allowed.
            UnknownInstance: a removal or drain of a URL that is not registered.
        """
        events = tuple(self._handlers[type(command)](command, now))
        return Outcome(events=events) if events else NOTHING

    # --- reading -------------------------------------------------------------------------------------------

    def roster(self) -> Roster:
        """Return the ready instances; the same object until something about them changes."""
        if not self._roster_is_current:
            self._refresh_roster()
        return self._roster

    def in_flight(self, url: InstanceUrl) -> int:
        """Return the calls in flight on `url`, over all generations."""
        return self._leases.in_flight(url)

    def find(self, url: InstanceUrl, now: float) -> InstanceView | None:
        """Return a copy of the record of `url`."""
        record = self._records.get(url)
        return None if record is None else self._view(record, now)

    def views(self, now: float) -> tuple[InstanceView, ...]:
        """Return copies of all records, in the order of registration."""
        return tuple(self._view(record, now) for record in self._records.values())

    def topology(self) -> Topology:
        """Return what the registered instances add up to, whatever their states."""
        return derive_topology(record.spec.role for record in self._records.values())

    def next_due(self) -> float | None:
        """Return when the next `Tick` will have something to do."""
        return min(
            (due for record in self._records.values() if (due := self._due(record)) is not None), default=None
        )

    # --- commands from the outside -------------------------------------------------------------------------

    def _register(self, command: Register, now: float) -> Iterator[Event]:
        spec = command.spec
        known = self._records.get(spec.url)
        if known is not None:
            yield from self._register_again(known, spec)
            return
        check_join(spec.role, (record.spec.role for record in self._records.values()))
        record = Record(
            spec=spec,
            state=InstanceState.PENDING,
            generation=max(self._generation_floor + 1, command.generation or 0),
            since=now,
        )
        self._records[spec.url] = record
        self._roster_is_current = False
        yield self._event(EventKind.REGISTERED, record)

    def _register_again(self, record: Record, spec: InstanceSpec) -> Iterator[Event]:
        if spec.role is not record.spec.role:
            raise RoleChange(
                f"the instance is registered as {record.spec.role}: remove it before registering it as "
                f"{spec.role}",
                param="role",
            )
        if replace(spec, static=record.spec.static) == record.spec:
            return
        if record.spec.static:
            raise StaticInstance("the instance comes from the command line; change its flags instead")
        record.spec = spec
        record.generation += 1
        self._roster_is_current = False
        yield self._event(EventKind.UPDATED, record)

    def _remove(self, command: Remove, now: float) -> Iterator[Event]:
        yield from self._move(self._dynamic(command.url), Trigger.REMOVE, now)

    def _drain(self, command: Drain, now: float) -> Iterator[Event]:
        record = self._dynamic(command.url)
        if record.state is InstanceState.DRAINING:
            record.drain_deadline = command.deadline
            return
        record.drain_deadline = command.deadline
        yield from self._move(record, Trigger.DRAIN, now)
        if not self.in_flight(command.url):
            yield from self._move(record, Trigger.IDLE, now)

    def _dynamic(self, url: InstanceUrl) -> Record:
        record = self._records.get(url)
        if record is None:
            raise UnknownInstance("no instance is registered under this URL", param="url")
        if record.spec.static:
            raise StaticInstance(
                "the instance comes from the command line and stays as long as the proxy runs"
            )
        return record

    # --- evidence ------------------------------------------------------------------------------------------

    def _probe_report(self, report: ProbeReport, now: float) -> Iterator[Event]:
        record = self._current(report.url, report.generation)
        if record is None:
            return
        record.probes[report.outcome] = record.probes.get(report.outcome, 0) + 1
        record.last_probe = LastProbe(
            outcome=report.outcome, at=report.at, latency_s=report.latency_s, error=report.error
        )
        if report.models is not None:
            yield from self._learn(record, report.models)
        record.history, verdict = judge_probe(record.history, report.outcome, self._policy.verdict)
        if report.outcome is ProbeOutcome.HEALTHY:
            self._trouble.note_success(now)
        elif report.outcome is ProbeOutcome.UNHEALTHY:
            self._note_failure(record, now)
        yield from self._judge(record, verdict, now)

    def _observe(self, command: Observe, now: float) -> Iterator[Event]:
        record = self._current(command.url, command.generation)
        if record is None or record.state is not InstanceState.READY:
            return
        record.history, verdict = judge_observation(record.history, command.observation, self._policy.verdict)
        if command.observation is Observation.RESPONDED:
            self._trouble.note_success(now)
            return
        record.unreachable += 1
        self._note_failure(record, now)
        if self._is_last_ready(record):
            # Traffic may be wrong about it, and without it nothing is served for certain: probes decide.
            return
        yield from self._judge(record, verdict, now)

    def _judge(self, record: Record, verdict: Verdict, now: float) -> Iterator[Event]:
        if verdict is Verdict.UP:
            yield from self._move(record, Trigger.UP, now)
        elif verdict is Verdict.DOWN and record.state is InstanceState.READY:
            if self._trouble.begin_hold(now):
                yield self._event(EventKind.EVICTIONS_HELD, record)
            if not self._trouble.holds(now):
                yield from self._move(record, Trigger.DOWN, now)

    def _note_failure(self, record: Record, now: float) -> None:
        if record.state is InstanceState.READY:
            host = urlsplit(record.spec.url).hostname or ""
            self._trouble.note_failure(record.spec.url, host, now)

    def _learn(self, record: Record, models: frozenset[str]) -> Iterator[Event]:
        if models == record.learnt_models:
            return
        record.learnt_models = models
        self._roster_is_current = False
        yield self._event(EventKind.MODELS_LEARNT, record)

    def _current(self, url: InstanceUrl, generation: int) -> Record | None:
        record = self._records.get(url)
        return record if record is not None and record.generation == generation else None

    def _is_last_ready(self, record: Record) -> bool:
        return not any(
            other.state is InstanceState.READY and other.spec.role is record.spec.role and other is not record
            for other in self._records.values()
        )

    # --- calls in flight -----------------------------------------------------------------------------------

    def _acquire(self, command: Acquire, now: float) -> Iterator[Event]:
        self._leases.acquire(command.url, command.generation)
        record = self._current(command.url, command.generation)
        if record is not None:
            record.leases += 1
        return iter(())

    def _release(self, command: Release, now: float) -> Iterator[Event]:
        if not self._leases.release(command.url, command.generation):
            return
        record = self._records.get(command.url)
        if record is not None and not self.in_flight(command.url):
            yield from self._move(record, Trigger.IDLE, now)

    # --- time ----------------------------------------------------------------------------------------------

    def _tick(self, command: Tick, now: float) -> Iterator[Event]:
        for record in list(self._records.values()):
            due = self._due(record)
            if due is not None and due <= now:
                draining = record.state is InstanceState.DRAINING
                yield from self._move(record, Trigger.DEADLINE if draining else Trigger.EXPIRE, now)

    def _due(self, record: Record) -> float | None:
        if record.state is InstanceState.DRAINING:
            return record.drain_deadline
        if record.spec.static or self._policy.ttl_s <= 0 or not applies(record.state, Trigger.EXPIRE):
            return None
        return record.since + self._policy.ttl_s

    # --- the one place where a state changes ---------------------------------------------------------------

    def _move(self, record: Record, trigger: Trigger, now: float) -> Iterator[Event]:
        if not applies(record.state, trigger):
            return
        before, after = record.state, next_state(record.state, trigger)
        self._roster_is_current = False
        if after is None:
            self._forget(record)
            yield self._event(EventKind.REMOVED, record, cause=_CAUSES[trigger])
            return
        record.state, record.since = after, now
        yield self._event(_kind(before, after), record)

    def _forget(self, record: Record) -> None:
        del self._records[record.spec.url]
        self._trouble.forget(record.spec.url)
        self._generation_floor = max(self._generation_floor, record.generation)

    def _event(self, kind: EventKind, record: Record, *, cause: RemovalCause | None = None) -> Event:
        return Event(
            kind=kind,
            url=record.spec.url,
            role=record.spec.role,
            generation=record.generation,
            state=record.state,
            failures=record.history.failures,
            error=record.last_probe.error if record.last_probe else None,
            in_flight=self.in_flight(record.spec.url),
            cause=cause,
            models=tuple(sorted(record.models() or ())),
        )

    def _refresh_roster(self) -> None:
        members = tuple(
            record.member() for record in self._records.values() if record.state is InstanceState.READY
        )
        topology = self.topology()
        if (members, topology) != (self._roster.members, self._roster.topology):
            self._roster = Roster(version=self._roster.version + 1, topology=topology, members=members)
        self._roster_is_current = True

    def _view(self, record: Record, now: float) -> InstanceView:
        return InstanceView(
            spec=record.spec,
            state=record.state,
            generation=record.generation,
            in_state_s=now - record.since,
            in_flight=self.in_flight(record.spec.url),
            consecutive_failures=record.history.failures,
            probe_failures=record.history.probe_failures,
            models=tuple(sorted(record.models() or ())),
            last_probe=record.last_probe,
            probes=tuple(record.probes.items()),
            leases=record.leases,
            unreachable=record.unreachable,
        )


def _kind(before: InstanceState, after: InstanceState) -> EventKind:
    if after is InstanceState.READY:
        return EventKind.READMITTED if before is InstanceState.EVICTED else EventKind.READY
    return EventKind.EVICTED if after is InstanceState.EVICTED else EventKind.DRAIN_STARTED
