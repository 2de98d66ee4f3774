"""No single call on the event loop reads, writes or hashes more than 256 KiB.

The proxy runs inside the test, with transports that count, because nothing outside can see a single call.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvloop
from aiohttp.web_protocol import RequestHandler

from epdctl.proxy import naming
from epdctl.proxy.connection import Connection
from epdctl.proxy.cut import Body, body_length
from epdctl.proxy.keys import digest
from tests.e2e.proxy_inside import CHAT, post, proxy_inside
from tests.stubs.instance import StubInstance

pytestmark = pytest.mark.e2e

LIMIT = 256 * 1024
PICTURE_BYTES = 8_000_000


class Counts:
    """The largest call of each kind."""

    def __init__(self) -> None:
        self.largest: dict[str, int] = {}
        self.total: dict[str, int] = {}

    def note(self, kind: str, size: int) -> None:
        """Remember one call."""
        self.largest[kind] = max(size, self.largest.get(kind, 0))
        self.total[kind] = size + self.total.get(kind, 0)


class CountingTransport:
    """A transport that notes the size of each write and passes everything on."""

    def __init__(self, inner: Any, kind: str, counts: Counts) -> None:
        self._inner, self._kind, self._counts = inner, kind, counts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def write(self, data: bytes) -> None:
        """Count one write."""
        self._counts.note(self._kind, len(data))
        self._inner.write(data)

    def writelines(self, pieces: list[bytes]) -> None:
        """Count one write of several pieces."""
        self._counts.note(self._kind, sum(map(len, pieces)))
        self._inner.writelines(pieces)


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counts:
    """Count on all connections of the process, and on each hash."""
    it = Counts()

    def counted(kind: str, made: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
        return lambda self, transport: made(self, CountingTransport(transport, kind, it))

    def read_client(self: Any, data: bytes) -> None:
        it.note("read from client", len(data))
        data_received(self, data)

    def read_instance(self: Any, size: int) -> None:
        it.note("read from instance", size)
        buffer_updated(self, size)

    def hashed(material: Body) -> str:
        is_loop = threading.current_thread() is threading.main_thread()
        it.note("hash on loop" if is_loop else "hash in thread", body_length(material))
        return digest(material)

    data_received, buffer_updated = RequestHandler.data_received, Connection.buffer_updated
    monkeypatch.setattr(
        RequestHandler, "connection_made", counted("write to client", RequestHandler.connection_made)
    )
    monkeypatch.setattr(RequestHandler, "data_received", read_client)
    monkeypatch.setattr(
        Connection, "connection_made", counted("write to instance", Connection.connection_made)
    )
    monkeypatch.setattr(Connection, "buffer_updated", read_instance)
    monkeypatch.setattr(naming, "digest", hashed)
    return it


async def a_large_request(counts: Counts) -> None:
    """Send pictures of 8 MB and answers of megabytes through the proxy."""
    large = {"choices": [{"message": {"content": "x" * 3_000_000}}]}
    long_line = "data: " + "x" * 3_000_000 + "\n\n"
    async with (
        StubInstance("encode") as encode,
        StubInstance("prefill_decode") as decode,
        proxy_inside(encode, decode) as port,
    ):
        url = "data:image/png;base64," + "A" * PICTURE_BYTES
        part = {"type": "image_url", "image_url": {"url": url}}
        body = {"model": "m", "messages": [{"role": "user", "content": [part]}]}
        await decode.set_behaviour({"chat": {"json": large}})
        answer = await post(port, CHAT, body)
        assert answer.startswith(b"HTTP/1.1 200")
        assert answer.endswith(decode.chats[-1].sent)
        assert encode.chats[-1].json["messages"][0]["content"][0]["image_url"]["url"] == url
        await decode.set_behaviour({"chat": {"sse": [long_line, "data: [DONE]\n\n"]}})
        assert b"[DONE]" in await post(port, CHAT, body | {"stream": True})


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_every_call_is_bounded(counts: Counts, loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    """Megabytes pass in pieces, so that a large picture never holds up the streams beside it."""

    async def within(scenario: Awaitable[None]) -> None:
        async with asyncio.timeout(60):
            await scenario

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(within(a_large_request(counts)))

    in_thread = counts.largest.pop("hash in thread")
    assert in_thread > PICTURE_BYTES
    assert counts.total["write to instance"] > 2 * PICTURE_BYTES
    assert counts.total["write to client"] > 6_000_000
    assert {kind: size for kind, size in counts.largest.items() if size > LIMIT} == {}
