"""Faults of the proxy itself, and of the probes beside it."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from epdctl.proxy.sse import StreamTail
from tests.e2e.proxy_inside import CHAT, post, proxy_inside
from tests.e2e.proxy_world import ADMIN_KEY, picture_request, proxy_world, text_request
from tests.stubs.instance import StubInstance

pytestmark = pytest.mark.fault


async def test_a_fault_after_the_first_chunk_writes_no_second_status(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hazard 46: a bug within the relay ends the stream; no error page lands in the open body."""
    seen: list[bytes] = []

    def breaks(self: StreamTail, data: bytes) -> None:
        seen.append(data)
        if len(seen) == 2:
            raise RuntimeError("a bug in the relay")

    async with (
        StubInstance("encode") as encode,
        StubInstance("prefill_decode", {"chat": {"chunks": 5, "gap_ms": 30}}) as decode,
        proxy_inside(encode, decode) as port,
    ):
        monkeypatch.setattr(StreamTail, "feed", breaks)
        answer = await post(port, CHAT, text_request(stream=True))
        monkeypatch.undo()

        assert answer.startswith(b"HTTP/1.1 200 OK")
        assert seen[0] in answer
        assert answer.count(b"HTTP/1.1") == 1
        assert b"[DONE]" not in answer
        assert b"a bug in the relay" not in answer
        assert (await post(port, CHAT, text_request())).startswith(b"HTTP/1.1 200")


async def test_a_fault_before_the_first_byte_is_a_plain_500(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug has a fixed text and the request id; its own words stay in the log."""

    def breaks(*_: object, **__: object) -> None:
        raise RuntimeError("a bug in the plan")

    async with (
        StubInstance("encode") as encode,
        StubInstance("prefill_decode") as decode,
        proxy_inside(encode, decode) as port,
    ):
        monkeypatch.setattr("epdctl.proxy.router.plan_route", breaks)
        answer = await post(port, CHAT, picture_request())

        assert answer.startswith(b"HTTP/1.1 500")
        assert b'"code":"internal"' in answer
        assert b"a bug" not in answer


async def test_hanging_probes_hold_up_no_request(tmp_path: Path) -> None:
    """Hazard 47: while a hundred probes hang, requests and the registry answer at once."""

    async def never(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(1024):
            pass
        writer.close()

    hole = await asyncio.start_server(never, "127.0.0.1", 0)
    address = f"http://127.0.0.1:{hole.sockets[0].getsockname()[1]}"
    roles = {"e0": "encode", "pd0": "prefill_decode"}
    flags = ("--probe-timeout", "3")
    async with proxy_world(tmp_path, roles, *flags, register={"e0": {}, "pd0": {}}) as world:
        headers = {"X-API-Key": ADMIN_KEY}
        joining = [
            asyncio.create_task(
                world.ask(
                    "POST",
                    "/instances",
                    json_body={"role": "encode", "url": f"{address}/{number}"},
                    headers=headers,
                )
            )
            for number in range(100)
        ]
        slowest = 0.0
        while not all(task.done() for task in joining):
            started = time.monotonic()
            assert (await world.chat(picture_request())).status == 200
            assert (await world.ask("GET", "/instances")).status == 200
            slowest = max(slowest, time.monotonic() - started)

        assert slowest < 1.5
        assert {task.result().status for task in joining} == {200}
        pending = (await world.ask("GET", "/instances")).json["encode"]["pending"]
        assert len(pending) == 100
    hole.close()
