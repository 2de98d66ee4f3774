"""The client of the admin API against odd servers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from epdctl.instances import client as client_module
from epdctl.instances.client import AdminClient, ProxyUnreachable, Refused
from tests.stubs.ports import free_port

pytestmark = pytest.mark.unit

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


async def ask(handler: Handler, key: str | None = None) -> dict[str, object]:
    """Return what the detail call makes of a server's answer."""
    app = web.Application()
    app.router.add_route("*", "/instances", handler)
    async with TestServer(app) as server, AdminClient(f"http://127.0.0.1:{server.port}", key) as client:
        return await client.detail()


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (200, b"<html>"),
        (200, b"[]"),
        (200, b'{"encode": {"live": []}}'),
        (404, b'{"error": {"message": "not here"}}'),
        (501, b"{}"),
    ],
)
async def test_what_is_no_proxy_is_said_to_be_none(status: int, body: bytes) -> None:
    """HTML, other JSON and unknown paths are no epdctl proxy, and the flag is named."""

    async def answer(request: web.Request) -> web.Response:
        return web.Response(status=status, body=body)

    with pytest.raises(ProxyUnreachable, match=rf"with status {status} is no epdctl proxy \(--url\)"):
        await ask(answer)


async def test_the_proxys_words_are_kept() -> None:
    """A refusal carries the proxy's message and status."""

    async def answer(request: web.Request) -> web.Response:
        return web.Response(status=403, body=b'{"error": {"message": "Invalid admin API key"}}')

    with pytest.raises(Refused, match="Invalid admin API key") as raised:
        await ask(answer)

    assert raised.value.status == 403


async def test_the_key_travels_in_its_header() -> None:
    """The key goes with every call, and without one no header is sent."""
    seen = []

    async def answer(request: web.Request) -> web.Response:
        seen.append(request.headers.get("X-API-Key"))
        return web.json_response({"instances": []})

    await ask(answer, "k")
    await ask(answer, None)

    assert seen == ["k", None]


async def test_a_proxy_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy that accepts and never answers is named after the deadline."""
    monkeypatch.setattr(client_module, "_CALL_TIMEOUT_S", 0.1)

    async def answer(request: web.Request) -> web.Response:
        await asyncio.sleep(30)
        return web.Response()

    with pytest.raises(ProxyUnreachable, match=r"did not answer within 0\.1 s"):
        await ask(answer)


async def test_nobody_listens() -> None:
    """A refused connection says so and asks whether the proxy runs."""
    async with AdminClient(f"http://127.0.0.1:{free_port()}", None) as client:
        with pytest.raises(ProxyUnreachable, match=r"connection refused.*epdctl serve.*--url"):
            await client.detail()


async def test_an_unknown_host() -> None:
    """A name that does not resolve is named as the cause."""
    async with AdminClient("http://no-such-host.invalid:8000", None) as client:
        with pytest.raises(ProxyUnreachable, match=r"host name is not known|connection failed"):
            await client.detail()
