"""What a run of results says about an instance.

Rules of this file: pure. Only runs of equal results count; a result that says nothing changes nothing. Probes
and traffic add to one run of failures, but an answer to a request clears only what traffic had added: it must
not silence a `/health` that says no.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from epdctl.domain import Observation, ProbeOutcome


class Verdict(StrEnum):
    """What the run says now."""

    UNCHANGED = "unchanged"
    UP = "up"
    DOWN = "down"


@dataclass(frozen=True, slots=True, kw_only=True)
class VerdictPolicy:
    """How many equal results in a row move an instance."""

    fail_threshold: int = 3
    rise_threshold: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """The run so far: unhealthy probes, failures seen by traffic since the last answer, healthy probes."""

    probe_failures: int = 0
    traffic_failures: int = 0
    successes: int = 0

    @property
    def failures(self) -> int:
        """Consecutive failures from both sources."""
        return self.probe_failures + self.traffic_failures


def judge_probe(history: History, outcome: ProbeOutcome, policy: VerdictPolicy) -> tuple[History, Verdict]:
    """Return the history with one probe added, and what it says."""
    if outcome is ProbeOutcome.INCONCLUSIVE:
        return history, Verdict.UNCHANGED
    if outcome is ProbeOutcome.UNHEALTHY:
        failed = replace(history, probe_failures=history.probe_failures + 1, successes=0)
        return failed, _down(failed, policy)
    healthy = History(successes=history.successes + 1)
    return healthy, Verdict.UP if healthy.successes >= policy.rise_threshold else Verdict.UNCHANGED


def judge_observation(
    history: History, observation: Observation, policy: VerdictPolicy
) -> tuple[History, Verdict]:
    """Return the history with evidence from traffic added, and what it says; traffic never readmits."""
    if observation is Observation.RESPONDED:
        cleared = replace(history, traffic_failures=0) if history.traffic_failures else history
        return cleared, Verdict.UNCHANGED
    failed = replace(history, traffic_failures=history.traffic_failures + 1, successes=0)
    return failed, _down(failed, policy)


def _down(history: History, policy: VerdictPolicy) -> Verdict:
    return Verdict.DOWN if history.failures >= policy.fail_threshold else Verdict.UNCHANGED
