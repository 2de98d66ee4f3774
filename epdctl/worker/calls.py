"""Calls to an engine process: messages out, messages back, and a sure end when the process ends.

Rules of this file: a call belongs to one process; it is failed by that process's end and by nothing else of
the supervisor's. An inbox is bounded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from types import TracebackType
from typing import Any

from epdctl.errors import EngineUnavailable
from epdctl.worker.channel import Buffer, Channel, ErrorBody, Message, error_of, message
from epdctl.worker.socket_folder import SocketFolder

_INBOX_MESSAGES = 4096

Spawn = Callable[[Coroutine[Any, Any, None]], None]
"""Runs a coroutine as a task that somebody owns."""


class EngineCall:
    """One call to an engine: messages out, messages back until the caller closes it.

    Use as an async context manager. Leaving it early tells the engine with a `cancel` message.
    """

    def __init__(self, engine: EngineProcess, call_id: str, spawn: Spawn) -> None:
        self.call_id = call_id
        self._engine = engine
        self._spawn = spawn
        self._inbox: asyncio.Queue[Message | EngineUnavailable] = asyncio.Queue(_INBOX_MESSAGES)
        self._ended = False

    async def __aenter__(self) -> EngineCall:
        self._engine.calls[self.call_id] = self
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._engine.calls.pop(self.call_id, None)
        if not self._ended and self._engine.death is None:
            # A task of the supervisor's: a cancelled request still frees the engine's work.
            self._spawn(self._cancel())

    async def _cancel(self) -> None:
        with suppress(EngineUnavailable):
            await self._engine.channel.send(message("cancel", call_id=self.call_id))

    async def send(self, kind: str, body: Any = None, frames: tuple[Buffer, ...] = ()) -> None:
        """Send one message of this call; raises EngineUnavailable."""
        if self._engine.death is not None:
            raise EngineUnavailable(self._engine.death, retry_after_s=1)
        await self._engine.channel.send(message(kind, body, call_id=self.call_id, frames=frames))

    async def receive(self) -> Message:
        """Wait for the call's next message.

        Raises:
            EngineUnavailable: the engine process ended.
            EpdError: the failure that the engine reported for this call (it has ended then).
        """
        received = await self._inbox.get()
        if isinstance(received, EngineUnavailable):
            self._ended = True
            raise received
        if received.kind == "error":
            self._ended = True
            raise error_of(received.parse(ErrorBody))
        return received

    def end(self) -> None:
        """Say that the call is over: the engine needs no `cancel`."""
        self._ended = True

    def deliver(self, received: Message | EngineUnavailable) -> None:
        """Put a message into the inbox; a caller that does not drain it loses the call, not our memory."""
        try:
            self._inbox.put_nowait(received)
        except asyncio.QueueFull:
            self._engine.calls.pop(self.call_id, None)
            self._inbox.get_nowait()
            self._inbox.put_nowait(EngineUnavailable("the caller of the engine did not keep up"))


class EngineProcess:
    """One engine process with its channel and its open calls."""

    def __init__(self, process: asyncio.subprocess.Process, channel: Channel, folder: SocketFolder) -> None:
        self.process = process
        self.channel = channel
        self.folder = folder
        """Holds the channel's socket files until both ends are connected."""
        self.calls: dict[str, EngineCall] = {}
        self.death: str | None = None
        """Why the process is out of service; None while it is in service."""
        self.last_beat = 0.0

    def fail_calls(self, reason: str) -> None:
        """Take the process out of service and fail every open call with `reason`."""
        self.death = reason
        for call in list(self.calls.values()):
            call.deliver(EngineUnavailable(reason, retry_after_s=1))
        self.calls.clear()
