"""Self-registration of a worker, and the address it gives out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from epdctl.domain import Role
from epdctl.worker import announce
from epdctl.worker.announce import Announcement, NoAddress, SelfRegistration, advertised_url, is_wildcard
from tests.stubs.process import wait_until

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("host", "advertise", "registry", "expected"),
    [
        ("10.1.2.3", None, None, "http://10.1.2.3:8001"),
        ("::1", None, None, "http://[::1]:8001"),
        ("0.0.0.0", "http://w1:9000", "http://127.0.0.1:8000", "http://w1:9000"),
        ("0.0.0.0", None, "http://127.0.0.1:8000", "http://127.0.0.1:8001"),
        ("::", None, "http://localhost:8000", "http://127.0.0.1:8001"),
    ],
    ids=["own address", "own IPv6 address", "given", "wildcard, registry here", "IPv6 wildcard"],
)
def test_advertised_url(host: str, advertise: str | None, registry: str | None, expected: str) -> None:
    """What was given, else the listening address, else the route towards the registry."""
    found = advertised_url(host, 8001, advertise, registry)

    assert found in (expected, expected.replace("127.0.0.1", "[::1]"))


def test_wildcard_without_a_route_names_the_flag() -> None:
    """A wildcard host whose registry cannot be found is an error that says which flag helps."""
    with pytest.raises(NoAddress, match="--advertise-url http://ADDRESS:8001"):
        advertised_url("0.0.0.0", 8001, None, "http://nosuch.invalid:8000")


@pytest.mark.parametrize(
    ("host", "expected"),
    [("0.0.0.0", True), ("::", True), ("", True), ("127.0.0.1", False), ("worker", False)],
)
def test_wildcards(host: str, expected: bool) -> None:
    """Addresses that mean every address are known."""
    assert is_wildcard(host) is expected


class FakeRegistry:
    """Records admin calls and answers with the status that is set."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str | None, Any]] = []
        self.status = 200

    async def answer(self, request: web.Request) -> web.Response:
        """Answer one call."""
        told = await request.json() if request.method == "POST" else dict(request.query)
        self.calls.append((request.method, request.headers.get("X-API-Key"), told))
        return web.json_response({"registered": True}, status=self.status)

    def count(self, method: str) -> int:
        """Return how many calls of `method` came."""
        return sum(1 for call in self.calls if call[0] == method)


@pytest.fixture
async def registry() -> AsyncIterator[tuple[FakeRegistry, str]]:
    """Start the registry; give it and its URL."""
    fake = FakeRegistry()
    app = web.Application()
    app.router.add_route("*", "/instances", fake.answer)
    server = TestServer(app, host="127.0.0.1")
    await server.start_server()
    yield fake, f"http://127.0.0.1:{server.port}"
    await server.close()


def registration(url: str) -> SelfRegistration:
    """Return the registration of an encoder."""
    told = Announcement(registry_url=url, url="http://w:1", role=Role.ENCODE, api_key="k", model="m")
    return SelfRegistration(told)


async def test_worker_registers_stays_and_withdraws(
    registry: tuple[FakeRegistry, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The registration is sent with the key, said again, and taken back."""
    fake, url = registry
    monkeypatch.setattr(announce, "REPEAT_S", 0.01)
    worker = registration(url)

    task = asyncio.create_task(worker.run())
    await wait_until(lambda: fake.count("POST") >= 3, "three registrations")
    task.cancel()
    await worker.withdraw()

    method, key, body = fake.calls[0]
    assert (method, key) == ("POST", "k")
    assert body == {
        "role": "encode",
        "url": "http://w:1",
        "model": "m",
        "dp_size": 1,
        "ec_zmq_addrs": [],
        "labels": {},
        "kv_bootstrap_addr": None,
    }
    assert fake.calls[-1] == ("DELETE", "k", {"url": "http://w:1"})


async def test_refused_worker_tries_again(
    registry: tuple[FakeRegistry, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proxy that refuses is asked again, and takes the worker once it can."""
    fake, url = registry
    monkeypatch.setattr(announce, "RETRY_S", (0.01, 0.02))
    fake.status = 409
    task = asyncio.create_task(registration(url).run())
    await wait_until(lambda: fake.count("POST") >= 2, "two tries")

    fake.status = 200
    known = fake.count("POST")

    await wait_until(lambda: fake.count("POST") > known, "a try that is taken")
    task.cancel()


async def test_absent_proxy_stops_nothing() -> None:
    """A proxy that is not there makes withdrawing neither slow nor fail."""
    worker = registration("http://127.0.0.1:1")

    async with asyncio.timeout(5):
        await worker.withdraw()
