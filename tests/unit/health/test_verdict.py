"""What a run of results says."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epdctl.domain import Observation, ProbeOutcome
from epdctl.health.verdict import History, Verdict, VerdictPolicy, judge_observation, judge_probe

pytestmark = pytest.mark.unit

HEALTHY, UNHEALTHY, INCONCLUSIVE = ProbeOutcome.HEALTHY, ProbeOutcome.UNHEALTHY, ProbeOutcome.INCONCLUSIVE
POLICY = VerdictPolicy(fail_threshold=4, rise_threshold=2)


def failures(count: int) -> History:
    """Return a history of `count` failed probes."""
    return History(probe_failures=count)


class TestEviction:
    """Who goes down."""

    def test_below_threshold_keeps_traffic(self) -> None:
        """An instance that failed fewer probes than the threshold still receives work."""
        assert judge_probe(failures(2), UNHEALTHY, POLICY) == (failures(3), Verdict.UNCHANGED)

    def test_at_threshold_goes_down(self) -> None:
        """The threshold itself evicts."""
        assert judge_probe(failures(3), UNHEALTHY, POLICY) == (failures(4), Verdict.DOWN)

    def test_own_trouble_counts_for_nothing(self) -> None:
        """A probe we could not carry out neither evicts nor heals."""
        assert judge_probe(failures(3), INCONCLUSIVE, POLICY) == (failures(3), Verdict.UNCHANGED)

    def test_traffic_and_probes_add_up(self) -> None:
        """Evidence of both kinds makes one run."""
        history = History(probe_failures=2, traffic_failures=1)

        assert judge_observation(history, Observation.UNREACHABLE, POLICY)[1] is Verdict.DOWN


class TestReadmission:
    """Who comes back."""

    def test_rise_threshold_in_a_row(self) -> None:
        """One healthy probe is not enough when two are asked for."""
        history, first = judge_probe(failures(9), HEALTHY, POLICY)
        _, second = judge_probe(history, HEALTHY, POLICY)

        assert (first, second) == (Verdict.UNCHANGED, Verdict.UP)

    def test_a_failure_starts_the_count_again(self) -> None:
        """Healthy probes count only in a row."""
        history, _ = judge_probe(failures(9), HEALTHY, POLICY)
        history, _ = judge_probe(history, UNHEALTHY, POLICY)

        assert judge_probe(history, HEALTHY, POLICY)[1] is Verdict.UNCHANGED


class TestTraffic:
    """What requests say."""

    def test_an_answer_clears_traffic_only(self) -> None:
        """Answered requests do not clear failed probes."""
        history = History(probe_failures=2, traffic_failures=1)

        assert judge_observation(history, Observation.RESPONDED, POLICY) == (failures(2), Verdict.UNCHANGED)

    def test_a_healthy_probe_clears_both(self) -> None:
        """A healthy probe ends the run of failures, wherever they came from."""
        history = History(probe_failures=2, traffic_failures=1)

        assert judge_probe(history, HEALTHY, POLICY)[0].failures == 0


@given(st.lists(st.sampled_from(list(ProbeOutcome)), max_size=40), st.integers(1, 5), st.integers(1, 5))
def test_down_exactly_after_the_threshold_in_a_row(
    outcomes: list[ProbeOutcome], fail_threshold: int, rise_threshold: int
) -> None:
    """Whatever came before, DOWN is said when, and only when, the last conclusive results all failed."""
    policy = VerdictPolicy(fail_threshold=fail_threshold, rise_threshold=rise_threshold)
    history, verdict = History(), Verdict.UNCHANGED
    for outcome in outcomes:
        history, verdict = judge_probe(history, outcome, policy)

    conclusive = [outcome for outcome in outcomes if outcome is not INCONCLUSIVE]
    last_counts = bool(outcomes) and outcomes[-1] is not INCONCLUSIVE
    run = conclusive[-fail_threshold:]
    is_down = last_counts and len(run) == fail_threshold and set(run) == {UNHEALTHY}
    rise = conclusive[-rise_threshold:]
    is_up = last_counts and len(rise) == rise_threshold and set(rise) == {HEALTHY}
    assert (verdict is Verdict.DOWN, verdict is Verdict.UP) == (is_down, is_up)
