"""Turns registry events into log lines and counters: each event once, and nowhere else.

Rules of this file: one line an event, named `instance_<what happened>`; evictions and what costs capacity are
warnings. URLs are logged without anything but scheme, host, port and path: they carry no user info or query.
"""

from __future__ import annotations

import structlog

from epdctl.domain import InstanceState, InstanceUrl, Role
from epdctl.metrics import ControlMetrics
from epdctl.registry.commands import Event, EventKind, RemovalCause

_WARNINGS = frozenset({EventKind.EVICTED, EventKind.EVICTIONS_HELD})
_WARNING_CAUSES = frozenset({RemovalCause.EXPIRED, RemovalCause.DRAIN_TIMEOUT})


class EventSink:
    """Writes events to the log and to the metrics."""

    def __init__(self, metrics: ControlMetrics) -> None:
        self._metrics = metrics
        self._log = structlog.get_logger()
        self._shown: dict[InstanceUrl, tuple[Role, InstanceState]] = {}
        for role in Role:
            for state in InstanceState:
                metrics.instances.labels(role=role, state=state).set(0)

    def publish(self, event: Event) -> None:
        """Log and count one event."""
        self._metrics.transitions.labels(role=event.role, event=event.kind).inc()
        is_warning = event.kind in _WARNINGS or event.cause in _WARNING_CAUSES
        write = self._log.warning if is_warning else self._log.info
        write(_name(event), instance=event.url, role=event.role, generation=event.generation, **_facts(event))
        self._show_state(event)

    def _show_state(self, event: Event) -> None:
        """Move the instance to its present place in the gauge of instances by role and state."""
        before = self._shown.pop(event.url, None)
        if before is not None:
            self._metrics.instances.labels(*before).dec()
        if event.kind is not EventKind.REMOVED:
            self._shown[event.url] = (event.role, event.state)
            self._metrics.instances.labels(event.role, event.state).inc()


def _name(event: Event) -> str:
    return event.kind if event.kind is EventKind.EVICTIONS_HELD else f"instance_{event.kind}"


def _facts(event: Event) -> dict[str, object]:
    match event.kind:
        case EventKind.EVICTED:
            return {"failures": event.failures, "last": event.error}
        case EventKind.EVICTIONS_HELD:
            return {"why": "several instances on several hosts fail at once: own trouble suspected"}
        case EventKind.REMOVED:
            return {"cause": event.cause, "state": event.state, "in_flight": event.in_flight}
        case EventKind.DRAIN_STARTED:
            return {"in_flight": event.in_flight}
        case EventKind.MODELS_LEARNT:
            return {"models": event.models}
        case _:
            return {"state": event.state}
