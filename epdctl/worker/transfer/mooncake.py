"""Mooncake's transfer engine: registers memory, writes to peers.

    engine = TransferEngine(host="10.0.0.5", protocol="tcp")     # inside the loop, after any fork
    engine.session                                               # "host:port", what peers write to
    engine.register(address, nbytes)
    write = engine.submit(session, pieces)                       # from the event loop
    write.outcome   # future: True when every byte is at the peer, False as soon as one piece failed
    write.settled   # future: the engine reads the source no more
    engine.withdraw(write)                                       # what is not in flight yet, will not be
    await engine.close()

`MC_*` variables are set before (`environment.mooncake_environment`).

Rules of this file: the only one that imports Mooncake. Transfers are submitted and polled by one thread
(`writer`): sync calls spin a core each, and timers of an event loop are too coarse. Nothing is called on an
engine that is not initialised (that is a segmentation fault), nor in a forked child (it hangs). `await` a
`Write`'s futures by `asyncio.wait`, which does not cancel them.
"""

from __future__ import annotations

import asyncio
import importlib
import itertools
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from epdctl.errors import TransferFailed, UpstreamTimeout
from epdctl.worker.transfer.lanes import JobUpdate, Piece
from epdctl.worker.transfer.writer import Add, Withdraw, Writer

_WHEELS = (
    "Mooncake is not installed: install exactly one of the extras epdctl[cpu], epdctl[cuda12], epdctl[cuda13]"
)


_EXTRAS = {
    "mooncake-transfer-engine-non-cuda": "cpu",
    "mooncake-transfer-engine": "cuda12",
    "mooncake-transfer-engine-cuda13": "cuda13",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Wheel:
    """An installed wheel of Mooncake, and the extra of epdctl that brings it."""

    name: str
    version: str
    extra: str

    @property
    def has_cuda(self) -> bool:
        """Whether it is built to read the memory of a GPU."""
        return self.extra != "cpu"

    def __str__(self) -> str:
        return f"{self.name} {self.version} (epdctl[{self.extra}])"


def find_wheel() -> Wheel | None:
    """Return the wheel that is installed; None for a Mooncake of another origin."""
    for name, extra in _EXTRAS.items():
        with suppress(metadata.PackageNotFoundError):
            return Wheel(name=name, version=metadata.version(name), extra=extra)
    return None


class TransferSetupFailed(RuntimeError):
    """The transfer engine cannot work here; the message says why and what to do. A start-up error."""


_REGISTRATION_CODES = {
    -7: "it overlaps with memory that is registered already",
    -1: "it is empty",
}


@dataclass(slots=True, eq=False)
class Write:
    """One write; see the head of this file. Both futures end, at the latest when the engine closes."""

    job: int
    nbytes: int
    outcome: asyncio.Future[bool]
    settled: asyncio.Future[None]


def load_engine() -> Any:
    """Return a new, uninitialised engine of the wheel; raise TransferSetupFailed naming the cure."""
    try:
        return importlib.import_module("mooncake.engine").TransferEngine()
    except ModuleNotFoundError as error:
        raise TransferSetupFailed(_WHEELS) from error
    except ImportError as error:
        hint = "; install the system library libibverbs1" if "libibverbs" in str(error) else ""
        raise TransferSetupFailed(f"Mooncake cannot be loaded: {error}{hint}") from error


class TransferEngine:
    """One initialised engine of this process. `host` is what peers connect to; it is never checked."""

    def __init__(
        self,
        *,
        host: str,
        protocol: str = "tcp",
        devices: str = "",
        load: Callable[[], Any] = load_engine,
    ) -> None:
        engine = load()
        result = engine.initialize(host, "P2PHANDSHAKE", protocol, devices)
        if result != 0:
            raise TransferSetupFailed(
                f"Mooncake could not start (code {result}): no two free ports in its range"
                f" (--mooncake-ports), or protocol '{protocol}' does not work on this machine"
            )
        self._engine: Any = engine
        self._pid = os.getpid()
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count(1)
        self._writes: dict[int, Write] = {}
        self._writer = Writer(engine, self._post)
        bracketed = f"[{host}]" if ":" in host and not host.startswith("[") else host
        self.session = f"{bracketed}:{engine.get_rpc_port()}"

    def register(self, address: int, nbytes: int) -> None:
        """Let peers write to, and this engine read from, these bytes; raise TransferSetupFailed otherwise."""
        result = self._require().batch_register_memory([address], [nbytes])
        if result != 0:
            raise TransferSetupFailed(
                f"Mooncake refused to register {nbytes} bytes of memory (code {result}): "
                + _REGISTRATION_CODES.get(result, "the locked-memory limit (ulimit -l) may be too low")
            )

    def unregister(self, address: int) -> None:
        """Forget a registered range. This is no fence: bytes under way still land."""
        self._require().batch_unregister_memory([address])

    def submit(self, session: str, pieces: Sequence[Piece]) -> Write:
        """Queue one write; called on the event loop."""
        self._require()
        write = Write(
            job=next(self._numbers),
            nbytes=sum(piece.nbytes for piece in pieces),
            outcome=self._loop.create_future(),
            settled=self._loop.create_future(),
        )
        self._writes[write.job] = write
        self._writer.tell(Add(session, write.job, tuple(pieces)))
        return write

    def withdraw(self, write: Write) -> None:
        """Give a write up: its outcome is False at once, it settles when nothing of it is in flight."""
        if not write.outcome.done():
            write.outcome.set_result(False)
        if write.job in self._writes:
            self._writer.tell(Withdraw(write.job))

    async def write(
        self,
        session: str,
        pieces: Sequence[Piece],
        *,
        deadline_s: float,
        on_settled: Callable[[], None],
    ) -> None:
        """Write and wait until every byte is at the peer.

        Raises TransferFailed or UpstreamTimeout; `on_settled` is called once, on the loop and possibly later,
        when the source is not read any more. Cancelling withdraws what is not in flight yet.
        """
        write = self.submit(session, pieces)
        write.settled.add_done_callback(lambda _: on_settled())
        try:
            await asyncio.wait({write.outcome}, timeout=deadline_s)
            if not write.outcome.done():
                raise UpstreamTimeout("the transfer did not end in time")
            if not write.outcome.result():
                raise TransferFailed("the transfer engine reported a failed write")
        finally:
            self.withdraw(write)

    async def close(self) -> None:
        """Stop writing and listening: the only fence against late writes into our memory (about 1 s)."""
        if self._engine is None:
            return
        held = [self._engine]
        self._engine = None
        await asyncio.to_thread(self._shut, held)
        for write in list(self._writes.values()):
            self._update(JobUpdate(write.job, failed=True, settled=True))

    def _shut(self, held: list[Any]) -> None:
        self._writer.stop()
        # The last reference goes on this thread: Mooncake's destructor waits a second for its own threads.
        held.clear()

    def _require(self) -> Any:
        if self._engine is None:
            raise TransferSetupFailed("the transfer engine is closed")
        if os.getpid() != self._pid:
            raise TransferSetupFailed("the transfer engine belongs to the parent process: spawn, never fork")
        return self._engine

    def _post(self, updates: list[JobUpdate]) -> None:
        """Called on the writer's thread."""
        try:
            self._loop.call_soon_threadsafe(self._take, updates)
        except RuntimeError:
            # The loop is closed: nobody is left to be told.
            return

    def _take(self, updates: list[JobUpdate]) -> None:
        for update in updates:
            self._update(update)

    def _update(self, update: JobUpdate) -> None:
        write = self._writes.get(update.job)
        if write is None:
            return
        if not write.outcome.done() and (update.failed or update.settled):
            write.outcome.set_result(not update.failed)
        if update.settled:
            del self._writes[update.job]
            if not write.settled.done():
                write.settled.set_result(None)
