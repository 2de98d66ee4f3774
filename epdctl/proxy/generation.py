"""One generation request at the edge: let in, turned into a job, served, and recorded once.

Rules of this file:
- Every request that gets here ends in exactly one record, with a true outcome, also when it is cancelled.
- A permit is held until the response body is out.
- When the process leaves, what has not started is refused with 503, and a stream ends with an error event.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import structlog
from aiohttp import web

from epdctl.domain import Topology
from epdctl.errors import EpdError, InvalidRequest, ShuttingDown
from epdctl.http_errors import REQUEST_ID, RESPONSE_STARTED
from epdctl.metrics import ControlMetrics
from epdctl.proxy.admission import Admission
from epdctl.proxy.content import Limits, Request
from epdctl.proxy.delivery import Delivery
from epdctl.proxy.headers import SESSION_HEADER, forwarded_headers, routing_headers_in
from epdctl.proxy.intake import DataPlaneKeys, read_body
from epdctl.proxy.job import Job
from epdctl.proxy.naming import Naming, uuids_of
from epdctl.proxy.pipeline import Pipeline
from epdctl.proxy.ports import RoutingPort
from epdctl.proxy.record import CLIENT_DISCONNECT, Record, RequestLog
from epdctl.proxy.slices import has_value

_AFFINITY_BYTES = 1024
_LEAVE_TIMEOUT_S = 2.0

Parse = Callable[[bytes | bytearray, Limits, bytes], Request]


@dataclass(frozen=True, slots=True, kw_only=True)
class IntakeRules:
    """What a request is held against, and what is worked out for it.

    `token` is this process's placeholder. `rewrites` is off with `--no-rewrite`; `hashes_items` and
    `finds_affinity` say whether any policy or body needs those.
    """

    limits: Limits
    token: bytes
    max_body_bytes: int
    idle_s: float
    batch_limit: int
    rewrites: bool
    hashes_items: bool
    finds_affinity: bool
    logs_arrivals: bool


class Generation:
    """Serves `/v1/chat/completions` and `/v1/completions`."""

    def __init__(
        self,
        *,
        rules: IntakeRules,
        keys: DataPlaneKeys,
        admission: Admission,
        naming: Naming,
        pipeline: Pipeline,
        routing: RoutingPort,
        metrics: ControlMetrics,
        requests: RequestLog,
    ) -> None:
        self._rules = rules
        self._keys = keys
        self._admission = admission
        self._naming = naming
        self._pipeline = pipeline
        self._routing = routing
        self._dropped = metrics.dropped_client_params
        self._requests = requests
        self._log = structlog.get_logger()
        self._running: set[asyncio.Task[object]] = set()
        self._is_leaving = False

    async def leave(self) -> None:
        """End what still runs: streams with an error event, the rest with 503."""
        self._is_leaving = True
        running = list(self._running)
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running, timeout=_LEAVE_TIMEOUT_S)

    async def serve(self, request: web.Request, route: str, parse: Parse) -> web.StreamResponse:
        """Serve one request; raises EpdError when nothing was sent."""
        record = Record(request_id=request[REQUEST_ID], route=route)
        if self._rules.logs_arrivals:
            self._log.info("request_received", route=route)
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        try:
            return await self._admitted(request, parse, record)
        except EpdError as error:
            record.status, record.outcome, record.error_code = error.http_status, error.code, error.code
            raise
        finally:
            self._running.discard(task)
            if record.topology is Topology.EMPTY:
                record.topology = self._routing.roster().topology
            self._requests.finish(record)

    async def _admitted(self, request: web.Request, parse: Parse, record: Record) -> web.StreamResponse:
        authorization = request.headers.get("Authorization")
        self._keys.check(authorization)
        try:
            await self._admission.enter()
            try:
                job = await self._take_in(request, parse, record, authorization)
                delivery = Delivery(request, record.request_id, idle_s=self._rules.idle_s)
                return await self._pipeline.serve(job, delivery)
            finally:
                self._admission.leave()
        except asyncio.CancelledError:
            if request.transport is None or request.transport.is_closing():
                record.outcome = CLIENT_DISCONNECT
            elif self._is_leaving and not request.get(RESPONSE_STARTED):
                raise ShuttingDown("this proxy is shutting down: send the request to another one") from None
            raise

    async def _take_in(
        self, request: web.Request, parse: Parse, record: Record, authorization: str | None
    ) -> Job:
        rules = self._rules
        body = await read_body(request, limit=rules.max_body_bytes, idle_s=rules.idle_s)
        content = parse(body, rules.limits, rules.token)
        record.items = len(content.items)
        self._refuse_many_prompts(content)
        for name in (*content.dropped, *routing_headers_in(request.headers)):
            self._dropped.labels(name).inc()
        digests, uuids = await self._named(content) if content.items else ({}, {})
        upstream = self._keys.upstream_authorization(authorization)
        return Job(
            request=content,
            path=record.route,
            request_id=record.request_id,
            headers=forwarded_headers(request.headers, upstream),
            record=record,
            affinity=_affinity(request, content) if rules.finds_affinity else None,
            uuids=uuids if rules.rewrites else None,
            item_keys={index: name.encode() for index, name in digests.items()} if digests else {},
            batch_limit=rules.batch_limit,
        )

    async def _named(self, content: Request) -> tuple[dict[int, str], dict[int, str]]:
        """Return the digests and the uuids of the items, by index."""
        digests = await self._naming.digests(content) if self._rules.hashes_items else {}
        return digests, uuids_of(content, digests) if self._rules.rewrites else {}

    def _refuse_many_prompts(self, content: Request) -> None:
        if content.prompt_count > 1 and self._routing.roster().topology is Topology.E_P_D:
            raise InvalidRequest(
                "several prompts in one request cannot be handed from prefill to decode: send one prompt a "
                "request",
                param="prompt",
            )


def _affinity(request: web.Request, content: Request) -> bytes:
    """Return the key for consistent hashing: the session, the user, or how the prompt begins."""
    session = request.headers.get(SESSION_HEADER)
    if session is not None:
        return session.encode("utf-8", "surrogateescape")
    for name in ("user", "messages", "prompt"):
        if has_value(content.fields, name):
            return bytes(memoryview(content.fields[name])[:_AFFINITY_BYTES])
    return b""
