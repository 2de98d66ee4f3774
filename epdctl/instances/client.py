"""The admin API of a running proxy, as a client.

Rules of this file: the only place of these commands that knows HTTP; foreign exceptions become
`ProxyUnreachable` or `Refused`, whose messages are for the person at the terminal. Every call has a deadline.
"""

from __future__ import annotations

import asyncio
import errno
from types import TracebackType
from typing import Any

import aiohttp
import msgspec

from epdctl import __version__
from epdctl.http_auth import ADMIN_HEADER

_CALL_TIMEOUT_S = 30.0
_REGISTER_TIMEOUT_S = 120.0
_DRAIN_SLACK_S = 15.0


class ProxyUnreachable(Exception):
    """Nobody answers at the proxy's URL; the message names it and the likely cause."""


class Refused(Exception):
    """The proxy said no; the message is the proxy's, `status` its HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class AdminClient:
    """One proxy's admin API; an async context manager that owns its session."""

    def __init__(self, url: str, key: str | None) -> None:
        self._url = url
        self._headers = {"User-Agent": f"epdctl/{__version__}", "Content-Type": "application/json"}
        if key is not None:
            self._headers[ADMIN_HEADER] = key
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> AdminClient:
        self._session = aiohttp.ClientSession(
            headers=self._headers, timeout=aiohttp.ClientTimeout(total=None), trust_env=False
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def detail(self) -> dict[str, Any]:
        """Return `GET /instances?view=detail`."""
        detail = await self._call("GET", {"view": "detail"}, None, _CALL_TIMEOUT_S)
        if not isinstance(detail.get("instances"), list):
            raise self._no_proxy(200)
        return detail

    async def register(self, registration: dict[str, Any]) -> dict[str, Any]:
        """Register an instance; the proxy answers after its first probe."""
        return await self._call("POST", {}, registration, _REGISTER_TIMEOUT_S)

    async def remove(self, instance: str) -> dict[str, Any]:
        """Remove an instance at once."""
        return await self._call("DELETE", {"url": instance}, None, _CALL_TIMEOUT_S)

    async def drain(self, instance: str, timeout_s: float) -> dict[str, Any]:
        """Drain an instance; the proxy answers when it has left."""
        query = {"url": instance, "drain": "true", "timeout": f"{timeout_s:g}"}
        return await self._call("DELETE", query, None, timeout_s + _DRAIN_SLACK_S)

    async def _call(
        self, method: str, query: dict[str, str], body: dict[str, Any] | None, timeout_s: float
    ) -> dict[str, Any]:
        assert self._session is not None
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._session.request(
                    method,
                    f"{self._url}/instances",
                    params=query,
                    data=None if body is None else msgspec.json.encode(body),
                    allow_redirects=False,
                ) as answer,
            ):
                return self._understand(answer.status, await answer.read())
        except TimeoutError:
            raise ProxyUnreachable(
                f"the proxy at {self._url} did not answer within {timeout_s:g} s"
            ) from None
        except (aiohttp.ClientError, OSError) as error:
            raise ProxyUnreachable(f"cannot reach the proxy at {self._url}: {_why(error)}") from None

    def _understand(self, status: int, body: bytes) -> dict[str, Any]:
        try:
            answer = msgspec.json.decode(body, type=dict[str, Any])
        except (msgspec.MsgspecError, UnicodeDecodeError):
            raise self._no_proxy(status) from None
        if status == 200:
            return answer
        if status in (404, 405, 501) and "removed" not in answer:
            raise self._no_proxy(status)
        error = answer.get("error")
        message = error.get("message") if isinstance(error, dict) else None
        raise Refused(status, str(message) if message else f"the proxy answered with status {status}")

    def _no_proxy(self, status: int) -> ProxyUnreachable:
        return ProxyUnreachable(
            f"what answers at {self._url} with status {status} is no epdctl proxy (--url)"
        )


def _why(error: aiohttp.ClientError | OSError) -> str:
    number = error.errno if isinstance(error, OSError) else None
    if number == errno.ECONNREFUSED:
        return "connection refused (is epdctl serve running there? choose another with --url)"
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return "the host name is not known (--url)"
    return "the connection failed (--url)"
