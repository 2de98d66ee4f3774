"""Bundled workers that the cases of a module share: starting one costs seconds, and most cases do it no harm.

Rules of this file: the pool owns every process it started and ends them in `close`. The crew of encode
workers is started at one moment with default Mooncake ports, as case B90 has it; a case that breaks or ends
its worker gets one that no other case uses.
"""

from __future__ import annotations

import asyncio
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.cases import product
from tests.cases.http_client import Request, Result, send
from tests.stubs.ports import free_port
from tests.stubs.process import Process, epdctl_command, start_process, wait_until

CREW = 3
START_S = 120.0
FREE_PORT_S = 60.0
FAULT_FILE = "EPDCTL_TEST_FAULT"


@dataclass(slots=True, kw_only=True)
class StartedWorker:
    """One worker process. `ended_after_s`: it ended by itself while it was being started."""

    process: Process
    port: int
    began: float
    fault_file: Path
    healthy: bool = False
    ended_after_s: float | None = None

    async def settle(self) -> None:
        """Wait until it is healthy, or has ended."""

        async def decided() -> bool:
            if self.process.exit_code is not None:
                self.ended_after_s = time.monotonic() - self.began
                return True
            answer = await send(
                "127.0.0.1", self.port, Request(path="/health", deadline_s=5), Result(step="", index=0)
            )
            self.healthy = answer.status == 200
            return self.healthy

        await self.process.wait_until(decided, "healthy or ended", START_S, alive=False)

    def set_fault(self, fault: str) -> None:
        """Let the tower do `fault` from now on; "" heals."""
        other = self.fault_file.with_suffix(".new")
        other.write_text(fault)
        other.replace(self.fault_file)


@dataclass(slots=True)
class WorkerPool:
    """Starts workers when the first case needs them."""

    folder: Path
    _started: list[StartedWorker] = field(default_factory=list)
    _crew: list[StartedWorker] = field(default_factory=list)
    _lent: int = 1
    _consumers: dict[int, list[StartedWorker]] = field(default_factory=dict)

    async def crew(self) -> Sequence[StartedWorker]:
        """Return the encode workers that were started at one moment."""
        if not self._crew:
            self._crew = [self._encoder() for _ in range(CREW)]
            await asyncio.gather(*(worker.settle() for worker in self._crew))
        return self._crew

    async def shared(self) -> StartedWorker:
        """Return the encode worker of all cases that leave it as it was."""
        return (await self.crew())[0]

    async def own(self) -> StartedWorker:
        """Return an encode worker that no case has used."""
        crew = await self.crew()
        if self._lent < len(crew):
            self._lent += 1
            return crew[self._lent - 1]
        worker = self._encoder()
        await worker.settle()
        return worker

    async def consumers(self, count: int, control_port: int) -> Sequence[StartedWorker]:
        """Return prefill_decode workers that were started at one moment, all on one control port."""
        if control_port not in self._consumers:
            await wait_until(lambda: _is_free(control_port), f"port {control_port} is free", FREE_PORT_S)
            workers = [self._consumer(control_port) for _ in range(count)]
            self._consumers[control_port] = workers
            await asyncio.gather(*(worker.settle() for worker in workers))
        return self._consumers[control_port]

    async def consumer_address(self) -> str:
        """Return the control address of a running consumer."""
        for port, workers in self._consumers.items():
            if any(worker.healthy for worker in workers):
                return f"tcp://127.0.0.1:{port}"
        port = free_port()
        await self.consumers(1, port)
        return f"tcp://127.0.0.1:{port}"

    def close(self) -> None:
        """End everything."""
        for worker in self._started:
            worker.process.close()

    def _encoder(self) -> StartedWorker:
        port = free_port()
        fault_file = self.folder / f"fault-{port}"
        arguments = product.worker_arguments({}, port)[2:]
        command = [sys.executable, "-m", "tests.stubs.faulty_encode_worker", *arguments]
        return self._start(command, port, fault_file)

    def _consumer(self, control_port: int) -> StartedWorker:
        port = free_port()
        command = epdctl_command(*product.consumer_arguments(port, control_port))
        return self._start(command, port, self.folder / "unused")

    def _start(self, command: Sequence[str], port: int, fault_file: Path) -> StartedWorker:
        environment = {FAULT_FILE: str(fault_file), "OMP_NUM_THREADS": "1"}
        began = time.monotonic()
        process = start_process(
            command, self.folder / "logs", f"worker-{len(self._started)}", env=environment
        )
        worker = StartedWorker(process=process, port=port, began=began, fault_file=fault_file)
        self._started.append(worker)
        return worker


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
