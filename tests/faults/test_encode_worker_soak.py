"""A long run through a whole encode worker and a stub consumer: nothing grows."""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from epdctl.worker.transfer.environment import mooncake_environment
from epdctl.worker.transfer.memory import HostMemory
from epdctl.worker.transfer.mooncake import TransferEngine
from tests.e2e.encode_worker import EncodeWorker, part, picture, start_worker
from tests.stubs.consumer import StubConsumer
from tests.stubs.process import wait_until

pytestmark = [pytest.mark.fault, pytest.mark.worker, pytest.mark.full, pytest.mark.timeout(1800)]

ITEMS = 100_000
AT_ONCE = 24
PICTURES = 60
GROWTH_BYTES = 24 * 2**20


class PickyConsumer(StubConsumer):
    """A consumer that refuses each transfer whose id ends with 7, and forgets what has ended."""

    def _reserve(self, item: Mapping[str, Any], way: str) -> dict[str, Any]:
        refused = str(item["transfer_id"]).endswith("7")
        # All writes go to one place: what is written is nobody's concern here.
        return super()._reserve(dict(item), "refuse" if refused else way)

    def _complete(self, item: Mapping[str, Any], way: str) -> dict[str, Any]:
        answer = super()._complete(dict(item), way)
        self.reservations.pop(str(item["transfer_id"]), None)
        self.calls.clear()
        return answer


def anonymous_bytes(pid: int) -> int:
    """Return the resident bytes of a process that are its own, without mapped files."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("RssAnon"))) * 1024


async def send_items(worker: EncodeWorker, consumer: str, numbers: range) -> Counter[int]:
    """Send one request for each number, a few at a time; return how often each status came."""
    statuses: Counter[int] = Counter()
    bodies = [part(picture((n, 2 * n, 9), (56, 56))) for n in range(PICTURES)]
    left = iter(numbers)

    async def client(session: aiohttp.ClientSession) -> None:
        for number in left:
            # One in ten is a picture of its own, so that entries come and go.
            own = (
                part(picture((number % 251, number // 251 % 251, 99), (56, 56))) if number % 10 == 3 else None
            )
            body = {
                "messages": [{"role": "user", "content": [own or bodies[number % PICTURES]]}],
                "ec_transfer_params": {
                    "consumer_zmq": consumer,
                    "ec_items": [{"transfer_id": f"t{number}"}],
                },
            }
            async with session.post(worker.url + "/v1/chat/completions", json=body) as answer:
                await answer.read()
                statuses[answer.status] += 1

    async with aiohttp.ClientSession() as session:
        await asyncio.gather(*(client(session) for _ in range(AT_ONCE)))
    return statuses


async def test_100_000_items_with_failures_leave_nothing(tmp_path: Path) -> None:
    """After 100,000 items, a tenth of them refused by their consumer, every table of the engine is empty, no
    arena byte is pinned, and the memory of both processes is what it was after the first fifth."""
    os.environ.update(mooncake_environment(os.environ, protocol="tcp", ports=None))
    memory, engine = HostMemory(2**20), TransferEngine(host="127.0.0.1")
    engine.register(memory.address, memory.nbytes)
    fault = tmp_path / "fault"
    worker = start_worker(
        tmp_path,
        *("--cache-bytes", str(2**20), "--log-level", "error"),
        module="tests.stubs.faulty_encode_worker",
        env={"EPDCTL_TEST_FAULT": str(fault)},
    )
    try:
        await worker.ready()
        async with PickyConsumer(session=engine.session) as consumer:
            consumer.base_address = memory.address
            first = await send_items(worker, consumer.address, range(ITEMS // 5))
            pids = (worker.process.pid, worker.engine_pid())
            warm = [anonymous_bytes(pid) for pid in pids]
            rest = await send_items(worker, consumer.address, range(ITEMS // 5, ITEMS))
            grown = [anonymous_bytes(pid) - before for pid, before in zip(pids, warm, strict=True)]

        async def is_empty() -> bool:
            sizes = json.loads(fault.with_name("fault.sizes").read_text())
            pinned = await worker.metric("epdctl_arena_bytes", state="pinned")
            return not any(sizes.values()) and not pinned

        await wait_until(is_empty, "every table is empty", 60)
        assert first + rest == {200: ITEMS * 9 // 10, 502: ITEMS // 10}
        assert await worker.metric("epdctl_in_flight", stage="encode") == 0
        assert await worker.metric("epdctl_cache_evictions_total", tier="l1") > 0
        assert max(grown) < GROWTH_BYTES, grown
    finally:
        worker.process.close()
        await engine.close()
        memory.close()
