"""Handles on `tests.stubs.transfer_end` processes."""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio

from tests.stubs.ports import free_port
from tests.stubs.process import Process, start_process
from tests.stubs.transfer_end import item_digest

JSON = dict[str, Any]
ROOT = Path(__file__).parents[2]
MEBIBYTE = 1 << 20
MOONCAKE_PORTS = [32_050, 32_760]
"""Above what `free_port` gives out and below the ephemeral range: Mooncake's default overlaps with both."""


class End:
    """One process, and its command socket."""

    def __init__(self, process: Process, settings: JSON, context: zmq.asyncio.Context) -> None:
        self.process = process
        self.settings = settings
        self.address = f"tcp://127.0.0.1:{settings['control_port']}"
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(f"tcp://127.0.0.1:{settings['command_port']}")
        self._numbers = itertools.count()
        self._answers: dict[int, asyncio.Future[JSON]] = {}
        self._reading = asyncio.create_task(self._read())

    async def ask(self, do: str, *, timeout_s: float = 30.0, **fields: Any) -> JSON:
        """Send one command and return its answer."""
        number = next(self._numbers)
        answer: asyncio.Future[JSON] = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        await self._socket.send(json.dumps({"id": number, "do": do, **fields}).encode())
        async with asyncio.timeout(timeout_s):
            return await answer

    async def ready(self) -> None:
        """Wait until the process obeys."""
        asking = asyncio.create_task(self.ask("stats"))
        await self.process.wait_until(asking.done, "the process obeys", 30)
        await asking

    async def push(self, to: End, name: str, nbytes: int, *, seed: int = 1, **fields: Any) -> JSON:
        """Push an item made from `seed` to another process."""
        return await self.ask("push", **item(to, name, nbytes, seed), **fields)

    async def take(self, name: str, nbytes: int, **fields: Any) -> JSON:
        """Take an item."""
        return await self.ask("take", transfer_id=name, mm_hash=f"hash of {name}", nbytes=nbytes, **fields)

    async def stats(self) -> JSON:
        """Return what the process holds and has counted."""
        return await self.ask("stats")

    async def is_idle(self) -> bool:
        """Whether it holds nothing that is in use."""
        stats = await self.stats()
        live = sum(count for state, count in stats["reservations"].items() if state != "ended")
        busy = sum(stats["arena"][state] for state in ("used", "pinned", "quarantined"))
        return not (live or busy or stats["open"] or stats["waiting"])

    async def stop(self) -> int:
        """Let it end by itself."""
        await self._socket.send(json.dumps({"id": -1, "do": "stop"}).encode())
        return await self.process.wait_exit(10)

    async def close(self) -> None:
        """Kill it and close the socket."""
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)
        self._socket.close(linger=0)
        self.process.close()

    async def _read(self) -> None:
        while True:
            answer = json.loads(await self._socket.recv())
            future = self._answers.pop(answer["id"], None)
            if future is not None and not future.done():
                future.set_result(answer)


def item(to: End, name: str, nbytes: int, seed: int = 1) -> JSON:
    """Return the fields of an item for another process."""
    return {
        "consumer": to.address,
        "transfer_id": name,
        "mm_hash": f"hash of {name}",
        "nbytes": nbytes,
        "seed": seed,
    }


def digest(nbytes: int, seed: int = 1) -> JSON:
    """Return what a take of the right bytes answers."""
    return {"digest": item_digest(seed, nbytes)}


class Ends:
    """Starts transfer ends; all are killed when the test ends."""

    def __init__(self, log_dir: Path) -> None:
        self._log_dir = log_dir
        self._context = zmq.asyncio.Context()
        self._started: list[End] = []

    async def start(self, name: str, *, nbytes: int = 8 * MEBIBYTE, **settings: Any) -> End:
        """Start one and wait until it obeys."""
        full = {
            "control_port": free_port(),
            "command_port": free_port(),
            "nbytes": nbytes,
            "mooncake_ports": MOONCAKE_PORTS,
            **settings,
        }
        command = [sys.executable, "-m", "tests.stubs.transfer_end", json.dumps(full)]
        process = start_process(
            command, self._log_dir, name, cwd=ROOT, env={"PYTHONPATH": str(ROOT), "MC_LOG_LEVEL": "ERROR"}
        )
        end = End(process, full, self._context)
        self._started.append(end)
        await end.ready()
        return end

    async def close(self) -> None:
        """Kill all of them."""
        for end in self._started:
            await end.close()
        self._context.destroy(linger=0)


async def latencies(
    producer: End, consumer: End, name: str, count: int, *, offset: int = 4096
) -> list[float]:
    """Push `count` small items one after the other, and return how many seconds each took."""
    times = []
    for number in range(count):
        answer = await producer.push(consumer, f"{name}{number}", 1000, seed=number, offset=offset)
        assert "seconds" in answer, answer
        times.append(answer["seconds"])
    return times
