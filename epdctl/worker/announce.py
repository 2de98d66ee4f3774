"""Self-registration of a worker with a proxy (`--register URL`): said again and again, withdrawn on exit.

Rules of this file: knows the proxy's admin API from outside only (`POST` and `DELETE /instances`). A proxy
that is not there, or that refuses, never stops a worker from serving: it is logged, and tried again. The key
is sent as `X-API-Key` and never logged.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import structlog

from epdctl import hosts
from epdctl.domain import Role

REPEAT_S = 10.0
RETRY_S = (0.5, 10.0)
TIMEOUT_S = 5.0
_ANYWHERE = "192.0.2.1"  # TEST-NET-1: a route is looked up, nothing is sent


class NoAddress(ValueError):
    """The address under which others reach this worker cannot be found; the text says which flag helps."""


def is_wildcard(host: str) -> bool:
    """Return whether `host` means every address of the machine."""
    return host == "" or hosts.is_wildcard(host)


def route_towards(host: str) -> str:
    """Return our own address on the route towards `host`; raises OSError when there is none."""
    family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def advertised_url(host: str, port: int, advertise_url: str | None, registry_url: str | None) -> str:
    """Return the URL under which others reach a worker that listens on `host`:`port`.

    What was given counts; else a listening address that is no wildcard; else our address on the route
    towards the registry, so it is a loopback address only if the registry's is one; with no registry, on the
    route to the internet.

    Raises:
        NoAddress: there is no such route.
    """
    if advertise_url is not None:
        return advertise_url
    if not is_wildcard(host):
        return _url(host, port)
    towards = urlsplit(registry_url).hostname if registry_url else _ANYWHERE
    try:
        return _url(route_towards(towards or _ANYWHERE), port)
    except OSError as error:
        where = "the registry" if registry_url else "the network"
        text = f"--host {host or '*'} is a wildcard and no route towards {where} was found"
        raise NoAddress(f"{text}: give --advertise-url http://ADDRESS:{port}, or another --host") from error


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Announcement:
    """What is registered, and where."""

    registry_url: str
    url: str
    role: Role
    api_key: str | None
    model: str | None = None
    dp_size: int = 1
    ec_zmq_addrs: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    kv_bootstrap_addr: str | None = None

    @property
    def body(self) -> dict[str, Any]:
        """The body of `POST /instances`."""
        return {
            "role": self.role.value,
            "url": self.url,
            "model": self.model,
            "dp_size": self.dp_size,
            "ec_zmq_addrs": list(self.ec_zmq_addrs),
            "labels": dict(self.labels),
            "kv_bootstrap_addr": self.kv_bootstrap_addr,
        }


class SelfRegistration:
    """Keeps one announcement alive; `run` is a task of the worker, `withdraw` its end."""

    def __init__(self, announcement: Announcement) -> None:
        self._announcement = announcement
        self._log = structlog.get_logger().bind(registry=announcement.registry_url, instance=announcement.url)
        self._said: str | None = None

    async def run(self) -> None:
        """Register, and repeat: every ten seconds, sooner after a failure, until cancelled."""
        delay, most = RETRY_S
        while True:
            if await self._register():
                delay = RETRY_S[0]
                await asyncio.sleep(REPEAT_S)
            else:
                await asyncio.sleep(delay)
                delay = min(most, delay * 2)

    async def withdraw(self) -> None:
        """Take the registration back; a proxy that does not answer will notice by itself."""
        params = {"url": self._announcement.url}
        status, _ = await self._send("DELETE", params=params)
        self._log.info("registration_withdrawn", status=status)

    async def _register(self) -> bool:
        status, text = await self._send("POST", json=self._announcement.body)
        if status == 200:
            self._tell("registered", "info")
            return True
        reason = "no answer" if status is None else f"status {status}: {text}"
        self._tell("registration_failed", "warning", reason=reason)
        return False

    def _tell(self, event: str, level: str, **facts: str) -> None:
        """Log a change, not each repetition."""
        line = repr((event, facts))
        if line != self._said:
            self._said = line
            getattr(self._log, level)(event, **facts)

    async def _send(self, method: str, **options: Any) -> tuple[int | None, str]:
        key = self._announcement.api_key
        headers = {"X-API-Key": key} if key else {}
        try:
            timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
            async with (
                aiohttp.ClientSession(timeout=timeout, headers=headers) as session,
                session.request(method, self._announcement.registry_url + "/instances", **options) as answer,
            ):
                body = await answer.content.read(2048)
                return answer.status, body.decode(errors="replace")
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
            return None, ""
