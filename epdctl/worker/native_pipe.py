"""The pipe from an engine's libraries to its front's log: both ends.

    pipe = NativePipe(log)                              # in the front
    …start the engine with pass_fds=(pipe.engine_end,)…
    pipe.listen()
    pipe.close()                                        # what is left in it is told first

    divert(descriptor)                                  # in the engine, before a library is loaded

Rules of this file: no side ever waits for the other. What an engine writes in Python, its log above all, does
not come this way, so it needs no front to be read.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from typing import Any

from epdctl.worker.native_output import NativeOutput, Said

_READ_BYTES = 65536
_LEVELS = {"I": "info", "W": "warning", "E": "warning", "F": "error"}
"""What Mooncake calls an error is for the most part a peer that has left, which is told elsewhere."""


class NativePipe:
    """The front's side. `engine_end` is the descriptor to pass on."""

    def __init__(self, log: Any) -> None:
        self._log = log
        self._output = NativeOutput()
        self._descriptor, self.engine_end = os.pipe()
        for descriptor in (self._descriptor, self.engine_end):
            os.set_blocking(descriptor, False)

    def listen(self) -> None:
        """The engine has its end: let go of ours of the same, and tell what comes."""
        self._let_go()
        asyncio.get_running_loop().add_reader(self._descriptor, self._read)

    def close(self) -> None:
        """Tell what is left, and close."""
        self._let_go()
        if self._descriptor >= 0:
            while self._read():
                continue
            asyncio.get_running_loop().remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1

    def _let_go(self) -> None:
        if self.engine_end >= 0:
            os.close(self.engine_end)
            self.engine_end = -1

    def _read(self) -> bool:
        """Tell what is there now; False when that is nothing, or will never be anything again."""
        try:
            data = os.read(self._descriptor, _READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            asyncio.get_running_loop().remove_reader(self._descriptor)
        for said in self._output.take(data, time.monotonic()):
            self._tell(said)
        return bool(data)

    def _tell(self, said: Said) -> None:
        tell = getattr(self._log, _LEVELS[said.severity])
        tell("native_output", text=said.text, source=said.source, repeated=said.repeated)


def divert(descriptor: int) -> None:
    """Let what libraries write on stderr go to `descriptor`; Python's own stderr stays what it was."""
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1, errors="backslashreplace")
    os.dup2(descriptor, 2)
    os.close(descriptor)
