"""What is known of one request: the line that is logged, and the numbers that are counted, when it ends.

Rules of this file: every request ends in exactly one `finish`, with one outcome of a fixed set. No media,
key, query string or prompt gets in here; instances are named by URL in the log, never in a metric.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from time import perf_counter

import structlog
from prometheus_client import Counter

from epdctl.domain import InstanceUrl, Stage, Topology
from epdctl.metrics import ControlMetrics

OK, CLIENT_DISCONNECT, ABORTED, INTERNAL = "ok", "client_disconnect", "aborted", "internal"
"""Outcomes of a request; besides these, the code of the error that it ended with."""

CANCELLED = "cancelled"
"""Outcome of a leg that was given up; besides it, `ok` and the kinds of failure."""


@dataclass(slots=True, kw_only=True)
class Leg:
    """One call to an instance that has ended."""

    stage: Stage
    url: InstanceUrl
    elapsed_s: float
    outcome: str


@dataclass(slots=True, kw_only=True)
class Record:
    """One request while it runs."""

    request_id: str
    route: str
    started_at: float = field(default_factory=perf_counter)
    topology: Topology = Topology.EMPTY
    items: int = 0
    attempts: int = 0
    legs: list[Leg] = field(default_factory=list)
    status: int = 0
    outcome: str = INTERNAL
    error_code: str | None = None


class RequestLog:
    """Writes finished requests to the log and the metrics."""

    def __init__(self, metrics: ControlMetrics) -> None:
        self._metrics = metrics
        self._counters: dict[tuple[str, Topology, str], Counter] = {}
        self._log = structlog.get_logger()

    def finish(self, record: Record) -> None:
        """Count `record` and log its line."""
        self._counter(record).inc()
        facts = {"error_code": record.error_code} if record.error_code else {}
        self._log.info(
            "request_finished",
            request_id=record.request_id,
            route=record.route,
            topology=record.topology.value,
            status=record.status,
            outcome=record.outcome,
            attempts=record.attempts,
            items=record.items,
            elapsed_s=round(perf_counter() - record.started_at, 6),
            stages=[
                {
                    "stage": leg.stage.value,
                    "instance": leg.url,
                    "elapsed_s": round(leg.elapsed_s, 6),
                    "outcome": leg.outcome,
                }
                for leg in record.legs
            ],
            **facts,
        )

    def _counter(self, record: Record) -> Counter:
        """Return the counter of a record's labels; looking one up by labels costs more than counting."""
        key = (record.route, record.topology, record.outcome)
        if key not in self._counters:
            self._counters[key] = self._metrics.requests.labels(*key)
        return self._counters[key]
