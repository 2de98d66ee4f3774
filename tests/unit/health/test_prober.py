"""Probes over real sockets."""

from __future__ import annotations

import asyncio
import errno
import ssl
from collections.abc import AsyncIterator
from typing import Any
from unittest import mock

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from epdctl.domain import InstanceUrl, ProbeOutcome, Role
from epdctl.health.prober import HttpProber, ProbeResult, parse_models
from tests.stubs.instance import StubInstance
from tests.stubs.ports import free_port
from tests.stubs.process import wait_until

pytestmark = pytest.mark.unit

HEALTHY = ProbeResult(outcome=ProbeOutcome.HEALTHY)


def unhealthy(error: str) -> ProbeResult:
    """Return an unhealthy result with its cause."""
    return ProbeResult(outcome=ProbeOutcome.UNHEALTHY, error=error)


async def opened(**fields: Any) -> HttpProber:
    """Return a prober that is ready to ask."""
    prober = HttpProber(**({"timeout_s": 0.5, "api_key": None, "tls": None} | fields))
    await prober.open()
    return prober


@pytest.fixture
async def prober() -> AsyncIterator[HttpProber]:
    """A prober with a short deadline."""
    prober = await opened()
    yield prober
    await prober.close()


async def ask(prober: HttpProber, behaviour: dict[str, Any]) -> ProbeResult:
    """Probe a stub that behaves as told."""
    async with StubInstance(Role.ENCODE, behaviour) as stub:
        return await prober.probe(InstanceUrl(stub.url))


async def test_200_is_healthy(prober: HttpProber) -> None:
    """Status 200 of /health is the one healthy answer."""
    assert await ask(prober, {}) == HEALTHY


@pytest.mark.parametrize("status", [204, 301, 404, 429, 500, 503])
async def test_any_other_status_is_unhealthy(prober: HttpProber, status: int) -> None:
    """Every status but 200 is unhealthy and named."""
    assert await ask(prober, {"health": {"status": status}}) == unhealthy(f"status {status}")


async def test_a_redirect_is_not_followed(prober: HttpProber) -> None:
    """An instance that points elsewhere is not healthy because of what is there."""

    async def redirect(request: web.Request) -> web.Response:
        raise web.HTTPFound("/elsewhere")

    async def elsewhere(request: web.Request) -> web.Response:
        return web.Response()

    app = web.Application()
    app.router.add_get("/health", redirect)
    app.router.add_get("/elsewhere", elsewhere)
    async with TestServer(app) as server:
        assert await prober.probe(InstanceUrl(f"http://127.0.0.1:{server.port}")) == unhealthy("status 302")


async def test_hanging_is_unhealthy_after_the_timeout(prober: HttpProber) -> None:
    """An instance that accepts and never answers is unhealthy."""
    assert await ask(prober, {"health": {"hang": True}}) == unhealthy("timeout")


async def test_black_hole_is_unhealthy_after_the_timeout(prober: HttpProber) -> None:
    """An instance that does not even accept is unhealthy, in the same time."""
    assert await ask(prober, {"listen_backlog_full": True}) == unhealthy("timeout")


async def test_refused_is_unhealthy(prober: HttpProber) -> None:
    """Nobody listening is unhealthy."""
    url = InstanceUrl(f"http://127.0.0.1:{free_port()}")

    assert await prober.probe(url) == unhealthy("connection refused")


async def test_a_name_that_does_not_resolve_is_unhealthy(prober: HttpProber) -> None:
    """An unknown host is unhealthy, or late where the resolver is slow."""
    result = await prober.probe(InstanceUrl("http://no-such-host.invalid:8001"))

    assert result in (unhealthy("name not resolved"), unhealthy("timeout"))


async def test_a_name_that_can_be_none_is_unhealthy(prober: HttpProber) -> None:
    """What the resolver takes for a bug of its caller is a name that does not resolve, like any other."""
    url = InstanceUrl(f"http://{'a' * 70}:8001")

    assert await prober.probe(url) == unhealthy("name not resolved")
    assert await prober.fetch_models(url) is None


@pytest.mark.parametrize(
    ("answer", "error"),
    [(b"", "connection reset"), (b"SSH-2.0-OpenSSH\r\n\r\n", "no valid HTTP answer")],
)
async def test_what_speaks_no_http_is_unhealthy(prober: HttpProber, answer: bytes, error: str) -> None:
    """A peer that closes, or talks something else, is unhealthy."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server:
        result = await prober.probe(InstanceUrl(f"http://127.0.0.1:{port}"))

    assert result == unhealthy(error)


async def test_tls_that_cannot_be_trusted_is_unhealthy(prober: HttpProber) -> None:
    """A plain server behind an https URL is a TLS failure, not a crash."""
    async with TestServer(web.Application()) as plain:
        result = await prober.probe(InstanceUrl(f"https://127.0.0.1:{plain.port}"))

    assert result == unhealthy("TLS failure")


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOMEM])
async def test_our_own_lack_is_inconclusive(prober: HttpProber, number: int) -> None:
    """Running out of descriptors says nothing about the instance."""
    lack = aiohttp.ClientConnectorError(mock.Mock(), OSError(number, "x"))
    with mock.patch.object(aiohttp.ClientSession, "get", side_effect=lack):
        result = await prober.probe(InstanceUrl("http://e1:1"))

    assert result.outcome is ProbeOutcome.INCONCLUSIVE


async def test_cancelling_is_not_a_result(prober: HttpProber) -> None:
    """A probe that is cancelled reports nothing."""
    async with StubInstance(Role.ENCODE, {"health": {"hang": True}}) as stub:
        task = asyncio.create_task(prober.probe(InstanceUrl(stub.url)))
        await wait_until(lambda: bool(stub.calls), "probe arrived")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_each_probe_connects_anew(prober: HttpProber) -> None:
    """An open connection says nothing about who accepts new ones."""
    async with StubInstance(Role.ENCODE) as stub:
        for _ in range(3):
            await prober.probe(InstanceUrl(stub.url))

        assert stub.connections_accepted == 3


async def test_the_key_for_instances_goes_with_the_probe() -> None:
    """Instances behind a key are probed with it; without one no Authorization is sent."""
    async with StubInstance(Role.ENCODE) as stub:
        for key in (None, "secret"):
            prober = await opened(api_key=key)
            await prober.probe(InstanceUrl(stub.url))
            await prober.close()

        assert [call.header("Authorization") for call in stub.calls] == [None, "Bearer secret"]


async def test_a_given_certificate_authority_is_used() -> None:
    """With a CA file the prober verifies against it alone."""
    context = ssl.create_default_context()
    prober = await opened(tls=context)
    try:
        assert prober._session.connector._ssl is context  # type: ignore[union-attr]
    finally:
        await prober.close()


class TestModels:
    """What `/v1/models` says."""

    async def fetch(self, prober: HttpProber, handler: Any) -> frozenset[str] | None:
        """Ask a server whose `/v1/models` is `handler`."""
        app = web.Application()
        app.router.add_get("/v1/models", handler)
        async with TestServer(app) as server:
            return await prober.fetch_models(InstanceUrl(str(server.make_url("")).rstrip("/")))

    async def test_ids_of_the_list(self, prober: HttpProber) -> None:
        """The ids of an OpenAI model list are what the instance serves."""
        async with StubInstance(Role.ENCODE, {"models": ["m", "m-lora"]}) as stub:
            assert await prober.fetch_models(InstanceUrl(stub.url)) == {"m", "m-lora"}

    @pytest.mark.parametrize(("status", "models"), [(404, frozenset()), (405, frozenset()), (503, None)])
    async def test_no_list(self, prober: HttpProber, status: int, models: frozenset[str] | None) -> None:
        """An instance without the endpoint lists none; one that fails is asked again."""

        async def answer(request: web.Request) -> web.Response:
            return web.Response(status=status)

        assert await self.fetch(prober, answer) == models

    async def test_late(self, prober: HttpProber) -> None:
        """A list that does not come in time is asked again later."""

        async def answer(request: web.Request) -> web.Response:
            await asyncio.sleep(30)
            return web.Response()

        async with asyncio.timeout(5):
            assert await self.fetch(prober, answer) is None

    async def test_endless(self, prober: HttpProber) -> None:
        """A body without end is cut off, not collected."""

        async def answer(request: web.Request) -> web.StreamResponse:
            response = web.StreamResponse()
            await response.prepare(request)
            for _ in range(64):
                await response.write(b" " * 65536)
            return response

        assert await self.fetch(prober, answer) is None


@pytest.mark.parametrize(
    ("body", "models"),
    [
        (b'{"data":[{"id":"a"},{"id":"b","object":"model"}]}', frozenset("ab")),
        (b'{"data":[]}', frozenset()),
        (b'{"data":[{"id":""}]}', frozenset()),
        (b'{"data":[{"id":"' + b"x" * 600 + b'"}]}', frozenset()),
        (b'{"models":[]}', None),
        (b'{"data":[{"id":1}]}', None),
        (b"\xff", None),
        (b"[" * 10_000, None),
        (b" " * (1 << 21), None),
    ],
)
def test_parse_models(body: bytes, models: frozenset[str] | None) -> None:
    """A well-formed list gives its names, anything else gives nothing."""
    assert parse_models(body) == models
