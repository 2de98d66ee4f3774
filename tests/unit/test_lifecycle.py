"""The way out, the address, and the memory of a server process."""

from __future__ import annotations

import asyncio
import socket

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from epdctl.http_errors import error_middleware
from epdctl.lifecycle import (
    CannotListen,
    Presence,
    bind_socket,
    keep_freed_memory,
    url_of,
)

pytestmark = pytest.mark.unit


async def test_requests_are_counted_and_refused_at_the_end() -> None:
    """Running requests are counted to their end; once refusing, new ones get 503 but health is answered."""
    presence, gate, inside = Presence(), asyncio.Event(), asyncio.Event()

    async def slow(request: web.Request) -> web.Response:
        inside.set()
        await gate.wait()
        return web.Response()

    async def health(request: web.Request) -> web.Response:
        return web.Response()

    app = web.Application(middlewares=[error_middleware, presence.middleware()])
    app.router.add_get("/slow", slow)
    app.router.add_get("/health", health)
    async with TestClient(TestServer(app)) as client:
        running = asyncio.create_task(client.get("/slow"))
        await asyncio.wait_for(inside.wait(), 5)
        assert presence.running() == 1
        presence.leave()
        presence.refuse()

        async with client.get("/slow") as refused, client.get("/health") as alive:
            assert (refused.status, (await refused.json())["error"]["code"]) == (503, "shutting_down")
            assert alive.status == 200
        idle = asyncio.create_task(presence.wait_idle())
        await asyncio.sleep(0)
        assert not idle.done()
        gate.set()
        await asyncio.wait_for(idle, 5)
        answer = await running
        assert (answer.status, answer.headers["Connection"]) == (200, "close")


async def test_a_request_that_fails_is_counted_down() -> None:
    """A failing handler does not hold the shutdown up."""
    presence = Presence()

    async def broken(request: web.Request) -> web.Response:
        raise web.HTTPConflict

    app = web.Application(middlewares=[presence.middleware()])
    app.router.add_get("/", broken)
    async with TestClient(TestServer(app)) as client:
        async with client.get("/") as answer:
            assert answer.status == 409

        await asyncio.wait_for(presence.wait_idle(), 5)


def test_a_port_in_use_is_named() -> None:
    """The message names the address and the flag."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]

        with pytest.raises(CannotListen, match=rf"127\.0\.0\.1:{port}: the port is in use.*--port"):
            bind_socket("127.0.0.1", port)


def test_a_host_that_is_not_ours_is_named() -> None:
    """An address of somebody else cannot be listened on, and the message says so."""
    with pytest.raises(CannotListen, match=r"192\.0\.2\.1:0.*--host"):
        bind_socket("192.0.2.1", 0)
    with pytest.raises(CannotListen, match=r"no-such-host\.invalid.*--host"):
        bind_socket("no-such-host.invalid", 0)


@pytest.mark.parametrize(
    ("host", "name"), [("0.0.0.0", "127.0.0.1"), ("127.0.0.1", "127.0.0.1"), ("localhost", "localhost")]
)
def test_the_announced_url_can_be_used(host: str, name: str) -> None:
    """A wildcard address is announced as one that a client on this machine can use."""
    listener = bind_socket(host, 0)
    try:
        assert url_of(listener, host) == f"http://{name}:{listener.getsockname()[1]}"
    finally:
        listener.close()


def test_memory_is_kept_where_glibc_is() -> None:
    """On glibc the three settings are taken."""
    assert keep_freed_memory() is True
