"""Moves one case: by Mooncake alone in several ways, and by the product's sender.

Rules of this file: each way moves the same bytes of the same source memory into the arenas of the same
consumers, and returns the seconds it took. Raw writes may land anywhere in the arenas, since nothing is live
in them between two pushed rounds.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import blake3

from benchmarks.transfer.items import HOST, Case, shape_of
from epdctl.domain import MmHash, TransferId
from epdctl.worker.transfer.lanes import CHUNK_BYTES, LANES
from epdctl.worker.transfer.memory import HostMemory
from epdctl.worker.transfer.mooncake import TransferEngine, load_engine
from epdctl.worker.transfer.ports import PushItem
from epdctl.worker.transfer.sender import Sender

RAW_POLL_S = 0.0001
"""What the fastest raw figures of the TCP transport were measured with."""
DONE = 1


class WriteFailed(RuntimeError):
    """Mooncake refused or lost a raw write."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A consumer process, as a producer knows it."""

    control: str
    session: str
    address: int


class Raw:
    """Mooncake without anything of ours between."""

    def __init__(self, memory: HostMemory) -> None:
        self._memory = memory
        self._engine: Any = load_engine()
        self._engine.initialize(HOST, "P2PHANDSHAKE", "tcp", "")
        self._engine.register_memory(memory.address, memory.nbytes)

    def sync(self, case: Case, targets: Sequence[Target]) -> float:
        """Write item after item with `transfer_sync_write`."""
        began = time.perf_counter()
        for session, source, destination, nbytes in self._writes(case, targets, case.nbytes):
            if self._engine.transfer_sync_write(session, source, destination, nbytes) != 0:
                raise WriteFailed(session)
        return time.perf_counter() - began

    def submitted(self, case: Case, targets: Sequence[Target], chunk: int) -> float:
        """Keep four writes of up to `chunk` bytes in flight to each target, polled by this thread."""
        queues = {target.session: deque[tuple[str, int, int, int]]() for target in targets}
        for write in self._writes(case, targets, chunk):
            queues[write[0]].append(write)
        flying: dict[str, list[int]] = {session: [] for session in queues}
        began = time.perf_counter()
        while True:
            for session, queue in queues.items():
                flying[session] = [batch for batch in flying[session] if self._is_open(batch)]
                while queue and len(flying[session]) < LANES:
                    flying[session].append(self._engine.transfer_submit_write(*queue.popleft()))
            if not any(queues.values()) and not any(flying.values()):
                return time.perf_counter() - began
            time.sleep(RAW_POLL_S)

    def _is_open(self, batch: int) -> bool:
        status = self._engine.transfer_check_status(batch) if batch > 0 else -1
        if status not in (0, DONE):
            raise WriteFailed(f"status {status}")
        return status == 0

    def _writes(
        self, case: Case, targets: Sequence[Target], chunk: int
    ) -> Iterator[tuple[str, int, int, int]]:
        for number in range(case.items):
            for target in targets[: case.consumers]:
                source, at = source_of(self._memory, case, number), number * case.nbytes
                for begin in range(0, case.nbytes, chunk):
                    nbytes = min(chunk, case.nbytes - begin)
                    yield target.session, source + begin, target.address + at + begin, nbytes


def source_of(memory: HostMemory, case: Case, number: int) -> int:
    """Return where item `number` lies; the source goes round when it is smaller than the case."""
    fitting = memory.nbytes // case.nbytes
    return memory.address + (number % fitting) * case.nbytes


class Pushed:
    """The product's sender, made inside a running loop."""

    def __init__(self, memory: HostMemory, *, digest: bool) -> None:
        self._memory = memory
        self._engine = TransferEngine(host=HOST)
        self._engine.register(memory.address, memory.nbytes)
        self._sender = Sender(self._engine, observe=lambda record: None)
        self._digest = digest
        self._digests: dict[tuple[int, int], str] = {}
        self._rounds = 0

    async def push(
        self, case: Case, targets: Sequence[Target], expect: Callable[[str], Any], taken: Callable[[], Any]
    ) -> float:
        """Queue every item at once and wait until all are accepted; control exchanges are part of it."""
        self._rounds += 1
        prefix = f"{'v' if self._digest else 'p'}{self._rounds}-"
        items = [
            self._item(case, target, prefix, number)
            for number in range(case.items)
            for target in targets[: case.consumers]
        ]
        await expect(prefix)
        began = time.perf_counter()
        await asyncio.gather(*(self._sender.push(item) for item in items))
        seconds = time.perf_counter() - began
        await taken()
        return seconds

    def _item(self, case: Case, target: Target, prefix: str, number: int) -> PushItem:
        address = source_of(self._memory, case, number)
        return PushItem(
            consumer_zmq=target.control,
            transfer_id=TransferId(f"{prefix}{number}"),
            mm_hash=MmHash(f"hash-{prefix}{number}"),
            nbytes=case.nbytes,
            shape=shape_of(case.nbytes),
            dtype="bfloat16",
            address=address,
            digest=self._digest_of(address, case.nbytes) if self._digest else None,
            on_source_free=lambda: None,
        )

    def _digest_of(self, address: int, nbytes: int) -> str:
        # Made when rows enter the arena, once; no part of a push.
        key = (address, nbytes)
        if key not in self._digests:
            view = self._memory.view(address - self._memory.address, nbytes)
            self._digests[key] = blake3.blake3(view).hexdigest()
        return self._digests[key]

    async def close(self) -> None:
        """End the sender and its engine."""
        await self._sender.close()
        await self._engine.close()


def raw_ways(raw: Raw, case: Case, targets: Sequence[Target]) -> dict[str, Callable[[], float]]:
    """Return the raw ways of moving `case`, by name."""
    chosen = targets[: case.consumers]
    ways: dict[str, Callable[[], float]] = {
        "sync": lambda: raw.sync(case, chosen),
        "submit": lambda: raw.submitted(case, chosen, case.nbytes),
    }
    if case.nbytes > CHUNK_BYTES:
        ways["submit-1MB"] = lambda: raw.submitted(case, chosen, CHUNK_BYTES)
    return ways
