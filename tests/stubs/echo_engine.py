"""A worker engine that computes nothing: it echoes, fails, hangs or dies as its messages ask.

Run by `worker.supervisor` with `python -m`. Setting `start`: "ok", "fail", "die", "hang".
Messages: `echo` (frames come back), `refuse`, `die`, `hang` (stops beating), `silent` (never answered),
`count` (moves a counter); `cancel` is answered with `cancelled` on the call `watch`.
"""

from __future__ import annotations

import asyncio
import os
import signal
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

    async def start(self) -> Mapping[str, Any]:
        """Start as the settings ask."""
        how = self._context.settings.get("start", "ok")
        if how == "fail":
            raise StartFailed("no model at this place")
        if how == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "hang":
            await asyncio.Event().wait()
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
        elif received.kind == "cancel":
            await self._context.send(message("cancelled", {"call": call_id}, call_id="watch"))

    def health(self) -> str | None:
        """Nothing ever troubles an echo."""
        return None

    async def stop(self, grace_s: float) -> None:
        """Nothing to finish."""


if __name__ == "__main__":
    raise SystemExit(run_engine(EchoEngine))
