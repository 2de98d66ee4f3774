"""The processes of a deployment: real vLLM instances, the reference proxy, and ours.

Rules of this file: at most one deployment's vLLM instances run at a time, at the lowest priority; an
instance keeps its ports over a restart; every process leads its own group, which is killed at the end."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from tests.interop.engines import HOST, EngineSpec, Place, engine_arguments, engine_environment
from tests.interop.installed import ROOT, Installed
from tests.stubs.ports import free_port
from tests.stubs.process import Process, start_process, wait_until

MODEL = ROOT / "models" / "tiny-vlm" / "qwen2_5_vl"
START_S = 400.0
NICE = ("nice", "-n", "15")


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A process that answers HTTP, and where."""

    process: Process
    url: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """A vLLM instance that answers."""

    spec: EngineSpec
    place: Place
    process: Process

    @property
    def url(self) -> str:
        """Base URL of its API."""
        return f"http://{HOST}:{self.place.http_port}"

    @property
    def ec_address(self) -> str:
        """EC control address of a Mooncake consumer."""
        return f"tcp://{HOST}:{self.place.ec_port}"

    @property
    def bootstrap_address(self) -> str:
        """Bootstrap server of a prefill instance with the KV MooncakeConnector."""
        return f"http://{HOST}:{self.place.side_port}"


async def answers(url: str) -> bool:
    """Return whether `url` answers 200 within two seconds."""
    timeout = aiohttp.ClientTimeout(total=2)
    try:
        async with aiohttp.ClientSession(timeout=timeout) as session, session.get(url) as answer:
            return answer.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False


async def wait_healthy(process: Process, url: str, timeout_s: float = START_S) -> None:
    """Wait until `url`/health answers 200; a process that ends, or the deadline, raises with its log."""
    await process.wait_until(lambda: answers(url + "/health"), f"{url}/health answers 200", timeout_s)


class Fleet:
    """All processes of the session. `use` says which vLLM instances are wanted now; the others end."""

    def __init__(self, installed: Installed, folder: Path) -> None:
        self.installed = installed
        self.folder = folder
        self._engines: dict[str, Engine] = {}
        self._places: dict[str, Place] = {}
        self._others: list[Process] = []

    def place_of(self, spec: EngineSpec) -> Place:
        """Return where `spec` listens, the same for the whole session."""
        if spec.name not in self._places:
            self._places[spec.name] = Place(
                http_port=free_port(),
                ec_port=free_port(),
                side_port=free_port(),
                shared_storage=self.folder / "shared-storage",
            )
        return self._places[spec.name]

    async def use(self, *specs: EngineSpec, may_stay: Sequence[EngineSpec] = ()) -> tuple[Engine, ...]:
        """Start what is missing of `specs`, all at once, and return them in order; the others end.

        `may_stay` names instances that the next module needs: they are not ended, nor started.
        """
        wanted = {spec.name for spec in (*specs, *may_stay)}
        await asyncio.gather(*(self.stop(name) for name in set(self._engines) - wanted))
        missing = [spec for spec in specs if spec.name not in self._engines]
        for spec in missing:
            self._engines[spec.name] = self._start(spec)
        await asyncio.gather(*(wait_healthy(e.process, e.url) for e in self._named(missing)))
        return self._named(specs)

    async def stop(self, name: str) -> None:
        """End the vLLM instance `name`; its place is kept."""
        await self._engines.pop(name).process.stop(grace_s=10)

    async def kill(self, spec: EngineSpec) -> None:
        """SIGKILL all processes of an instance at once; `use` starts it again at the same place."""
        engine = self._engines.pop(spec.name)
        engine.process.kill_group()
        await engine.process.wait_exit()

    async def serve(self, name: str, *arguments: str, key: str | None = None) -> Running:
        """Start `epdctl serve` on a free port; wait until it answers, with static URLs until it is ready."""
        port = free_port()
        command = [sys.executable, "-m", "epdctl", "serve", "--host", HOST, "--port", str(port)]
        # A niced instance on a busy machine may take seconds to answer a probe; a dead one refuses at once.
        probes = ("--probe-interval", "1", "--probe-timeout", "15")
        common = ("--store", "memory", "--drain-delay", "0", *probes)
        running = await self.start(name, [*command, *common, *arguments], port, {"ADMIN_API_KEY": key})
        if "--encode-servers-urls" in arguments:
            await wait_until(lambda: answers(running.url + "/ready"), "the proxy is ready", 60)
        return running

    async def worker(self, kind: str, *arguments: str) -> Running:
        """Start a bundled worker (`encode`, `prefill-decode`) on a free port; wait until it answers."""
        port = free_port()
        command = [sys.executable, "-m", "epdctl", "worker", kind, "--host", HOST, "--port", str(port)]
        model = (
            "--model",
            str(MODEL),
            "--served-model-name",
            "tiny",
            "--dtype",
            "float32",
            "--device",
            "cpu",
        )
        return await self.start(f"our-{kind}", [*command, *model, *arguments], port)

    async def reference_proxy(self, *arguments: str) -> Running:
        """Start vLLM's own example proxy on a free port and wait until it answers."""
        port = free_port()
        command = [self.installed.python, self.installed.reference_proxy, "--host", HOST, "--port", port]
        return await self.start("reference-proxy", [*map(str, command), *arguments], port)

    async def start(
        self, name: str, command: Sequence[str], port: int, env: Mapping[str, str | None] | None = None
    ) -> Running:
        """Start any program that answers /health on `port`."""
        environment = {
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "MC_FORCE_TCP": "1",
            **(env or {}),
        }
        process = start_process(command, self.folder / "logs", f"{name}-{port}", env=environment)
        self._others.append(process)
        url = f"http://{HOST}:{port}"
        await wait_healthy(process, url, 120)
        return Running(process=process, url=url)

    async def stop_others(self) -> None:
        """End everything that is no vLLM instance."""
        processes, self._others = self._others, []
        await asyncio.gather(*(process.stop(grace_s=5) for process in processes))

    async def close(self) -> None:
        """End everything."""
        await self.stop_others()
        await asyncio.gather(*(self.stop(name) for name in list(self._engines)))

    def _named(self, specs: Sequence[EngineSpec]) -> tuple[Engine, ...]:
        return tuple(self._engines[spec.name] for spec in specs)

    def _start(self, spec: EngineSpec) -> Engine:
        place = self.place_of(spec)
        place.shared_storage.mkdir(parents=True, exist_ok=True)
        command = [*NICE, str(self.installed.python), "-m", "vllm.entrypoints.openai.api_server"]
        process = start_process(
            [*command, *engine_arguments(spec, place, MODEL)],
            self.folder / "logs",
            spec.name,
            env=engine_environment(place),
            cwd=self.folder,
        )
        return Engine(spec=spec, place=place, process=process)
