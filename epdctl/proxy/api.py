"""The data plane's HTTP edge: the routes, and the objects behind them.

Rules of this file:
- What waits or talks to instances is made when the application starts and closed when it ends.
- Errors before the first byte leave as exceptions, and `http_errors` turns them into answers.
- What is not served says so (501) and names the topology.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from aiohttp import web

from epdctl.config.serve import ServeSettings
from epdctl.errors import UnsupportedEndpoint
from epdctl.http_auth import ADMIN_HEADER, AdminKey
from epdctl.http_errors import refuse_other_methods
from epdctl.metrics import ControlMetrics
from epdctl.proxy.admission import Admission
from epdctl.proxy.content import Limits, parse_chat, parse_completion
from epdctl.proxy.ec_cancel import EcCanceller
from epdctl.proxy.fleet import Fleet
from epdctl.proxy.generation import Generation, IntakeRules
from epdctl.proxy.intake import DataPlaneKeys, read_body
from epdctl.proxy.legs import Legs, StageDeadlines
from epdctl.proxy.naming import Naming
from epdctl.proxy.pipeline import Pipeline
from epdctl.proxy.plan import Policies
from epdctl.proxy.ports import RoutingPort
from epdctl.proxy.record import RequestLog
from epdctl.proxy.router import Router
from epdctl.proxy.upstream import UpstreamClient
from epdctl.registry.policies import Policy
from epdctl.wire import encode_json

if TYPE_CHECKING:
    from pydantic import SecretStr

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_MAX_PROFILE_BYTES = 64 * 1024
_JSON = {"Content-Type": "application/json"}


class ProxyApi:
    """The routes of the data plane."""

    def __init__(self, settings: ServeSettings, routing: RoutingPort, metrics: ControlMetrics) -> None:
        self._settings = settings
        self._routing = routing
        self._metrics = metrics
        self._timeouts = settings.timeouts()
        self._keys = DataPlaneKeys(settings.data_plane_keys(), _reveal(settings.upstream_api_key))
        self._admin = AdminKey(_reveal(settings.admin_api_key))

    def add_routes(self, app: web.Application) -> None:
        """Add the routes, and last the one that catches all that is not served."""
        app.cleanup_ctx.append(self._run)
        app.on_shutdown.append(self._leave)
        app.router.add_post(CHAT, self.chat)
        app.router.add_post(COMPLETIONS, self.completions)
        app.router.add_get("/v1/models", self.models)
        app.router.add_post("/start_profile", self.profile)
        app.router.add_post("/stop_profile", self.profile)
        app.router.add_route("*", "/v1/{tail:.*}", self.unsupported)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """Serve `POST /v1/chat/completions`."""
        return await self._generation.serve(request, CHAT, parse_chat)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """Serve `POST /v1/completions`, text only."""
        return await self._generation.serve(request, COMPLETIONS, parse_completion)

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
        await refuse_other_methods(request)
        if ".." in request.path.split("/"):
            raise web.HTTPNotFound
        topology = self._routing.roster().topology
        raise UnsupportedEndpoint(
            f"this endpoint is not served on topology {topology.value}; served are {CHAT}, {COMPLETIONS} "
            "and /v1/models"
        )

    async def _run(self, app: web.Application) -> AsyncIterator[None]:
        """Own what the routes use while the application runs (an aiohttp clean-up context)."""
        client = UpstreamClient(
            connect_timeout_s=self._timeouts.connect, ca_file=self._settings.upstream_ca_file
        )
        canceller, naming = EcCanceller(), Naming()
        self._fleet = Fleet(client)
        self._generation = Generation(
            rules=self._rules(),
            keys=self._keys,
            admission=Admission(
                limit=self._settings.max_concurrent_requests,
                queue_size=self._settings.queue_size,
                wait_s=self._timeouts.queue,
            ),
            naming=naming,
            pipeline=self._pipeline(client, canceller),
            routing=self._routing,
            metrics=self._metrics,
            requests=self._request_log(),
        )
        yield
        await canceller.close()
        await client.close()
        naming.close()

    async def _leave(self, app: web.Application) -> None:
        await self._generation.leave()

    def _request_log(self) -> RequestLog:
        settings = self._settings
        is_on = settings.log_requests or settings.log_level in ("debug", "info")
        return RequestLog(self._metrics, is_on=is_on, as_json=settings.log_format == "json")

    def _rules(self) -> IntakeRules:
        settings = self._settings
        hashing = Policy.CONSISTENT_HASHING
        return IntakeRules(
            limits=Limits(max_items=settings.max_items, max_json_depth=settings.max_json_depth),
            token=secrets.token_hex(16).encode(),
            max_body_bytes=settings.max_body_bytes,
            idle_s=self._timeouts.idle,
            batch_limit=settings.encoder_max_batch_size,
            rewrites=not settings.no_rewrite,
            hashes_items=not settings.no_rewrite or Policy(settings.encode_policy) is hashing,
            finds_affinity=hashing in (settings.prefill_policy, settings.decode_policy),
            logs_arrivals=settings.log_requests,
        )

    def _pipeline(self, client: UpstreamClient, canceller: EcCanceller) -> Pipeline:
        settings, timeouts = self._settings, self._timeouts
        deadlines = StageDeadlines(
            encode=timeouts.encode,
            prefill=timeouts.prefill,
            first_byte=timeouts.first_byte,
            idle=timeouts.idle,
        )
        policies = Policies(
            encode=Policy(settings.encode_policy),
            prefill=Policy(settings.prefill_policy),
            decode=Policy(settings.decode_policy),
        )
        return Pipeline(
            client=client,
            legs=Legs(client, self._routing, self._metrics, deadlines),
            router=Router(self._routing, policies),
            routing=self._routing,
            canceller=canceller,
            metrics=self._metrics,
            kv_connector=settings.kv_connector,
            decode_retries=settings.decode_retries,
            idle_s=timeouts.idle,
        )


def _reveal(secret: SecretStr | None) -> str | None:
    return None if secret is None else secret.get_secret_value()


def add_proxy_routes(
    app: web.Application, *, settings: ServeSettings, routing: RoutingPort, metrics: ControlMetrics
) -> None:
    """Add the data plane to `app`: its routes, the 501 for the rest of `/v1/`, and what they need to run."""
    ProxyApi(settings, routing, metrics).add_routes(app)
