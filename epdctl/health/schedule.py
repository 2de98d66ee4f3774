"""When an instance is probed next.

Rules of this file: pure; `now` and the random phase are handed in. Each instance has its own timer that
counts from the start of its probe, so a slow one delays nobody, itself included.
"""

from __future__ import annotations

from dataclasses import dataclass

from epdctl.domain import InstanceState
from epdctl.registry.states import PROBED_STATES

_FALLBACK_INTERVAL_S = 1.0
_MAX_DOUBLINGS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulePolicy:
    """Times between probes, in seconds.

    `interval_s` 0 means that a ready instance is not probed again; pending and evicted ones always are, or
    nobody would ever come back.
    """

    interval_s: float = 5.0
    timeout_s: float = 2.0
    backoff_cap_s: float = 30.0

    @property
    def effective_interval_s(self) -> float:
        """The interval for instances that have to be probed whatever the setting says."""
        return self.interval_s or _FALLBACK_INTERVAL_S

    @property
    def window_s(self) -> float:
        """One turn of probes: how long nobody may have answered before we suspect ourselves."""
        return max(self.effective_interval_s, self.timeout_s)

    @property
    def result_s(self) -> float:
        """The longest time in which every ready instance has had a result: a quick one, then a slow one."""
        return self.effective_interval_s + self.timeout_s


def spread_first(now: float, phase: float, policy: SchedulePolicy) -> float:
    """Return when the periodic probes begin; `phase` in [0, 1) keeps many instances from going in step."""
    return now + phase * policy.effective_interval_s


def next_due(
    *,
    started: float,
    finished: float,
    state: InstanceState,
    failures_past_threshold: int,
    policy: SchedulePolicy,
) -> float | None:
    """Return when to probe after a probe that ran from `started` to `finished`; None for no more on its own.

    Args:
        started: monotonic seconds.
        finished: monotonic seconds, not before `started`.
        state: the instance's state after the result.
        failures_past_threshold: unhealthy probes in a row beyond the one that evicts.
        policy: the times.
    """
    if state not in PROBED_STATES:
        return None
    if state is InstanceState.READY and not policy.interval_s:
        return None
    return max(started + _delay(state, failures_past_threshold, policy), finished)


def _delay(state: InstanceState, failures_past_threshold: int, policy: SchedulePolicy) -> float:
    interval = policy.effective_interval_s
    if state is not InstanceState.EVICTED:
        return interval
    doublings = min(max(failures_past_threshold, 0), _MAX_DOUBLINGS)
    return min(interval * 2.0**doublings, max(policy.backoff_cap_s, interval))
