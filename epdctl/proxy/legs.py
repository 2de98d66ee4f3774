"""One call to one instance as a stage of a request: deadline, evidence, counters, and errors in our words.

Rules of this file:
- Every call ends in exactly one leg of the request's record, also when it is cancelled.
- Evidence for health is only what the transport says: refused, or lost before the first byte, is unreachable;
  an answer below 500 is a sign of life (reported once a second, it says nothing new more often).
- Whatever is not a usable answer leaves as `StageFailed`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from time import perf_counter

from epdctl.domain import InstanceUrl, Observation, Stage
from epdctl.errors import EpdError, UpstreamProtocol, UpstreamTimeout, UpstreamUnreachable
from epdctl.metrics import ControlMetrics
from epdctl.proxy.connection import CallFailed, Sink
from epdctl.proxy.headers import parse_retry_after
from epdctl.proxy.ports import RoutingPort
from epdctl.proxy.record import CANCELLED, OK, Leg, Record
from epdctl.proxy.retry import FailureKind, StageFailed, error_of_status, kind_of_status
from epdctl.proxy.slices import is_json_object
from epdctl.proxy.upstream import Answer, Call, OpenAnswer, UpstreamClient
from epdctl.registry.snapshot import Member

MAX_ERROR_BYTES = 1024 * 1024
_REPORT_EVERY_S = 1.0
_MAX_REPORTS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class StageDeadlines:
    """Seconds that the stages may take; `first_byte` is decode's headers, `idle` silence inside a body."""

    encode: float
    prefill: float
    first_byte: float
    idle: float


class Leases:
    """The instances that one attempt holds; each is given back once, at the latest by `close`."""

    def __init__(self, routing: RoutingPort) -> None:
        self._routing = routing
        self._held: list[Member] = []

    def take(self, member: Member) -> None:
        """Count one call more on `member`."""
        self._routing.acquire(member)
        self._held.append(member)

    def give_back(self, member: Member) -> None:
        """Count one call less on `member`, if it is held."""
        if member in self._held:
            self._held.remove(member)
            self._routing.release(member)

    def close(self) -> None:
        """Give back all that is still held."""
        while self._held:
            self._routing.release(self._held.pop())


class OpenLeg:
    """A call that is under way; `end` it once, whatever comes."""

    def __init__(self, meters: StageMeters, stage: Stage, member: Member, record: Record) -> None:
        self._meters = meters
        self._record = record
        self._is_open = True
        self.stage = stage
        self.member = member
        self.started_at = perf_counter()
        meters.in_flight[stage] += 1

    def end(self, outcome: str) -> None:
        """Count the leg and put it into the request's record."""
        if not self._is_open:
            return
        self._is_open = False
        elapsed_s = perf_counter() - self.started_at
        self._meters.in_flight[self.stage] -= 1
        self._meters.seconds[self.stage].observe(elapsed_s)
        if outcome == CANCELLED:
            self._meters.cancels[self.stage].inc()
        self._record.legs.append(
            Leg(stage=self.stage, instance=self.member.url, elapsed_s=round(elapsed_s, 6), outcome=outcome)
        )


class StageMeters:
    """The metrics of stages, looked up once; what is in flight is counted here and read by a scrape."""

    def __init__(self, metrics: ControlMetrics) -> None:
        self.seconds = {stage: metrics.stage_seconds.labels(stage.value) for stage in Stage}
        self.cancels = {stage: metrics.cancels.labels(stage.value) for stage in Stage}
        self.in_flight = dict.fromkeys(Stage, 0)
        for stage in Stage:
            metrics.in_flight.labels(stage.value).set_function(partial(self._in_flight, stage))

    def _in_flight(self, stage: Stage) -> float:
        return self.in_flight[stage]


class DecodeLeg:
    """Decode's answer: `whole`, or a stream that is still to be relayed; `close` it in any case."""

    def __init__(self, leg: OpenLeg, opened: OpenAnswer, whole: Answer | None) -> None:
        self._leg = leg
        self._opened = opened
        self.whole = whole
        self.url = leg.member.url
        self.status = opened.status
        self.headers = opened.headers

    async def relay(self, sink: Sink, *, idle_s: float) -> None:
        """Push the stream into `sink`; raises StageFailed, and what `sink` raises."""
        try:
            await self._opened.relay(sink, idle_s=idle_s)
        except CallFailed as failure:
            self._leg.end(failure.kind.value)
            raise _failed(self._leg, failure.kind) from failure

    def close(self, outcome: str) -> None:
        """End the leg; a connection whose answer was not read to its end is dropped."""
        self._opened.close()
        self._leg.end(outcome)


class Legs:
    """Calls to instances for one proxy."""

    def __init__(
        self,
        client: UpstreamClient,
        routing: RoutingPort,
        metrics: ControlMetrics,
        deadlines: StageDeadlines,
    ) -> None:
        self._client = client
        self._routing = routing
        self._deadlines = deadlines
        self._meters = StageMeters(metrics)
        self._next_report: dict[InstanceUrl, float] = {}

    async def ask(self, stage: Stage, member: Member, call: Call, record: Record) -> Answer:
        """Return the whole answer of an encode or prefill call; raises StageFailed."""
        timeout_s = self._deadlines.encode if stage is Stage.ENCODE else self._deadlines.prefill
        leg = OpenLeg(self._meters, stage, member, record)
        try:
            answer = await self._client.call(member.url, call, timeout_s=timeout_s)
            self._judge(leg, answer)
        except CallFailed as failure:
            raise self._fail(leg, failure) from failure
        except BaseException as error:
            leg.end(_outcome(error))
            raise
        leg.end(OK)
        return answer

    async def open_decode(self, member: Member, call: Call, record: Record) -> DecodeLeg:
        """Open decode and return its leg once its headers, and all but a stream's body, are there.

        Raises StageFailed.
        """
        leg = OpenLeg(self._meters, Stage.DECODE, member, record)
        opened = None
        try:
            opened = await self._client.open(member.url, call, timeout_s=self._deadlines.first_byte)
            whole = await self._read_unless_stream(opened)
            if whole is None:
                self._responded(member)
            else:
                self._judge(leg, whole)
                if not is_json_object(whole.body):
                    raise _failed(leg, FailureKind.PROTOCOL)
        except BaseException as error:
            if opened is not None:
                opened.close()
            if isinstance(error, CallFailed):
                raise self._fail(leg, error) from error
            leg.end(_outcome(error))
            raise
        return DecodeLeg(leg, opened, whole)

    async def _read_unless_stream(self, opened: OpenAnswer) -> Answer | None:
        if opened.status == 200 and opened.is_event_stream:
            return None
        if opened.status >= 300:
            return await opened.read(limit=MAX_ERROR_BYTES, timeout_s=self._deadlines.idle)
        return await opened.read(timeout_s=self._deadlines.idle)

    def _judge(self, leg: OpenLeg, answer: Answer) -> None:
        """Raise StageFailed unless the answer's status is a success."""
        if answer.status < 500:
            self._responded(leg.member)
        if 200 <= answer.status < 300:
            return
        if answer.status < 400:
            raise _failed(leg, FailureKind.PROTOCOL)
        raise StageFailed(
            leg.stage,
            kind_of_status(answer.status),
            error_of_status(
                leg.stage, answer.status, answer.body, answer.content_type, parse_retry_after(answer.headers)
            ),
            url=leg.member.url,
            status=answer.status,
        )

    def _responded(self, member: Member) -> None:
        """Report a sign of life: the first after trouble, and else one a second."""
        now = perf_counter()
        if now >= self._next_report.get(member.url, 0.0):
            if len(self._next_report) >= _MAX_REPORTS:
                self._next_report.clear()
            self._next_report[member.url] = now + _REPORT_EVERY_S
            self._routing.observe(member, Observation.RESPONDED)

    def _fail(self, leg: OpenLeg, failure: CallFailed) -> StageFailed:
        """End a leg whose call failed, tell what that says about the instance, and return our failure."""
        leg.end(failure.kind.value)
        if failure.kind is FailureKind.UNREACHABLE:
            self._next_report.pop(leg.member.url, None)
            self._routing.observe(leg.member, Observation.UNREACHABLE)
        return _failed(leg, failure.kind)


def _outcome(error: BaseException) -> str:
    return error.kind.value if isinstance(error, StageFailed) else CANCELLED


def _failed(leg: OpenLeg, kind: FailureKind) -> StageFailed:
    return StageFailed(leg.stage, kind, error_of_failure(leg.stage, kind), url=leg.member.url)


def error_of_failure(stage: Stage, kind: FailureKind) -> EpdError:
    """Return what the client is told when the call itself failed."""
    match kind:
        case FailureKind.TIMEOUT:
            return UpstreamTimeout(f"the {stage} instance did not answer in time")
        case FailureKind.PROTOCOL:
            return UpstreamProtocol(f"the {stage} instance's answer is not one")
        case FailureKind.BROKEN:
            return UpstreamUnreachable(f"the {stage} instance was lost within its answer")
        case _:
            return UpstreamUnreachable(f"the {stage} instance cannot be reached")
