"""The admin API: `/instances`.

Rules of this file: HTTP in, registry commands out; no decision is made here. The key is checked before the
body is read. A registration is answered after its first probe, and after the store knows it.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from epdctl.domain import InstanceState, InstanceUrl
from epdctl.errors import BodyTooLarge, InvalidRequest, NotAuthorised, UnknownInstance
from epdctl.http_auth import ADMIN_HEADER, AdminKey
from epdctl.registry.addresses import normalise_url
from epdctl.registry.commands import Drain, EventKind, Register, RemovalCause, Remove
from epdctl.registry.driver import RegistryDriver
from epdctl.registry.forms import detail_view, list_view, parse_registration
from epdctl.wire import encode_json

MAX_ADMIN_BODY_BYTES = 64 * 1024
BODY_TIMEOUT_S = 10.0
DEFAULT_DRAIN_S = 30.0
MAX_DRAIN_S = 3600.0

_WORTH_A_PROBE = frozenset({InstanceState.PENDING, InstanceState.EVICTED})

ProbeNow = Callable[[InstanceUrl], Awaitable[None]]


class InstancesApi:
    """Handlers of `/instances`; `probe_now` waits for an instance's next probe."""

    def __init__(
        self,
        driver: RegistryDriver,
        probe_now: ProbeNow,
        key: AdminKey,
        *,
        accepts_registrations: bool,
        protect_reads: bool,
    ) -> None:
        self._driver = driver
        self._probe_now = probe_now
        self._key = key
        self._accepts_registrations = accepts_registrations
        self._protect_reads = protect_reads

    def add_routes(self, app: web.Application) -> None:
        """Add the three verbs to `app`."""
        app.router.add_post("/instances", self.register)
        app.router.add_delete("/instances", self.remove)
        app.router.add_get("/instances", self.show)

    async def register(self, request: web.Request) -> web.Response:
        """`POST /instances`: 200 with `registered` (true when new), `state`, and `updated` when replaced."""
        self._key.check(request.headers.get(ADMIN_HEADER))
        if not self._accepts_registrations:
            raise NotAuthorised("registration is off: start epdctl serve with --dynamic-registration")
        spec = parse_registration(await _read_body(request))
        outcome = self._driver.apply(Register(spec=spec))
        stored = await self._driver.stored(spec.url)
        view = self._driver.find(spec.url)
        if outcome.has(EventKind.UPDATED) or (view is not None and view.state in _WORTH_A_PROBE):
            await self._probe_now(spec.url)
        view = self._driver.find(spec.url)
        answer: dict[str, Any] = {
            "registered": outcome.has(EventKind.REGISTERED),
            # Gone while it was probed: somebody removed it meanwhile.
            "state": "removed" if view is None else view.state,
        }
        if outcome.has(EventKind.UPDATED):
            answer["updated"] = True
        if not stored:
            answer["stored"] = False
        return _json(answer)

    async def remove(self, request: web.Request) -> web.Response:
        """`DELETE /instances?url=…[&drain=true&timeout=30]`: 200 when it has left, 404 for an unknown URL."""
        self._key.check(request.headers.get(ADMIN_HEADER))
        url = normalise_url(_one(request, "url", needed=True))
        drain = _flag(_one(request, "drain"), "drain")
        timeout_s = _seconds(_one(request, "timeout"), "timeout")
        try:
            answer = await self._drain(url, timeout_s) if drain else self._remove(url)
        except UnknownInstance:
            return _json({"removed": False}, status=404)
        await self._driver.stored(url)
        return _json(answer)

    def _remove(self, url: InstanceUrl) -> dict[str, Any]:
        self._driver.apply(Remove(url=url))
        return {"removed": True}

    async def _drain(self, url: InstanceUrl, timeout_s: float) -> dict[str, Any]:
        outcome = self._driver.apply(Drain(url=url, deadline=self._driver.now() + timeout_s))
        causes = [event.cause for event in outcome.events if event.cause is not None]
        cause = causes[0] if causes else await self._driver.drained(url)
        return {
            "removed": True,
            "drained": cause is RemovalCause.DRAINED,
            "in_flight": self._driver.in_flight(url),
        }

    async def show(self, request: web.Request) -> web.Response:
        """`GET /instances[?view=detail]`."""
        if self._protect_reads:
            self._key.check(request.headers.get(ADMIN_HEADER))
        views = self._driver.views()
        match _one(request, "view"):
            case "" | "list":
                return _json(list_view(views))
            case "detail":
                topology = self._driver.roster().topology
                return _json(detail_view(views, topology, self._driver.service(), time.time()))
            case _:
                raise InvalidRequest("view must be list or detail", param="view")


async def _read_body(request: web.Request) -> bytes:
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for piece in request.content.iter_any():
                body += piece
                if len(body) > MAX_ADMIN_BODY_BYTES:
                    raise BodyTooLarge(f"a registration has at most {MAX_ADMIN_BODY_BYTES} bytes")
    except TimeoutError:
        raise InvalidRequest(f"the body did not arrive within {BODY_TIMEOUT_S:g} s") from None
    return bytes(body)


def _one(request: web.Request, name: str, *, needed: bool = False) -> str:
    values = request.query.getall(name, [])
    if len(values) > 1:
        raise InvalidRequest(f"the query parameter {name} is given more than once", param=name)
    if needed and not values:
        raise InvalidRequest(f"the query parameter {name} is missing: DELETE /instances?{name}=…", param=name)
    return values[0] if values else ""


def _flag(text: str, name: str) -> bool:
    if text.lower() in ("true", "1"):
        return True
    if text.lower() in ("", "false", "0"):
        return False
    raise InvalidRequest(f"{name} must be true or false", param=name)


def _seconds(text: str, name: str) -> float:
    if not text:
        return DEFAULT_DRAIN_S
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= MAX_DRAIN_S:
        raise InvalidRequest(f"{name} must be a number of seconds from 0 to {MAX_DRAIN_S:g}", param=name)
    return value


def _json(value: object, *, status: int = 200) -> web.Response:
    return web.Response(body=encode_json(value), status=status, content_type="application/json")
