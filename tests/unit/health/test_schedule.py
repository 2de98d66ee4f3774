"""When an instance is probed next."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epdctl.domain import InstanceState as S
from epdctl.health.schedule import SchedulePolicy, next_due, spread_first

pytestmark = pytest.mark.unit

POLICY = SchedulePolicy(interval_s=5.0, timeout_s=2.0, backoff_cap_s=30.0)


def due(state: S, *, past: int = 0, finished: float = 100.1, policy: SchedulePolicy = POLICY) -> float | None:
    """Return when a probe that began at 100 is followed."""
    return next_due(
        started=100.0, finished=finished, state=state, failures_past_threshold=past, policy=policy
    )


@pytest.mark.parametrize(
    ("state", "past", "expected"),
    [
        (S.READY, 0, 105.0),
        (S.PENDING, 9, 105.0),
        (S.EVICTED, -3, 105.0),
        (S.EVICTED, 0, 105.0),
        (S.EVICTED, 1, 110.0),
        (S.EVICTED, 2, 120.0),
        (S.EVICTED, 3, 130.0),
        (S.EVICTED, 10_000, 130.0),
        (S.DRAINING, 0, None),
    ],
)
def test_delays(state: S, past: int, expected: float | None) -> None:
    """Ready and pending instances keep the interval, evicted ones back off up to the cap."""
    assert due(state, past=past) == expected


def test_a_slow_probe_does_not_shift_the_next() -> None:
    """The interval counts from the start of a probe; one that took longer is followed at once."""
    assert due(S.READY, finished=102.0) == 105.0
    assert due(S.READY, finished=107.0) == 107.0


def test_interval_of_zero_probes_only_who_is_not_ready() -> None:
    """0 leaves ready instances alone; pending and evicted ones would never come back otherwise."""
    policy = SchedulePolicy(interval_s=0.0)

    assert due(S.READY, policy=policy) is None
    assert due(S.PENDING, policy=policy) == 101.0
    assert due(S.EVICTED, past=2, policy=policy) == 104.0


def test_a_long_interval_is_not_cut_by_the_cap() -> None:
    """An operator who asks for rare probes gets them for evicted instances too."""
    assert due(S.EVICTED, past=3, policy=SchedulePolicy(interval_s=60.0)) == 160.0


@pytest.mark.parametrize(
    ("interval", "timeout", "window", "result"),
    [(5.0, 2.0, 5.0, 7.0), (0.2, 2.0, 2.0, 2.2), (0.0, 0.5, 1.0, 1.5)],
)
def test_windows_cover_a_result_of_everybody(
    interval: float, timeout: float, window: float, result: float
) -> None:
    """A window is a turn of probes, the time-out if that is longer; a result may come a time-out later."""
    policy = SchedulePolicy(interval_s=interval, timeout_s=timeout)

    assert (policy.window_s, policy.result_s) == (window, result)


@given(st.floats(0, 1, exclude_max=True))
def test_phases_spread_over_one_interval(phase: float) -> None:
    """A phase moves the first periodic probe within one interval."""
    assert 100.0 <= spread_first(100.0, phase, POLICY) <= 105.0
