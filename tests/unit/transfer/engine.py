"""A transfer engine of this process: writes are memory copies, and tests decide when and how they end."""

from __future__ import annotations

import asyncio
import ctypes
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from epdctl.worker.transfer.lanes import Piece
from epdctl.worker.transfer.mooncake import Write


@dataclass(slots=True, eq=False)
class Started:
    """A write that was submitted."""

    session: str
    pieces: tuple[Piece, ...]
    write: Write

    def copy(self) -> None:
        """Let the bytes land."""
        for piece in self.pieces:
            ctypes.memmove(piece.destination, piece.source, piece.nbytes)

    def end(self, ok: bool, *, settle: bool = True) -> None:
        """Report the outcome, and that the source is read no more."""
        if not self.write.outcome.done():
            self.write.outcome.set_result(ok)
        if settle:
            self.settle()

    def settle(self) -> None:
        """Report that the source is read no more."""
        if not self.write.settled.done():
            self.write.settled.set_result(None)


class MemoryEngine:
    """Implements `rank_push.WriteEngine`; `on_write` replaces copying and succeeding at once."""

    def __init__(self, on_write: Callable[[Started], None] | None = None) -> None:
        self.started: list[Started] = []
        self.withdrawn: list[Write] = []
        self._on_write = on_write
        self._numbers = itertools.count(1)

    def submit(self, session: str, pieces: Sequence[Piece]) -> Write:
        """Start a write."""
        loop = asyncio.get_running_loop()
        nbytes = sum(piece.nbytes for piece in pieces)
        write = Write(next(self._numbers), nbytes, loop.create_future(), loop.create_future())
        started = Started(session, tuple(pieces), write)
        self.started.append(started)
        if self._on_write is not None:
            self._on_write(started)
        else:
            started.copy()
            started.end(True)
        return write

    def withdraw(self, write: Write) -> None:
        """Note that the write was given up."""
        self.withdrawn.append(write)
