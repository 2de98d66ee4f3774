"""A real `epdctl serve` process in front of stub instances, and short ways to talk to it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from tests.stubs.consumer import StubConsumer
from tests.stubs.instance import StubInstance
from tests.stubs.ports import free_port
from tests.stubs.process import Process, epdctl_command, start_process, wait_until

CHAT = "/v1/chat/completions"
PICTURE = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8BQDwAEhQGAhKmMIQAA"
    "AABJRU5ErkJggg=="
)
ADMIN_KEY = "e2e-admin-key"
PAIR = {"e0": "encode", "pd0": "prefill_decode"}
SPLIT = {"e0": "encode", "p0": "prefill", "d0": "decode"}
QUIET = ("--drain-delay", "0", "--probe-interval", "30", "--fail-threshold", "1000")
DYNAMIC = ("--dynamic-registration", "--store", "memory")
START_TIMEOUT_S = 30.0


def picture_request(count: int = 1, **fields: Any) -> dict[str, Any]:
    """Return a chat request with `count` pictures, each another one."""
    parts = [{"type": "image_url", "image_url": {"url": PICTURE + "=" * number}} for number in range(count)]
    return {
        "model": "m",
        "messages": [{"role": "user", "content": [*parts, {"type": "text", "text": "?"}]}],
    } | fields


def text_request(**fields: Any) -> dict[str, Any]:
    """Return a chat request without media."""
    return {"model": "m", "messages": [{"role": "user", "content": "hello"}]} | fields


@dataclass(slots=True, kw_only=True)
class Reply:
    """What a client got; `failure` says how the connection ended when the body was not whole."""

    status: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    failure: str | None = None

    @property
    def json(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)

    @property
    def code(self) -> Any:
        """The error code in the body."""
        return self.json["error"]["code"]

    @property
    def events(self) -> list[str]:
        """The data of the server-sent events in the body."""
        return [line[6:] for line in self.body.decode().splitlines() if line.startswith("data: ")]


class ProxyWorld:
    """One proxy with its stubs; the stubs live in the test's loop, the proxy is a process."""

    def __init__(
        self,
        folder: Path,
        stubs: Mapping[str, StubInstance],
        consumer: StubConsumer | None,
        flags: Sequence[str],
        register: Mapping[str, Mapping[str, Any]] | None,
    ) -> None:
        self._register = register
        self.stubs = dict(stubs)
        self.consumer = consumer
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._folder = folder
        self._flags = flags
        self._session: aiohttp.ClientSession | None = None
        self.process: Process | None = None

    def __getitem__(self, name: str) -> StubInstance:
        return self.stubs[name]

    async def start(self, env: Mapping[str, str | None] | None = None) -> None:
        """Start the proxy and wait until it is ready to serve pictures."""
        # A connection for each request: an early answer would leave a pooled one half used.
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=60), connector=aiohttp.TCPConnector(force_close=True, limit=0)
        )
        fleet = self._static_flags() if self._register is None else DYNAMIC
        command = epdctl_command(
            *("serve", "--host", "127.0.0.1", "--port", str(self.port)), *fleet, *QUIET, *self._flags
        )
        environment = {"ADMIN_API_KEY": ADMIN_KEY, **(env or {})}
        self.process = start_process(command, self._folder, f"proxy-{self.port}", env=environment)
        if self._register is not None:
            await self.process.wait_until(self.is_alive, "proxy alive", START_TIMEOUT_S)
            for name, fields in self._register.items():
                stub = self.stubs[name]
                body = {"role": stub.role.value, "url": stub.url, **fields}
                answer = await self.ask(
                    "POST", "/instances", json_body=body, headers={"X-API-Key": ADMIN_KEY}
                )
                assert answer.status == 200, answer.body
        await self.process.wait_until(self.is_ready, "proxy ready", START_TIMEOUT_S)

    async def stop(self) -> None:
        """End the proxy."""
        if self.process is not None:
            await self.process.stop(grace_s=3)
        if self._session is not None:
            await self._session.close()

    def _static_flags(self) -> list[str]:
        urls = {
            role: ",".join(stub.url for stub in self.stubs.values() if stub.role.value == role)
            for role in ("encode", "prefill", "decode", "prefill_decode")
        }
        flags = [
            "--encode-servers-urls",
            urls["encode"],
            "--decode-servers-urls",
            urls["decode"] or urls["prefill_decode"],
        ]
        if urls["prefill"]:
            flags += ["--prefill-servers-urls", urls["prefill"]]
        if self.consumer is not None:
            flags += ["--ec-consumer-zmq-addrs", self.consumer.address]
        return flags

    async def is_ready(self) -> bool:
        """Say whether `/ready` answers 200."""
        return await self._answers("/ready")

    async def is_alive(self) -> bool:
        """Say whether `/health` answers 200."""
        return await self._answers("/health")

    async def _answers(self, path: str) -> bool:
        try:
            return (await self.ask("GET", path)).status == 200
        except (aiohttp.ClientError, OSError):
            return False

    async def ask(
        self,
        method: str,
        path: str,
        *,
        json_body: Any = None,
        data: Any = None,
        headers: Mapping[str, str] | None = None,
    ) -> Reply:
        """Send one request and return what came, whole or not."""
        assert self._session is not None
        reply = Reply()
        try:
            async with self._session.request(
                method, self.url + path, json=json_body, data=data, headers=headers
            ) as answer:
                reply.status, reply.headers = answer.status, answer.headers
                async for piece in answer.content.iter_any():
                    reply.body += piece
        except aiohttp.ClientPayloadError as error:
            reply.failure = type(error).__name__
        return reply

    async def chat(self, body: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> Reply:
        """Send one chat request."""
        return await self.ask("POST", CHAT, json_body=body, headers=headers)

    async def metric(self, name: str, /, **labels: str) -> float:
        """Return the sum of a metric's samples that carry `labels`."""
        text = (await self.ask("GET", "/metrics")).body.decode()
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        lines = [line for line in text.splitlines() if line.startswith((name + "{", name + " "))]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if all(word in line for word in wanted))

    async def is_quiet(self) -> bool:
        """Say whether nothing is in flight, neither in a stage nor on an instance."""
        detail = (await self.ask("GET", "/instances?view=detail")).json
        leases = sum(entry["in_flight"] for entry in detail["instances"])
        return leases == 0 and await self.metric("epdctl_in_flight") == 0

    async def wait_quiet(self, timeout_s: float = 5.0) -> None:
        """Wait until nothing is in flight."""
        await wait_until(self.is_quiet, "nothing is in flight", timeout_s)

    def lines(self, event: str = "request_finished") -> list[dict[str, Any]]:
        """Return the log lines of one event."""
        assert self.process is not None
        parsed = [json.loads(line) for line in self.process.stderr.splitlines() if line.startswith("{")]
        return [line for line in parsed if line.get("event") == event]

    async def line_of(self, request_id: str) -> dict[str, Any]:
        """Return the log line of a finished request."""
        found: list[dict[str, Any]] = []

        def there() -> bool:
            found[:] = [line for line in self.lines() if line["request_id"] == request_id]
            return bool(found)

        await wait_until(there, f"a line about {request_id}")
        return found[0]

    async def open_raw(self, body: Mapping[str, Any]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Send a chat request on a connection of its own and return the connection."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        data = json.dumps(body).encode()
        writer.write(
            b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
            % (CHAT.encode(), len(data))
            + data
        )
        await writer.drain()
        return reader, writer

    async def reset(self) -> None:
        """Bring all stubs back to right answers and forget what they saw."""
        for stub in self.stubs.values():
            await stub.set_behaviour({})
            stub.calls.clear()
        if self.consumer is not None:
            self.consumer.set_behaviour({})
            self.consumer.calls.clear()


@asynccontextmanager
async def proxy_world(
    folder: Path,
    roles: Mapping[str, str],
    *flags: str,
    with_consumer: bool = False,
    env: Mapping[str, str | None] | None = None,
    behaviours: Mapping[str, Mapping[str, Any]] | None = None,
    register: Mapping[str, Mapping[str, Any]] | None = None,
) -> AsyncIterator[ProxyWorld]:
    """Run a proxy with a stub for each name in `roles`, and an EC consumer when asked for.

    The stubs are static instances, or, with `register`, registered with those fields.
    """
    consumer = StubConsumer() if with_consumer else None
    stubs = {
        name: StubInstance(role, (behaviours or {}).get(name), name=name) for name, role in roles.items()
    }
    world = ProxyWorld(folder, stubs, consumer, flags, register)
    try:
        if consumer is not None:
            await consumer.start()
        for stub in stubs.values():
            await stub.start()
        await world.start(env)
        yield world
    finally:
        await world.stop()
        for stub in stubs.values():
            await stub.stop()
        if consumer is not None:
            await consumer.stop()
