"""The data plane's HTTP edge: what clients of a fleet call.

Rules of this file:
- A handler takes a request in, hands it to the pipeline, and sees to it that it ends in one record.
- Errors before the first byte leave as exceptions, and `http_errors` turns them into answers; after it they
  are the delivery's affair.
- What is not served says so (501) and names the topology.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

import structlog
from aiohttp import web

from epdctl.config.serve import ServeSettings
from epdctl.domain import Topology
from epdctl.errors import EpdError, InvalidRequest, UnsupportedEndpoint
from epdctl.http_auth import ADMIN_HEADER, AdminKey
from epdctl.http_errors import REQUEST_ID
from epdctl.metrics import ControlMetrics
from epdctl.proxy.admission import Admission
from epdctl.proxy.content import Limits, Request, parse_chat, parse_completion
from epdctl.proxy.delivery import Delivery
from epdctl.proxy.ec_cancel import EcCanceller
from epdctl.proxy.fleet import Fleet
from epdctl.proxy.headers import SESSION_HEADER, forwarded_headers, routing_headers_in
from epdctl.proxy.intake import DataPlaneKeys, read_body
from epdctl.proxy.job import Job
from epdctl.proxy.legs import Legs, StageDeadlines
from epdctl.proxy.naming import Naming, uuids_of
from epdctl.proxy.pipeline import Pipeline
from epdctl.proxy.plan import Policies
from epdctl.proxy.ports import RoutingPort
from epdctl.proxy.record import CLIENT_DISCONNECT, Record, RequestLog
from epdctl.proxy.router import Router
from epdctl.proxy.slices import has_value
from epdctl.proxy.upstream import UpstreamClient
from epdctl.registry.policies import Policy
from epdctl.wire import encode_json

if TYPE_CHECKING:
    from pydantic import SecretStr

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_POSTED = frozenset({CHAT, COMPLETIONS, "/start_profile", "/stop_profile"})
_MAX_PROFILE_BYTES = 64 * 1024
_AFFINITY_BYTES = 1024
_JSON = {"Content-Type": "application/json"}

Parse = Callable[[bytes | bytearray, Limits, bytes], Request]


class ProxyApi:
    """The routes of the data plane; `start` and `close` frame the life of what they use."""

    def __init__(self, settings: ServeSettings, routing: RoutingPort, metrics: ControlMetrics) -> None:
        self._settings = settings
        self._routing = routing
        self._metrics = metrics
        self._timeouts = settings.timeouts()
        self._limits = Limits(max_items=settings.max_items, max_json_depth=settings.max_json_depth)
        self._keys = DataPlaneKeys(settings.data_plane_keys(), _reveal(settings.upstream_api_key))
        self._admin = AdminKey(_reveal(settings.admin_api_key))
        self._admission = Admission(
            limit=settings.max_concurrent_requests,
            queue_size=settings.queue_size,
            wait_s=self._timeouts.queue,
        )
        self._requests = RequestLog(metrics)
        self._token = secrets.token_hex(16).encode()
        self._hashes_items = (
            not settings.no_rewrite or Policy(settings.encode_policy) is Policy.CONSISTENT_HASHING
        )
        self._needs_affinity = Policy.CONSISTENT_HASHING in (settings.prefill_policy, settings.decode_policy)
        self._log = structlog.get_logger()

    async def run(self, app: web.Application) -> AsyncIterator[None]:
        """Own the client and the threads while the application runs (an aiohttp clean-up context)."""
        settings = self._settings
        client = UpstreamClient(connect_timeout_s=self._timeouts.connect, ca_file=settings.upstream_ca_file)
        deadlines = StageDeadlines(
            encode=self._timeouts.encode,
            prefill=self._timeouts.prefill,
            first_byte=self._timeouts.first_byte,
            idle=self._timeouts.idle,
        )
        policies = Policies(
            encode=Policy(settings.encode_policy),
            prefill=Policy(settings.prefill_policy),
            decode=Policy(settings.decode_policy),
        )
        canceller = EcCanceller()
        self._naming = Naming()
        self._fleet = Fleet(client)
        self._pipeline = Pipeline(
            client=client,
            legs=Legs(client, self._routing, self._metrics, deadlines),
            router=Router(self._routing, policies),
            routing=self._routing,
            canceller=canceller,
            metrics=self._metrics,
            kv_connector=settings.kv_connector,
            decode_retries=settings.decode_retries,
            idle_s=self._timeouts.idle,
        )
        yield
        await canceller.close()
        await client.close()
        self._naming.close()

    def add_routes(self, app: web.Application) -> None:
        """Add the routes, and last the one that catches all that is not served."""
        app.router.add_post(CHAT, self.chat)
        app.router.add_post(COMPLETIONS, self.completions)
        app.router.add_get("/v1/models", self.models)
        app.router.add_post("/start_profile", self.profile)
        app.router.add_post("/stop_profile", self.profile)
        app.router.add_route("*", "/v1/{tail:.*}", self.unsupported)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """Serve `POST /v1/chat/completions`."""
        return await self._generate(request, CHAT, parse_chat)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """Serve `POST /v1/completions`, text only."""
        return await self._generate(request, COMPLETIONS, parse_completion)

    async def models(self, request: web.Request) -> web.Response:
        """Serve `GET /v1/models`: the union over the instances; no rotation moves."""
        authorization = request.headers.get("Authorization")
        self._keys.check(authorization)
        upstream = self._keys.upstream_authorization(authorization)
        body = await self._fleet.models(self._routing.roster(), upstream)
        return web.Response(body=body, headers=_JSON)

    async def profile(self, request: web.Request) -> web.Response:
        """Serve `POST /start_profile` and `/stop_profile`: on every instance, with the admin key."""
        self._admin.check(request.headers.get(ADMIN_HEADER))
        body = await read_body(request, limit=_MAX_PROFILE_BYTES, idle_s=self._timeouts.idle)
        upstream = self._keys.upstream_authorization(None)
        results = await self._fleet.profile(
            self._routing.roster(), request.path, bytes(body) or b"{}", upstream
        )
        return web.Response(body=encode_json({"results": results}), headers=_JSON)

    async def unsupported(self, request: web.Request) -> web.StreamResponse:
        """Answer for every other path under `/v1/`."""
        if request.path in _POSTED:
            raise web.HTTPMethodNotAllowed(request.method, ["POST"])
        if ".." in request.path.split("/"):
            raise web.HTTPNotFound
        topology = self._routing.roster().topology
        raise UnsupportedEndpoint(
            f"this endpoint is not served on topology {topology.value}; served are {CHAT}, {COMPLETIONS} "
            "and /v1/models"
        )

    async def _generate(self, request: web.Request, route: str, parse: Parse) -> web.StreamResponse:
        request_id = request[REQUEST_ID]
        record = Record(request_id=request_id, route=route)
        if self._settings.log_requests:
            self._log.info("request_received", route=route)
        try:
            authorization = request.headers.get("Authorization")
            self._keys.check(authorization)
            await self._admission.enter()
            try:
                job = await self._take_in(request, route, parse, record, authorization)
                delivery = Delivery(request, request_id, idle_s=self._timeouts.idle)
                return await self._pipeline.serve(job, delivery)
            finally:
                self._admission.leave()
        except EpdError as error:
            record.status, record.outcome, record.error_code = error.http_status, error.code, error.code
            raise
        except asyncio.CancelledError:
            if request.transport is None or request.transport.is_closing():
                record.outcome = CLIENT_DISCONNECT
            raise
        finally:
            if record.topology is Topology.EMPTY:
                record.topology = self._routing.roster().topology
            self._requests.finish(record)

    async def _take_in(
        self,
        request: web.Request,
        route: str,
        parse: Parse,
        record: Record,
        authorization: str | None,
    ) -> Job:
        body = await read_body(request, limit=self._settings.max_body_bytes, idle_s=self._timeouts.idle)
        content = parse(body, self._limits, self._token)
        record.items = len(content.items)
        if content.prompt_count > 1 and self._routing.roster().topology is Topology.E_P_D:
            raise InvalidRequest(
                "several prompts in one request cannot be handed from prefill to decode: send one prompt a "
                "request",
                param="prompt",
            )
        for name in (*content.dropped, *routing_headers_in(request.headers)):
            self._metrics.dropped_client_params.labels(name).inc()
        digests = await self._naming.digests(content) if content.items and self._hashes_items else {}
        upstream = self._keys.upstream_authorization(authorization)
        return Job(
            request=content,
            path=route,
            request_id=request[REQUEST_ID],
            headers=forwarded_headers(request.headers, upstream),
            record=record,
            affinity=_affinity(request, content) if self._needs_affinity else None,
            uuids=None if self._settings.no_rewrite else uuids_of(content, digests),
            item_keys={index: name.encode() for index, name in digests.items()},
            batch_limit=self._settings.encoder_max_batch_size,
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


def _reveal(secret: SecretStr | None) -> str | None:
    return None if secret is None else secret.get_secret_value()


def add_proxy_routes(
    app: web.Application, *, settings: ServeSettings, routing: RoutingPort, metrics: ControlMetrics
) -> None:
    """Add the data plane to `app`: its routes, the 501 for the rest of `/v1/`, and what they need to run."""
    api = ProxyApi(settings, routing, metrics)
    app.cleanup_ctx.append(api.run)
    api.add_routes(app)
