"""A transfer engine of this process: writes are memory copies, and tests decide when and how they end."""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from epdctl.worker.transfer.lanes import Piece
from epdctl.worker.transfer.mooncake import OnNews


@dataclass(slots=True, eq=False)
class Started:
    """A write that was submitted."""

    session: str
    pieces: tuple[Piece, ...]
    job: int
    on_news: OnNews
    failed: bool = False

    def copy(self) -> None:
        """Let the bytes land."""
        for piece in self.pieces:
            ctypes.memmove(piece.destination, piece.source, piece.nbytes)

    def end(self, ok: bool, *, settle: bool = True) -> None:
        """Report the outcome, and that the source is read no more."""
        self.failed = not ok
        self._tell(settle)

    def settle(self) -> None:
        """Report that the source is read no more."""
        self._tell(True)

    def _tell(self, settled: bool) -> None:
        asyncio.get_running_loop().call_soon(self.on_news, self.failed, settled)


class MemoryEngine:
    """Implements `rank_push.WriteEngine`; `on_write` replaces copying and succeeding at once."""

    def __init__(self, on_write: Callable[[Started], None] | None = None) -> None:
        self.started: list[Started] = []
        self.withdrawn: list[int] = []
        self._on_write = on_write

    def submit(self, session: str, pieces: Sequence[Piece], on_news: OnNews) -> int:
        """Start a write."""
        started = Started(session, tuple(pieces), len(self.started) + 1, on_news)
        self.started.append(started)
        if self._on_write is not None:
            self._on_write(started)
        else:
            started.copy()
            started.end(True)
        return started.job

    def withdraw(self, job: int) -> None:
        """Note that the write was given up."""
        self.withdrawn.append(job)
