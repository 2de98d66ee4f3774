"""Asks an instance how it is: `GET /health`, and `GET /v1/models` for what it serves.

Rules of this file:
- The only place that knows aiohttp's exceptions for probes; out comes a `ProbeResult`, never an exception,
  except on cancel.
- Refused, reset, late, or any status but 200 is unhealthy. What fails on our side (no file descriptors, no
  memory, no local port) is inconclusive.
- Each probe opens its own connection: one that is still open says nothing about who accepts new ones.
- Causes are fixed words; no library text and no host gets into logs or answers.
"""

from __future__ import annotations

import asyncio
import errno
import ssl
from dataclasses import dataclass
from typing import Protocol

import aiohttp
import msgspec

from epdctl import __version__
from epdctl.domain import InstanceUrl, ProbeOutcome

_OWN_ERRNOS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EADDRNOTAVAIL})
_MAX_MODELS_BYTES = 1 << 20
_MAX_MODELS = 1000
_MAX_MODEL_CHARS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    """What one `GET /health` said; `error` is a fixed phrase."""

    outcome: ProbeOutcome
    error: str | None = None


class Prober(Protocol):
    """What the health loop asks of a prober."""

    async def probe(self, url: InstanceUrl) -> ProbeResult:
        """Ask `url` how it is, within the probe's deadline."""
        ...

    async def fetch_models(self, url: InstanceUrl) -> frozenset[str] | None:
        """Return the models that `url` lists, empty for none; None when it could not be learnt now."""
        ...


class HttpProber:
    """Probes over HTTP; owns its client session from `open` to `close`, and shares nothing with requests."""

    def __init__(self, *, timeout_s: float, api_key: str | None, tls: ssl.SSLContext | None) -> None:
        self._timeout_s = timeout_s
        self._tls = tls
        self._headers = {"User-Agent": f"epdctl/{__version__}", "Accept": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._opened: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        """Make the session; a coroutine, because aiohttp ties a session to the running loop."""
        ssl_setting = True if self._tls is None else self._tls
        self._opened = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True, ssl=ssl_setting),
            # The deadline is ours (`asyncio.timeout`): it covers name resolution and what aiohttp's leaves.
            timeout=aiohttp.ClientTimeout(total=None),
            headers=self._headers,
            auto_decompress=False,
            trust_env=False,
        )

    async def close(self) -> None:
        """Close the session."""
        if self._opened is not None:
            await self._opened.close()

    @property
    def _session(self) -> aiohttp.ClientSession:
        assert self._opened is not None, "open() comes first"
        return self._opened

    async def probe(self, url: InstanceUrl) -> ProbeResult:
        """Ask `url` how it is, within the probe's deadline."""
        try:
            async with (
                asyncio.timeout(self._timeout_s),
                self._session.get(f"{url}/health", allow_redirects=False) as answer,
            ):
                status = answer.status
        except (aiohttp.ClientError, OSError) as error:
            return _explain(error)
        except UnicodeError:
            # What the system's resolver says of a host that cannot be one.
            return ProbeResult(outcome=ProbeOutcome.UNHEALTHY, error="name not resolved")
        if status == 200:
            return ProbeResult(outcome=ProbeOutcome.HEALTHY)
        return ProbeResult(outcome=ProbeOutcome.UNHEALTHY, error=f"status {status}")

    async def fetch_models(self, url: InstanceUrl) -> frozenset[str] | None:
        """Return the models that `url` lists, empty for none; None when it could not be learnt now."""
        try:
            async with (
                asyncio.timeout(self._timeout_s),
                self._session.get(f"{url}/v1/models", allow_redirects=False) as answer,
            ):
                if answer.status != 200:
                    return frozenset() if 400 <= answer.status < 500 else None
                body = await answer.content.read(_MAX_MODELS_BYTES + 1)
                while len(body) <= _MAX_MODELS_BYTES and (
                    more := await answer.content.read(_MAX_MODELS_BYTES)
                ):
                    body += more
        except (aiohttp.ClientError, OSError, UnicodeError):
            return None
        return parse_models(body)


def parse_models(body: bytes) -> frozenset[str] | None:
    """Return the ids in an OpenAI model list; None when the body is none, or is too large to be one."""
    if len(body) > _MAX_MODELS_BYTES:
        return None
    try:
        listed = msgspec.json.decode(body, type=_ModelList).data
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    names = [entry.id for entry in listed if 0 < len(entry.id) <= _MAX_MODEL_CHARS]
    return frozenset(names[:_MAX_MODELS])


class _ModelEntry(msgspec.Struct):
    id: str


class _ModelList(msgspec.Struct):
    data: list[_ModelEntry]


def _explain(error: aiohttp.ClientError | OSError) -> ProbeResult:
    number = error.errno if isinstance(error, OSError) else None
    if number in _OWN_ERRNOS:
        return ProbeResult(outcome=ProbeOutcome.INCONCLUSIVE, error="out of local resources")
    return ProbeResult(outcome=ProbeOutcome.UNHEALTHY, error=_phrase(error))


def _phrase(error: aiohttp.ClientError | OSError) -> str:
    match error:
        case TimeoutError():
            return "timeout"
        case aiohttp.ClientConnectorDNSError():
            return "name not resolved"
        case aiohttp.ClientSSLError():
            return "TLS failure"
        case aiohttp.ClientConnectorError() | ConnectionRefusedError():
            return "connection refused" if error.errno == errno.ECONNREFUSED else "connection failed"
        case aiohttp.ServerDisconnectedError() | aiohttp.ClientOSError() | OSError():
            return "connection reset"
        case _:
            return "no valid HTTP answer"
