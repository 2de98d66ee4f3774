"""The running world of a case for a bundled worker: its process, stub consumers, transfer ends.

Rules of this file: as in `world`; what comes from the pool stays the pool's, everything else is freed here.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from epdctl.worker.transfer.environment import mooncake_environment
from epdctl.worker.transfer.memory import HostMemory
from epdctl.worker.transfer.mooncake import TransferEngine
from tests.cases import answers_view as view
from tests.cases import product
from tests.cases.expect_worker import WORKER_CHECKS
from tests.cases.http_client import Request, Result, send
from tests.cases.loader import Case
from tests.cases.worker_pool import StartedWorker, WorkerPool
from tests.cases.world import World
from tests.faults.transfer_ends import MEBIBYTE, End, Ends
from tests.stubs.consumer import StubConsumer
from tests.stubs.ports import free_port, free_ports
from tests.stubs.process import Process

LANDING_BYTES = MEBIBYTE


class WorkerWorld(World):
    """What a case with a worker's target runs against."""

    def __init__(self, case: Case, folder: Path, pool: WorkerPool) -> None:
        super().__init__(case, folder)
        self.extra_checks = WORKER_CHECKS
        self.pool = pool
        self.worker: StartedWorker | None = None
        self.ends: Ends | None = None
        self.sender: End | None = None
        self.receiver: End | None = None
        self.control_addresses: list[str] = []
        self._stack = contextlib.AsyncExitStack()

    @property
    def logs(self) -> str:
        """Everything that the worker of this case wrote, for other cases too."""
        return self.process.logs if self.process is not None else ""

    async def open(self) -> None:
        """Start stubs and servers, then take or start what the target needs."""
        await self.open_surroundings()
        for consumer in self.consumers.values():
            await self._give_memory(consumer)
        if self.case.target == "worker":
            await self._open_worker()
        else:
            await self._open_ends()
        await self._note_start()

    async def close(self) -> None:
        """Free what is ours, and heal the worker."""
        if self.worker is not None:
            self.worker.set_fault("")
        if self.ends is not None:
            await self.ends.close()
        await self._stack.aclose()
        await super().close()

    def living(self) -> list[Process]:
        """Return the processes that must live through the case."""
        ends = [end.process for end in (self.sender, self.receiver) if end is not None]
        return [*super().living(), *ends]

    def take(self, worker: StartedWorker) -> None:
        """Let the steps talk to this worker from now on."""
        self.worker, self.process, self.port = worker, worker.process, worker.port

    async def restart_receiver(self, *, same_port: bool) -> None:
        """Kill the receiving process and start another, on the same ports or on new ones."""
        assert self.ends is not None and self.receiver is not None
        old = self.receiver
        old.process.kill_group()
        await old.process.wait_exit()
        kept = ("nbytes", "arena_nbytes", *(("control_port", "mooncake_ports") if same_port else ()))
        settings = {key: old.settings[key] for key in kept}
        self.receiver = await self.ends.start("receiver-again", **settings)

    async def rows_of(self, result: Result) -> int:
        """Return how many rows the worker has for the picture of an answered request.

        The same request is sent again with a consumer that refuses: what it was asked to reserve tells.
        """
        async with StubConsumer({"reserve": "refuse"}) as consumer:
            params = {"consumer_zmq": consumer.address, "ec_items": [{"transfer_id": "rows"}]}
            body = product.json_bytes({**result.request_json, "ec_transfer_params": params})
            request = Request(method="POST", path="/v1/chat/completions", body=body, deadline_s=30)
            await send("127.0.0.1", self.port, request, Result(step="", index=0))
            asked = [item for call in consumer.calls_to("reserve_batch") for item in call.body["items"]]
            asked += [call.body for call in consumer.calls_to("reserve")]
        known = view.at_path(view.parse(result.body), "ec_transfer_params")
        assert isinstance(known, dict)
        rows = {item["shape"][0] for item in asked if item["mm_hash"] in known}
        assert len(rows) == 1, f"the worker asked to reserve {asked}"
        return int(rows.pop())

    async def _open_worker(self) -> None:
        operations = {step["op"] for step in self.case.steps}
        if "start_workers" in operations:
            return
        self.take(await (self.pool.own() if "worker_fault" in operations else self.pool.shared()))

    async def _open_ends(self) -> None:
        self.ends = Ends(self.folder / "logs")
        largest = max((step.get("nbytes", 0) for step in flat(self.case.steps)), default=0)
        sources = max(8 * MEBIBYTE, 2 * largest + MEBIBYTE)
        if self.case.target == "worker-zmq":
            self.receiver = await self.ends.start("receiver")
            self.control_addresses = [self.receiver.address, await self.pool.consumer_address()]
            return
        ports = free_ports(12)
        range_of_its_own = {"control_port": free_port(), "mooncake_ports": [ports[0], ports[-1]]}
        self.sender, self.receiver = await asyncio.gather(
            self.ends.start("sender", nbytes=sources, arena_nbytes=8 * MEBIBYTE),
            # Room for what rests after a failed write, besides what is written next.
            self.ends.start(
                "receiver", nbytes=8 * MEBIBYTE, arena_nbytes=3 * largest + 8 * MEBIBYTE, **range_of_its_own
            ),
        )

    async def _give_memory(self, consumer: StubConsumer) -> None:
        """Let writes to a stub consumer land: what a case is about comes after them."""
        os.environ.update(mooncake_environment(os.environ, protocol="tcp", ports=None))
        memory = HostMemory(LANDING_BYTES)
        self._stack.callback(memory.close)
        engine = TransferEngine(host="127.0.0.1")
        self._stack.push_async_callback(engine.close)
        engine.register(memory.address, memory.nbytes)
        consumer.session, consumer.base_address = engine.session, memory.address


def flat(steps: list[dict[str, Any]]) -> list[Mapping[str, Any]]:
    """Return steps and the steps inside them."""
    inner = [step["step"] for step in steps if isinstance(step.get("step"), dict)]
    return [*steps, *(flat(inner) if inner else [])]
