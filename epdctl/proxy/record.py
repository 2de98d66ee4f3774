"""What is known of one request: the line that is logged, and the numbers that are counted, when it ends.

Rules of this file: every request ends in exactly one `finish`, with one outcome of a fixed set. No media,
key, query string or prompt gets in here; instances are named by URL in the log, never in a metric. Records
and legs are msgspec structs, because one of each is made for every request.
"""

from __future__ import annotations

import asyncio
import sys
from datetime import UTC, datetime
from time import perf_counter

import msgspec
import structlog
from prometheus_client import Counter

from epdctl.domain import InstanceUrl, Stage, Topology
from epdctl.metrics import ControlMetrics

OK, CLIENT_DISCONNECT, ABORTED, INTERNAL = "ok", "client_disconnect", "aborted", "internal"
"""Outcomes of a request; besides these, the code of the error that it ended with."""

CANCELLED = "cancelled"
"""Outcome of a leg that was given up; besides it, `ok` and the kinds of failure."""

_EVENT, _LEVEL = "request_finished", "info"


class Leg(msgspec.Struct, kw_only=True):
    """One call to an instance that has ended."""

    stage: Stage
    instance: InstanceUrl
    elapsed_s: float
    outcome: str


class Record(msgspec.Struct, kw_only=True):
    """One request while it runs."""

    request_id: str
    route: str
    started_at: float = msgspec.field(default_factory=perf_counter)
    topology: Topology = Topology.EMPTY
    items: int = 0
    attempts: int = 0
    legs: list[Leg] = msgspec.field(default_factory=list)
    status: int = 0
    outcome: str = INTERNAL
    error_code: str | None = None


class _Line(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A record as it is logged."""

    request_id: str
    route: str
    topology: Topology
    status: int
    outcome: str
    attempts: int
    items: int
    elapsed_s: float
    stages: list[Leg]
    event: str
    level: str
    timestamp: datetime
    error_code: str | None = None


class RequestLog:
    """Writes finished requests to the metrics and, when `is_on`, to the log.

    `as_json` lines are gathered over a turn of the event loop and leave in one write: a line through
    structlog and a system call for each would be a tenth of a text request's processor time.
    """

    def __init__(self, metrics: ControlMetrics, *, is_on: bool, as_json: bool) -> None:
        self._metrics = metrics
        self._is_on = is_on
        self._as_json = as_json
        self._counters: dict[tuple[str, Topology, str], Counter] = {}
        self._log = structlog.get_logger()
        self._encode = msgspec.json.Encoder().encode
        self._lines: list[bytes] = []

    def finish(self, record: Record) -> None:
        """Count `record` and log its line."""
        self._counter(record).inc()
        if not self._is_on:
            return
        line = _line(record)
        if self._as_json:
            self._write(self._encode(line))
        else:
            facts = msgspec.to_builtins(line)
            facts = {name: facts[name] for name in facts if name not in ("event", "level", "timestamp")}
            self._log.info(_EVENT, **facts)

    def _write(self, line: bytes) -> None:
        if not self._lines:
            asyncio.get_running_loop().call_soon(self._flush)
        self._lines += (line, b"\n")

    def _flush(self) -> None:
        lines, self._lines = self._lines, []
        sys.stderr.buffer.write(b"".join(lines))
        sys.stderr.buffer.flush()

    def _counter(self, record: Record) -> Counter:
        """Return the counter of a record's labels; looking one up by labels costs more than counting."""
        key = (record.route, record.topology, record.outcome)
        if key not in self._counters:
            self._counters[key] = self._metrics.requests.labels(*key)
        return self._counters[key]


def _line(record: Record) -> _Line:
    return _Line(
        request_id=record.request_id,
        route=record.route,
        topology=record.topology,
        status=record.status,
        outcome=record.outcome,
        attempts=record.attempts,
        items=record.items,
        elapsed_s=round(perf_counter() - record.started_at, 6),
        stages=record.legs,
        event=_EVENT,
        level=_LEVEL,
        timestamp=datetime.now(UTC),
        error_code=record.error_code,
    )
