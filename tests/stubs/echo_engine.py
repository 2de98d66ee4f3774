"""A worker engine that computes nothing: it echoes, fails, hangs or dies as its messages ask.

Run by `worker.supervisor` with `python -m`. Setting `start`: "ok", "fail", "die", "hang".
Messages: `echo` (frames come back), `refuse`, `die`, `hang` (stops beating), `silent` (never answered),
`count` (moves a counter), `say` (writes on stderr as a library does), `break` (with `what`: a loop, a
callback, a forgotten task, the health or the message itself fails); `cancel` is answered with `cancelled` on
the call `watch`.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Mapping
from typing import Any

from epdctl.errors import InvalidRequest
from epdctl.worker.channel import Message, error_message, message
from epdctl.worker.engine import EngineContext, StartFailed, run_engine


class EchoEngine:
    """See the module."""

    def __init__(self, context: EngineContext) -> None:
        self._context = context
        self._broken = asyncio.Event()
        self._is_health_broken = False

    async def start(self) -> Mapping[str, Any]:
        """Start as the settings ask."""
        how = self._context.settings.get("start", "ok")
        if how == "fail":
            raise StartFailed("no model at this place")
        if how == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "hang":
            await asyncio.Event().wait()
        self._context.begin(self._fail_when_told(), "echo loop")
        return {"pid": os.getpid()}

    async def handle(self, received: Message) -> None:
        """Do what the message says."""
        call_id = received.call_id
        if received.kind == "echo":
            frames = tuple(bytes(f) for f in received.frames)
            await self._context.send(
                message("echoed", received.parse(dict[str, Any]), call_id=call_id, frames=frames)
            )
        elif received.kind == "refuse":
            await self._context.send(error_message(InvalidRequest("not this", param="x"), call_id=call_id))
        elif received.kind == "count":
            self._context.metrics.ec_bytes.labels("producer").inc(5)
            await self._context.send(message("counted", call_id=call_id))
        elif received.kind == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        elif received.kind == "hang":
            time.sleep(3600)  # noqa: ASYNC251 - a hung loop is what this is for
        elif received.kind == "say":
            os.write(2, received.parse(str).encode())
            print("by Python", file=sys.stderr)  # noqa: T201 - what is not diverted
        elif received.kind == "break":
            self._break(received.parse(str))
        elif received.kind == "cancel":
            await self._context.send(message("cancelled", {"call": call_id}, call_id="watch"))

    async def _fail_when_told(self) -> None:
        await self._broken.wait()
        _fail()

    def _break(self, what: str) -> None:
        loop = asyncio.get_running_loop()
        if what == "loop":
            self._broken.set()
        elif what == "callback":
            loop.call_soon(_fail)
        elif what == "task":
            loop.create_task(_fail_later())  # noqa: RUF006 - forgotten on purpose
        elif what == "health":
            self._is_health_broken = True
        else:
            _fail()

    def health(self) -> str | None:
        """Nothing ever troubles an echo, unless it was told so."""
        if self._is_health_broken:
            _fail()
        return None

    async def stop(self, grace_s: float) -> None:
        """Nothing to finish."""


def _fail() -> None:
    raise RuntimeError("a bug")


async def _fail_later() -> None:
    _fail()


if __name__ == "__main__":
    raise SystemExit(run_engine(EchoEngine))
