"""A wire tap: an HTTP forwarder in front of one instance that keeps every exchange.

Rules of this file: bytes go through as they come, also when streamed; what is kept is exactly what was seen.
`distort` is a fault that a test may put in: it changes the bytes of responses.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web

from tests.interop.engines import HOST

_PER_CONNECTION = frozenset(
    {
        *("connection", "content-length", "host", "keep-alive", "proxy-connection"),
        *("te", "trailer", "transfer-encoding", "upgrade"),
    }
)
Headers = tuple[tuple[str, str], ...]


@dataclass(slots=True, kw_only=True)
class Exchange:
    """One request and its response, as seen on the wire."""

    hop: str
    method: str
    path: str
    request_headers: Headers
    request_body: bytes
    status: int = 0
    response_headers: Headers = ()
    response_body: bytearray = field(default_factory=bytearray)

    def request_json(self) -> Any:
        """Return the request's body, parsed."""
        return json.loads(self.request_body)

    def response_json(self) -> Any:
        """Return the response's body, parsed."""
        return json.loads(bytes(self.response_body))


def _passed_on(headers: Any) -> list[tuple[str, str]]:
    return [(name, value) for name, value in headers.items() if name.lower() not in _PER_CONNECTION]


class HttpTap:
    """Forwards `url` to `target`; `calls` are the POST exchanges since the last `clear`."""

    def __init__(self, hop: str, target: str, port: int) -> None:
        self.hop = hop
        self.target = target
        self.url = f"http://{HOST}:{port}"
        self.exchanges: list[Exchange] = []
        self.distort: Callable[[bytes], bytes] | None = None
        self._port = port
        self._session: aiohttp.ClientSession | None = None
        self._runner: web.AppRunner | None = None

    @property
    def calls(self) -> list[Exchange]:
        """The inference requests among the exchanges."""
        return [e for e in self.exchanges if e.method == "POST" and e.path.startswith("/v1/")]

    async def open(self) -> HttpTap:
        """Start listening."""
        connector = aiohttp.TCPConnector(force_close=True)
        timeout = aiohttp.ClientTimeout(total=600)
        self._session = aiohttp.ClientSession(timeout=timeout, auto_decompress=False, connector=connector)
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{tail:.*}", self._forward)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, HOST, self._port).start()
        return self

    async def close(self) -> None:
        """Stop listening."""
        if self._runner is not None:
            await self._runner.cleanup()
        if self._session is not None:
            await self._session.close()

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        assert self._session is not None
        exchange = Exchange(
            hop=self.hop,
            method=request.method,
            path=request.path_qs,
            request_headers=tuple(request.headers.items()),
            request_body=await request.read(),
        )
        self.exchanges.append(exchange)
        try:
            async with self._session.request(
                request.method,
                self.target + request.path_qs,
                data=exchange.request_body or None,
                headers=_passed_on(request.headers),
                allow_redirects=False,
            ) as upstream:
                return await self._answer(request, exchange, upstream)
        except aiohttp.ClientError as error:
            exchange.status = 502
            return web.Response(status=502, text=f"tap: {type(error).__name__}")

    async def _answer(
        self, request: web.Request, exchange: Exchange, upstream: aiohttp.ClientResponse
    ) -> web.StreamResponse:
        exchange.status = upstream.status
        exchange.response_headers = tuple(upstream.headers.items())
        response = web.StreamResponse(status=upstream.status, headers=_passed_on(upstream.headers))
        await response.prepare(request)
        async for chunk in upstream.content.iter_any():
            exchange.response_body += chunk
            with suppress(ConnectionResetError):
                await response.write(self.distort(chunk) if self.distort else chunk)
        with suppress(ConnectionResetError):
            await response.write_eof()
        return response
