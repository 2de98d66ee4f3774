"""Mooncake's transfer engine: registers memory, writes to peers.

    engine = TransferEngine(host="10.0.0.5", protocol="tcp")     # inside the loop, after any fork
    engine.session                                               # "host:port", what peers write to
    engine.register(address, nbytes)
    job = engine.submit(session, pieces, on_news)                # from the event loop
    engine.withdraw(job)                                         # what is not in flight yet, will not be
    await engine.write(session, pieces, deadline_s=…, on_settled=…)   # the same, for one who waits
    await engine.close()

`on_news(failed, settled)` is called on the loop: as soon as one piece failed, and when the engine reads the
source no more, at the latest when it closes; (False, True) says that every byte is at the peer.

`MC_*` variables are set before (`environment.mooncake_environment`).

Rules of this file: the only one that imports Mooncake. Transfers are submitted and polled by one thread
(`writer`): sync calls spin a core each, and timers of an event loop are too coarse. Nothing is called on an
engine that is not initialised (that is a segmentation fault), nor in a forked child (it hangs). News are
calls and no futures: a future costs two turns of the loop, and a worker under load has thousands a second.
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
from epdctl.worker.transfer.callbacks import call_back
from epdctl.worker.transfer.environment import wrong_family
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


OnNews = Callable[[bool, bool], None]
"""Takes `failed` and `settled` of a write; see the head of this file."""


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
    """One initialised engine of this process. `host` is what peers connect to; it is never checked.

    `ipv6` says which peers it reaches (`environment.writes_to_ipv6`).
    """

    def __init__(
        self,
        *,
        host: str,
        protocol: str = "tcp",
        devices: str = "",
        ipv6: bool = False,
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
        self._ipv6 = ipv6
        self._pid = os.getpid()
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count(1)
        self._writes: dict[int, OnNews] = {}
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

    def submit(self, session: str, pieces: Sequence[Piece], on_news: OnNews) -> int:
        """Queue one write and return its number; called on the event loop.

        Raises TransferFailed, and nothing is queued, for a peer that this engine cannot reach.
        """
        self._require()
        if (reason := wrong_family(session, ipv6=self._ipv6)) is not None:
            raise TransferFailed(reason)
        job = next(self._numbers)
        self._writes[job] = on_news
        self._writer.tell(Add(session, job, tuple(pieces)))
        return job

    def withdraw(self, job: int) -> None:
        """Give a write up: what of it is in flight ends by itself."""
        if job in self._writes:
            self._writer.tell(Withdraw(job))

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
        outcome: asyncio.Future[bool] = self._loop.create_future()

        def take(failed: bool, settled: bool) -> None:
            if not outcome.done():
                outcome.set_result(not failed)
            if settled:
                on_settled()

        try:
            job = self.submit(session, pieces, take)
        except (TransferFailed, TransferSetupFailed):
            on_settled()
            raise
        try:
            await asyncio.wait({outcome}, timeout=deadline_s)
            if not outcome.done():
                raise UpstreamTimeout("the transfer did not end in time")
            if not outcome.result():
                raise TransferFailed("the transfer engine reported a failed write")
        finally:
            self.withdraw(job)

    async def close(self) -> None:
        """Stop writing and listening: the only fence against late writes into our memory (about 1 s)."""
        if self._engine is None:
            return
        held = [self._engine]
        self._engine = None
        await asyncio.to_thread(self._shut, held)
        for job in list(self._writes):
            self._update(JobUpdate(job, failed=True, settled=True))

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
        writes = self._writes
        on_news = writes.pop(update.job, None) if update.settled else writes.get(update.job)
        if on_news is not None:
            call_back(on_news, update.failed, update.settled)
