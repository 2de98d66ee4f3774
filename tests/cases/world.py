"""The running world of one case: the product's process, the stubs, the small servers, and what was recorded.

Rules of this file: `World` owns everything it started and frees it in `close`; it judges nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.cases import product
from tests.cases.http_client import Request, Result, send
from tests.cases.loader import Case, picture_folders
from tests.cases.placeholders import Pictures, Placeholders
from tests.cases.servers import FileServer, Redirector, SmallServer
from tests.cases.stalls import Stalls
from tests.stubs.behaviour import Behaviour, parse_behaviour
from tests.stubs.consumer import StubConsumer
from tests.stubs.instance import StubInstance
from tests.stubs.ports import free_port
from tests.stubs.process import Process, epdctl_command, start_process

ExtraCheck = Callable[["World", Mapping[str, Any]], AsyncIterator[str]]
START_TIMEOUT_S, WORKER_START_TIMEOUT_S = 30.0, 120.0
TIME_WAIT = "06"


@dataclass(slots=True)
class Memory:
    """Resident bytes of the product at one moment."""

    rss_bytes: int


@dataclass(slots=True)
class Records:
    """What happened: results by step, processes that were expected to end, memory marks, moments.

    `groups`: workers that were started together; `control`: lost messages and the longest silence, by kind.
    """

    results: dict[str, list[Result]] = field(default_factory=lambda: defaultdict(list))
    exits: list[tuple[Process, float]] = field(default_factory=list)
    memory: dict[str, Memory] = field(default_factory=dict)
    variants: list[Any] = field(default_factory=list)
    last_fault_at: dict[str, float] = field(default_factory=dict)
    scan_hits: int = 0
    steps_began: float = 0.0
    steps_ended: float = 0.0
    rss_at_start: int = 0
    time_wait_at_start: int = 0
    metrics_at_start: str = ""
    stop_signalled_at: float | None = None
    groups: list[list[Any]] = field(default_factory=list)
    control: dict[str, tuple[int, float]] = field(default_factory=dict)


class World:
    """Everything one case runs against."""

    def __init__(self, case: Case, folder: Path) -> None:
        self.case = case
        self.folder = folder
        self.pictures = Pictures(picture_folders(case.path.parent))
        self.records = Records()
        self.stalls = Stalls()
        self.port = free_port()
        self.process: Process | None = None
        self.processes: list[Process] = []
        self.stubs: dict[str, StubInstance] = {}
        self.consumers: dict[str, StubConsumer] = {}
        self.worker_urls: dict[str, str] = {}
        self.canary = SmallServer()
        self.redirector = Redirector()
        self.files = FileServer(case.raw.get("files") or {}, self.pictures)
        self.placeholders = Placeholders(self.pictures)
        self.extra_checks: Mapping[str, ExtraCheck] = {}
        self._initial: dict[str, Behaviour] = {}

    @property
    def url(self) -> str:
        """The product's base URL."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def logs(self) -> str:
        """Everything that all product processes wrote."""
        return "".join(process.logs for process in self.processes)

    async def open(self) -> None:
        """Start stubs and servers, then the product, and register what the set-up registers."""
        await self.open_surroundings()
        if self.case.target != "config":
            await self.start_product()
            await self._register_all()
        await self._note_start()

    async def open_surroundings(self) -> None:
        """Start the small servers and the stubs of the set-up."""
        for server in (self.canary, self.redirector, self.files):
            await server.start()
        for entry in self.case.instances:
            self._make_stub(entry)
        self.placeholders = Placeholders(self.pictures, self._values())
        for entry in self.case.instances:
            await self._start_stub(entry)

    def living(self) -> list[Process]:
        """Return the processes that must live through the case."""
        return [self.process] if self.process is not None else []

    async def close(self) -> None:
        """Free everything."""
        for process in self.processes:
            process.close()
        for stub in self.stubs.values():
            await stub.stop()
        for consumer in self.consumers.values():
            await consumer.stop()
        for server in (self.canary, self.redirector, self.files):
            await server.close()

    def url_of(self, name: str) -> str:
        """Return the URL of an instance, stub or bundled worker."""
        return self.worker_urls[name] if name in self.worker_urls else self.stubs[name].url

    def _make_stub(self, entry: Mapping[str, Any]) -> None:
        name = entry["name"]
        if self.case.target == "proxy+worker" and entry["role"] == "encode":
            self.worker_urls[name] = f"http://127.0.0.1:{free_port()}"
            return
        if entry["role"] == "consumer_zmq":
            self.consumers[name] = StubConsumer((entry.get("behaviour") or {}).get("zmq_behaviour"))
            return
        behaviour = entry.get("behaviour") or {}
        base_path, bind = behaviour.get("base_path", ""), behaviour.get("bind", "127.0.0.1")
        shell = Behaviour(base_path=base_path, bind=bind)
        self.stubs[name] = StubInstance(entry["role"], shell, name=name, fill=self.fill)

    def fill(self, text: str) -> str:
        """Return a stub's text with placeholders filled in."""
        return self.placeholders.string(text)

    def _values(self) -> dict[str, Any]:
        values: dict[str, Any] = {
            "admin_key": product.ADMIN_KEY,
            "canary": self.canary.url,
            "canary_port": self.canary.port,
            "redirector": self.redirector.url,
            "fileserver": self.files.url,
            "busy_port": self.canary.port,
            "allowed_dir": str(self.pictures.folders[0]),
        }
        for name, stub in self.stubs.items():
            values |= {f"url:{name}": stub.url, f"port:{name}": stub.port, f"hostport:{name}": stub.hostport}
        for name, consumer in self.consumers.items():
            values |= {f"zmq:{name}": consumer.address, f"port:{name}": consumer.port}
        values |= {f"url:{name}": url for name, url in self.worker_urls.items()}
        return values

    async def _start_stub(self, entry: Mapping[str, Any]) -> None:
        name = entry["name"]
        if name in self.consumers:
            await self.consumers[name].start()
            return
        if name in self.worker_urls:
            await self._start_worker(name)
            return
        behaviour = parse_behaviour(self.placeholders.expand(entry.get("behaviour") or {}))
        self._initial[name] = behaviour
        await self.stubs[name].start()
        if behaviour.accepts_connections:
            await self.stubs[name].set_behaviour(behaviour)

    async def _start_worker(self, name: str) -> None:
        port = int(self.worker_urls[name].rpartition(":")[2])
        arguments = product.worker_arguments(self.case.raw.get("config") or {}, port)
        process = start_process(epdctl_command(*arguments), self.folder / "logs", f"worker-{name}")
        self.processes.append(process)

        async def is_healthy() -> bool:
            request = Request(path="/health", deadline_s=5)
            return (await send("127.0.0.1", port, request, Result(step="", index=0))).status == 200

        await process.wait_until(is_healthy, "the worker is healthy", WORKER_START_TIMEOUT_S)

    async def start_product(self) -> None:
        """Start `epdctl serve` and wait until it answers."""
        arguments = product.serve_arguments(self.case.raw.get("config") or {}, self.port, self.folder)
        self.process = self.start_process(arguments, {})
        await self.process.wait_until(self._answers, "GET /health answers 200", START_TIMEOUT_S)

    def start_process(self, arguments: list[str], env: Mapping[str, str | None]) -> Process:
        """Start `epdctl serve` with exactly these arguments."""
        process = start_process(
            epdctl_command("serve", *arguments),
            self.folder / "logs",
            f"serve-{len(self.processes)}",
            env={**product.environment(self.folder), **env},
        )
        self.processes.append(process)
        return process

    async def _answers(self) -> bool:
        return (await self.ask("GET", "/health")).status == 200

    async def ask(
        self, method: str, path: str, body: bytes | None = None, deadline_s: float = 10.0
    ) -> Result:
        """Send one call of the harness itself, with the admin key."""
        request = Request(
            method=method,
            path=path,
            headers={"X-API-Key": product.ADMIN_KEY},
            body=body,
            deadline_s=deadline_s,
        )
        return await send("127.0.0.1", self.port, request, Result(step="", index=0))

    async def _register_all(self) -> None:
        """Register in order; one that cannot be reached joins while it still can, then breaks."""
        waiting = []
        for entry in self.case.instances:
            if not entry.get("register", True) or entry["role"] == "consumer_zmq":
                continue
            calls = asyncio.create_task(self.register(entry["name"]))
            initial = self._initial.get(entry["name"])
            if initial is not None and initial.health.hang:
                waiting.append(calls)
                await asyncio.sleep(0)
            else:
                await calls
        await asyncio.gather(*waiting)
        for name, behaviour in self._initial.items():
            if not behaviour.accepts_connections:
                await self.stubs[name].set_behaviour(behaviour)

    async def register(self, name: str) -> Result:
        """Announce one stub, as its launcher would."""
        entry = next(e for e in self.case.instances if e["name"] == name)
        body = product.registration(self.placeholders.expand(dict(entry)), self.url_of(name))
        result = await self.ask("POST", "/instances", product.json_bytes(body), deadline_s=30)
        assert result.status == 200, f"registering {name}: {result.status} {result.text[:300]}"
        return result

    def initial_behaviour(self, name: str) -> Behaviour | None:
        """Return how a stub behaved at the start."""
        return self._initial.get(name)

    async def set_fault(self, name: str, changes: Mapping[str, Any]) -> None:
        """Change a stub: the keys given replace those it has; no keys at all make it right again."""
        if name in self.consumers:
            self.consumers[name].set_behaviour(changes.get("zmq_behaviour") or {})
            return
        entry = next(e for e in self.case.instances if e["name"] == name)
        current = self.placeholders.expand(entry.get("behaviour") or {})
        merged = {**current, **changes} if changes else {}
        await self.stubs[name].set_behaviour(parse_behaviour(merged))
        self.records.last_fault_at[name] = time.monotonic()

    async def _note_start(self) -> None:
        self.records.steps_began = time.monotonic()
        self.records.time_wait_at_start = time_wait_sockets(stub.port for stub in self.stubs.values())
        if self.process is not None:
            self.records.rss_at_start = self.process.rss_bytes()
            self.process.reset_peak_rss()
            self.records.metrics_at_start = (await self.ask("GET", "/metrics")).text


def time_wait_sockets(ports: Iterable[int]) -> int:
    """Return how many sockets from or to these local ports wait in TIME_WAIT."""
    wanted = {f"{port:04X}" for port in ports}
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(1 for row in rows if row[3] == TIME_WAIT and {row[1][-4:], row[2][-4:]} & wanted)
