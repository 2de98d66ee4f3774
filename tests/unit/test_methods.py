"""Every endpoint of every server, asked with every method that it does not take."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from epdctl import app as control
from epdctl.config.serve import ServeSettings
from epdctl.metrics import WorkerMetrics
from epdctl.worker.encode.api import add_encode_routes
from epdctl.worker.language.api import add_language_routes
from epdctl.worker.server import InFlight, WorkerEdge, build_app

pytestmark = pytest.mark.unit

METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
ANY: Any = None
"""What no request of these tests reaches."""


def proxy() -> web.Application:
    """Return the application of `epdctl serve`."""
    settings: dict[str, Any] = {"dynamic_registration": True, "admin_api_key": "k", "store": "memory"}
    return control.build_app(ServeSettings(**settings))


def worker(topology: str) -> web.Application:
    """Return what the servers of all bundled workers share."""
    edge = WorkerEdge(
        model_name="m",
        model_root="m",
        max_model_len=None,
        engines=(),
        metrics=WorkerMetrics(),
        in_flight=InFlight(),
        trouble=lambda: None,
        loads=lambda: (),
        transport="tcp",
        one_engine_is_enough=True,
    )
    return build_app(edge, topology, 1024)


def encode_worker() -> web.Application:
    """Return the application of an encode worker."""
    app = worker("encode")
    add_encode_routes(app, ANY, "m")
    return app


def language_worker() -> web.Application:
    """Return the application of a language worker."""
    app = worker("prefill_decode")
    add_language_routes(app, ANY, model="m", draining=lambda: False)
    return app


@pytest.fixture(params=[proxy, encode_worker, language_worker])
async def client(request: pytest.FixtureRequest) -> AsyncIterator[TestClient[Any, Any]]:
    """Serve one of them."""
    make: Callable[[], web.Application] = request.param
    async with TestClient(TestServer(make())) as made:
        yield made


def endpoints(client: TestClient[Any, Any]) -> dict[str, set[str]]:
    """Return the methods of each path that is served."""
    found: dict[str, set[str]] = {}
    for route in client.app.router.routes():
        if route.method != "*":
            assert route.resource is not None
            found.setdefault(route.resource.canonical, set()).add(route.method)
    return found


async def test_a_wrong_method_is_told_the_right_ones(client: TestClient[Any, Any]) -> None:
    """405 with the endpoint's methods in `Allow`, whatever the path begins with."""
    served = endpoints(client)
    assert {"/v1/chat/completions", "/v1/models", "/health", "/metrics"} <= set(served)

    for path, methods in served.items():
        for method in set(METHODS) - methods:
            async with client.request(method, path) as answer:
                code = (await answer.json())["error"]["code"]
                allow = set(answer.headers.get("Allow", "").split(", "))
            asked = (method, path)
            assert (*asked, answer.status, code) == (*asked, 405, "method_not_allowed")
            assert (*asked, allow) == (*asked, methods)


async def test_what_is_served_under_no_method_is_no_endpoint(client: TestClient[Any, Any]) -> None:
    """Other paths of the API are 501 for every method, and name no method."""
    for method in METHODS:
        async with client.request(method, "/v1/embeddings") as answer:
            assert (answer.status, (await answer.json())["error"]["code"]) == (501, "unsupported_endpoint")
            assert "Allow" not in answer.headers
