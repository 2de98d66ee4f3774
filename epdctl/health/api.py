"""What our own health looks like from outside: `/health`, `/ready`, `/metrics`.

Rules of this file: each answer is O(1) in the number of instances, nothing is asked of anybody. `/health`
says that the process is alive, `/ready` that a request with media can be served and that we are not leaving.
"""

from __future__ import annotations

from collections.abc import Callable

from aiohttp import web

from epdctl.metrics import CONTENT_TYPE, ControlMetrics
from epdctl.registry.driver import RegistryDriver
from epdctl.wire import encode_json

_RETRY_AFTER_S = "5"


class HealthApi:
    """Handlers of the three paths; `is_leaving` says whether a shutdown has begun."""

    def __init__(
        self, driver: RegistryDriver, metrics: ControlMetrics, is_leaving: Callable[[], bool]
    ) -> None:
        self._driver = driver
        self._metrics = metrics
        self._is_leaving = is_leaving

    def add_routes(self, app: web.Application) -> None:
        """Add the paths to `app`."""
        app.router.add_get("/health", self.health)
        app.router.add_get("/ready", self.ready)
        app.router.add_get("/metrics", self.metrics)

    async def health(self, request: web.Request) -> web.Response:
        """Say that the process is alive, with the word that vLLM's example proxy uses."""
        return web.Response(body=encode_json({"proxy": "healthy"}), content_type="application/json")

    async def ready(self, request: web.Request) -> web.Response:
        """200 when requests with media can be served, else 503 with the reason."""
        service = self._driver.service()
        is_ready = service.servable and not self._is_leaving()
        reason = "shutting down" if self._is_leaving() else service.reason
        return web.Response(
            body=encode_json(
                {"ready": is_ready, "topology": self._driver.roster().topology, "reason": reason}
            ),
            status=200 if is_ready else 503,
            headers={} if is_ready else {"Retry-After": _RETRY_AFTER_S},
            content_type="application/json",
        )

    async def metrics(self, request: web.Request) -> web.Response:
        """Return the exposition text for Prometheus."""
        return web.Response(body=self._metrics.render(), headers={"Content-Type": CONTENT_TYPE})
