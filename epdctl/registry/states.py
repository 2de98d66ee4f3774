"""The life of an instance, as a table: state x trigger.

Rules of this file: every change of an instance's state is a row here and nowhere else. A pair that is not in
the table changes nothing: verdicts race with everything else, and the table says which of them came too late.
"""

from __future__ import annotations

from enum import StrEnum

from epdctl.domain import InstanceState


class Trigger(StrEnum):
    """What can move an instance."""

    UP = "up"
    """Enough healthy probes in a row."""
    DOWN = "down"
    """Enough unhealthy results in a row."""
    DRAIN = "drain"
    """An operator asked that running work ends and no new work comes."""
    IDLE = "idle"
    """Nothing is in flight."""
    DEADLINE = "deadline"
    """The drain took too long."""
    EXPIRE = "expire"
    """Not ready for longer than the time to live."""
    REMOVE = "remove"
    """An operator asked for it."""


REMOVED = None
"""Where a row leads when the instance leaves the registry."""

TRANSITIONS: dict[tuple[InstanceState, Trigger], InstanceState | None] = {
    (InstanceState.PENDING, Trigger.UP): InstanceState.READY,
    (InstanceState.PENDING, Trigger.DRAIN): InstanceState.DRAINING,
    (InstanceState.PENDING, Trigger.EXPIRE): REMOVED,
    (InstanceState.PENDING, Trigger.REMOVE): REMOVED,
    (InstanceState.READY, Trigger.DOWN): InstanceState.EVICTED,
    (InstanceState.READY, Trigger.DRAIN): InstanceState.DRAINING,
    (InstanceState.READY, Trigger.REMOVE): REMOVED,
    (InstanceState.EVICTED, Trigger.UP): InstanceState.READY,
    (InstanceState.EVICTED, Trigger.DRAIN): InstanceState.DRAINING,
    (InstanceState.EVICTED, Trigger.EXPIRE): REMOVED,
    (InstanceState.EVICTED, Trigger.REMOVE): REMOVED,
    (InstanceState.DRAINING, Trigger.IDLE): REMOVED,
    (InstanceState.DRAINING, Trigger.DEADLINE): REMOVED,
    (InstanceState.DRAINING, Trigger.REMOVE): REMOVED,
}

PROBED_STATES = frozenset({InstanceState.PENDING, InstanceState.READY, InstanceState.EVICTED})
"""States in which an instance is probed."""


def applies(state: InstanceState, trigger: Trigger) -> bool:
    """Say whether `trigger` moves an instance in `state`."""
    return (state, trigger) in TRANSITIONS


def next_state(state: InstanceState, trigger: Trigger) -> InstanceState | None:
    """Return where `trigger` leads from `state`, REMOVED for out; KeyError for a pair not in the table."""
    return TRANSITIONS[state, trigger]
