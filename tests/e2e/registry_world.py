"""A real `epdctl serve` process for registry tests, and short ways to talk to it."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from tests.stubs.ports import free_port
from tests.stubs.process import Process, epdctl_command, start_process, wait_until

KEY = "e2e-admin-key"
START_TIMEOUT_S = 30.0


class Proxy:
    """One proxy that can be started again on the same port and store."""

    def __init__(self, folder: Path, session: aiohttp.ClientSession, flags: tuple[str, ...]) -> None:
        self.folder = folder
        self.session = session
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.flags = flags
        self.process: Process | None = None
        self._starts = 0

    @property
    def environment(self) -> dict[str, str | None]:
        """Variables of the proxy and of commands that talk to it."""
        return {
            "ADMIN_API_KEY": KEY,
            "XDG_STATE_HOME": str(self.folder / "state"),
            "EPDCTL_URL": self.url,
            "OMP_NUM_THREADS": "1",
        }

    async def start(self) -> None:
        """Start the process and wait until it is alive."""
        self._starts += 1
        command = epdctl_command(
            "serve", "--host", "127.0.0.1", "--port", str(self.port), "--dynamic-registration", *self.flags
        )
        self.process = start_process(command, self.folder, f"serve-{self._starts}", env=self.environment)
        await self.process.wait_until(self.is_alive, "proxy alive", START_TIMEOUT_S)

    async def is_alive(self) -> bool:
        """Say whether `/health` answers 200."""
        try:
            return (await self.get("/health"))[0] == 200
        except (aiohttp.ClientError, OSError):
            return False

    async def kill(self) -> None:
        """SIGKILL, as a crash."""
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        await self.process.wait_exit()

    async def stop(self) -> None:
        """End the process, however it is."""
        if self.process is not None:
            await self.process.stop(grace_s=0.5)

    async def call(
        self,
        method: str,
        path: str,
        *,
        body: Mapping[str, Any] | None = None,
        query: Mapping[str, str] | None = None,
        key: str | None = KEY,
    ) -> tuple[int, Any]:
        """Return status and JSON of one call."""
        headers = {} if key is None else {"X-API-Key": key}
        async with (
            asyncio.timeout(30),
            self.session.request(method, self.url + path, json=body, params=query, headers=headers) as answer,
        ):
            return answer.status, await answer.json(content_type=None)

    async def get(self, path: str, **query: str) -> tuple[int, Any]:
        """Read a page without a key."""
        return await self.call("GET", path, query=query, key=None)

    async def register(self, role: str, url: str, **fields: Any) -> tuple[int, Any]:
        """`POST /instances`."""
        return await self.call("POST", "/instances", body={"role": role, "url": url} | fields)

    async def remove(self, url: str, **query: str) -> tuple[int, Any]:
        """`DELETE /instances`."""
        return await self.call("DELETE", "/instances", query={"url": url} | query)

    async def one(self, url: str) -> dict[str, Any] | None:
        """Return one instance of the detail view."""
        _, detail = await self.get("/instances", view="detail")
        return next((entry for entry in detail["instances"] if entry["url"] == url), None)

    async def state(self, url: str) -> str | None:
        """Return the state of an instance, None when it is not registered."""
        entry = await self.one(url)
        return None if entry is None else str(entry["state"])

    async def wait_state(self, url: str, state: str | None, timeout_s: float = 15.0) -> None:
        """Wait until an instance is in `state`."""

        async def holds() -> bool:
            return await self.state(url) == state

        await wait_until(holds, f"{url} is {state}", timeout_s)

    def log(self) -> list[dict[str, Any]]:
        """Return the log of the running process."""
        assert self.process is not None
        return [
            json.loads(line) for line in self.process.stderr.splitlines(keepends=True) if line[-1] == "\n"
        ]

    def events(self, name: str) -> list[dict[str, Any]]:
        """Return the log lines of the running process that carry an event."""
        return [line for line in self.log() if line["event"] == name]


@asynccontextmanager
async def serving(folder: Path, *flags: str, start: bool = True) -> AsyncIterator[Proxy]:
    """Yield a started proxy with fast probes; `flags` come last and win."""
    fast = (
        "--probe-interval",
        "0.1",
        "--probe-timeout",
        "0.5",
        "--drain-delay",
        "0",
        "--shutdown-grace",
        "5",
    )
    # A connection for each call: proxies are killed and started again on their port.
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session:
        proxy = Proxy(folder, session, (*fast, *flags))
        try:
            if start:
                await proxy.start()
            yield proxy
        finally:
            await proxy.stop()
