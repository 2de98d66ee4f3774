"""Answers to what is refused before, or beside, any handler: each is our JSON envelope."""

from __future__ import annotations

import asyncio
import gc
import gzip
import json
import weakref
import zlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from epdctl.errors import InvalidRequest
from epdctl.http_errors import JsonRunner, error_middleware
from tests.stubs.ports import free_port

pytestmark = pytest.mark.unit


@pytest.fixture
async def port() -> AsyncIterator[int]:
    """Serve an endpoint that reads its body; give its port."""

    async def read(request: web.Request) -> web.Response:
        return web.Response(body=await request.read())

    app = web.Application(middlewares=[error_middleware])
    app.router.add_post("/read", read)
    app.router.add_put("/read", read)
    runner = JsonRunner(app, access_log=None)
    await runner.setup()
    chosen = free_port()
    await web.TCPSite(runner, "127.0.0.1", chosen).start()
    yield chosen
    await runner.cleanup()


async def exchange(port: int, request: bytes) -> tuple[int, dict[str, str], dict[str, Any]]:
    """Send bytes on a connection of their own; return status, headers and JSON."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    async with asyncio.timeout(10):
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:])}
        body = await reader.readexactly(int(headers["content-length"]))
    writer.close()
    return int(head[0].split()[1]), headers, json.loads(body)


HEAD = b"POST /read HTTP/1.1\r\nHost: x\r\n"


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        HEAD + b"X-Long: " + b"a" * 20_000 + b"\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}",
        HEAD + b"Content-Length: -2\r\n\r\n{}",
        HEAD + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n{}",
        HEAD + b"Content-Encoding: gzip\r\nContent-Length: 2\r\n\r\n{}",
        b"\x16\x03\x01 hello\r\n\r\n",
    ],
    ids=["url", "header", "chunk size", "negative length", "two lengths", "no gzip", "tls"],
)
async def test_malformed_http_is_answered_with_our_envelope(
    port: int, request_bytes: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """What aiohttp refuses by itself is 400 in JSON with a request id, and repeats nothing of the request."""
    caplog.set_level("CRITICAL", "aiohttp.server")  # aiohttp logs what it refuses

    status, headers, body = await exchange(port, request_bytes)

    assert (status, body["error"]["code"]) == (400, "invalid_request")
    assert headers["content-type"] == "application/json"
    assert headers["x-request-id"]
    assert headers["server"] == "epdctl"
    assert "aaa" not in body["error"]["message"]


def sent(encoding: bytes, body: bytes) -> bytes:
    """Return a request whose body is said to have `encoding`."""
    return HEAD + b"Content-Encoding: %b\r\nContent-Length: %d\r\n\r\n%b" % (encoding, len(body), body)


@pytest.mark.parametrize("encoding", [b"br", b"zstd", b"BR", b"compress", b"gzip, gzip"])
async def test_an_encoding_that_is_not_served_is_told_as_that(
    port: int, encoding: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """415 with what is served, whether aiohttp knows the encoding, lacks its library, or passes it on."""
    caplog.set_level("CRITICAL", "aiohttp.server")

    status, headers, body = await exchange(port, sent(encoding, b"{}"))

    assert (status, body["error"]["code"]) == (415, "unsupported_encoding")
    assert "not served (served: gzip, deflate" in body["error"]["message"]
    assert headers["accept-encoding"] == "gzip, deflate"
    assert headers["x-request-id"]


@pytest.mark.parametrize("encoding", [b"gzip", b"deflate"])
async def test_a_body_without_the_encoding_that_is_said_is_told_as_that(
    port: int, encoding: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """400 that names the encoding, not the whole of the HTTP."""
    caplog.set_level("CRITICAL", "aiohttp.server")

    status, _, body = await exchange(port, sent(encoding, b"{}"))

    assert (status, body["error"]["code"]) == (400, "invalid_request")
    assert body["error"]["message"] == "the body does not have the encoding that its headers say"


@pytest.mark.parametrize(
    ("encoding", "content"),
    [(b"gzip", gzip.compress(b"{}")), (b"deflate", zlib.compress(b"{}")), (b"identity", b"{}"), (b"", b"{}")],
    ids=["gzip", "deflate", "identity", "none"],  # what gzip makes has the time in it
)
async def test_encodings_that_are_served_are_taken_off(port: int, encoding: bytes, content: bytes) -> None:
    """The handler sees the body as it was before."""
    status, _, body = await exchange(port, sent(encoding, content))

    assert (status, body) == (200, {})


async def test_wrong_method_names_the_right_ones(port: int) -> None:
    """405 comes with its own code and with `Allow`."""
    status, headers, body = await exchange(port, b"DELETE /read HTTP/1.1\r\nHost: x\r\n\r\n")

    assert (status, body["error"]["code"], headers["allow"]) == (405, "method_not_allowed", "POST, PUT")


class Held:
    """Stands for what a request holds: something whose end can be seen."""


async def test_a_failed_request_lets_go_of_what_it_held() -> None:
    """What a handler held is freed with its answer, not when the collector comes by."""
    seen: list[weakref.ref[Held]] = []

    async def handler(request: web.Request) -> web.Response:
        held = Held()
        seen.append(weakref.ref(held))
        raise InvalidRequest("no")

    gc.disable()
    try:
        response = await error_middleware(make_mocked_request("GET", "/"), handler)
        assert response.status == 400
        assert seen[0]() is None
    finally:
        gc.enable()
