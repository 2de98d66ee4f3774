"""The proxy's application inside the test's own loop, for what cannot be seen from outside."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

from aiohttp import web

from epdctl.app import build_app
from epdctl.config.serve import ServeSettings
from tests.stubs.instance import StubInstance
from tests.stubs.process import wait_until

CHAT = "/v1/chat/completions"


@contextlib.asynccontextmanager
async def proxy_inside(encode: StubInstance, decode: StubInstance) -> AsyncIterator[int]:
    """Serve the application in this loop and give its port once it is ready."""
    settings = ServeSettings(encode_servers_urls=encode.url, decode_servers_urls=decode.url)
    runner = web.AppRunner(build_app(settings), handler_cancellation=True, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    port = int(runner.addresses[0][1])
    try:
        await wait_until(lambda: _is_ready(port), "the proxy is ready")
        yield port
    finally:
        await runner.cleanup()


async def exchange(port: int, data: bytes) -> bytes:
    """Send bytes on a connection of their own and return all that comes back."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 26)
    writer.write(data)
    answer = await reader.read()
    writer.close()
    return answer


async def post(port: int, path: str, body: Any) -> bytes:
    """Send one request and return all that comes back."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(data)}\r\n\r\n"
    return await exchange(port, head.encode() + data)


async def _is_ready(port: int) -> bool:
    answer = await exchange(port, b"GET /ready HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    return answer.startswith(b"HTTP/1.1 200")
