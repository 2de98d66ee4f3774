"""Mooncake's transfer engine as its wheel has it, doing what the test wants."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from epdctl.worker.transfer.lanes import Piece
from epdctl.worker.transfer.mooncake import TransferEngine

ITEM = [Piece(4096, 8192, 100)]


class Library:
    """A transfer engine of Mooncake's shape; counts calls and remembers from which threads they came."""

    def __init__(
        self,
        *,
        initialised: int = 0,
        registered: int = 0,
        submitted: Callable[[str], int] | None = None,
        status: Callable[[int], int] | None = None,
        probe: Callable[[str], int] | None = None,
    ) -> None:
        self._initialised, self._registered = initialised, registered
        self._submitted = submitted or (lambda session: len(self.writes))
        self._status = status or (lambda batch: 1)
        self._probe = probe or (lambda session: 0)
        self.writes: list[tuple[str, int, int, int]] = []
        self.asked: list[int] = []
        self.threads: set[str] = set()

    def initialize(self, host: str, metadata: str, protocol: str, devices: str) -> int:
        """Start."""
        self.arguments = (host, metadata, protocol, devices)
        return self._initialised

    def get_rpc_port(self) -> int:
        """Return the port of the session."""
        return 15001

    def batch_register_memory(self, addresses: list[int], sizes: list[int]) -> int:
        """Register."""
        return self._registered

    def transfer_submit_write(self, session: str, source: int, destination: int, nbytes: int) -> int:
        """Start a write."""
        self.threads.add(threading.current_thread().name)
        self.writes.append((session, source, destination, nbytes))
        return self._submitted(session)

    def transfer_check_status(self, batch: int) -> int:
        """Return how a write is getting on."""
        self.threads.add(threading.current_thread().name)
        self.asked.append(batch)
        return self._status(batch)

    def send_probe(self, session: str) -> int:
        """Return whether a session is there."""
        return self._probe(session)


@asynccontextmanager
async def engine_of(library: Library) -> AsyncIterator[TransferEngine]:
    """Start an engine of that library."""
    engine = TransferEngine(host="10.0.0.5", load=lambda: library)
    try:
        yield engine
    finally:
        await engine.close()
