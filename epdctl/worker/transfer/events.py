"""Ready events for vLLM schedulers: a PUSH socket that whoever asked for `event_port` pulls from.

Rules of this file: never waits for a reader. Without one, or with a slow one, the oldest events are dropped
beyond 4,096, as in vLLM 0.33.0; our own language engine does not use them.
"""

from __future__ import annotations

import asyncio
from collections import deque

import zmq
import zmq.asyncio

from epdctl.ec.protocol import ControlAddress, ReadyEvent, encode
from epdctl.worker.duties import repeated

MAX_QUEUED_EVENTS = 4096


class EventPublisher:
    """Pushes events to whoever is connected; `host` is bound at a port that the system chooses."""

    def __init__(self, host: str, context: zmq.asyncio.Context) -> None:
        self._address = ControlAddress(host=host, port=0)
        self._context = context
        self._queue: deque[bytes] = deque(maxlen=MAX_QUEUED_EVENTS)
        self._filled = asyncio.Event()
        self._socket: zmq.asyncio.Socket | None = None
        self._task: asyncio.Task[None] | None = None
        self.port = 0

    def open(self) -> None:
        """Bind and start to send."""
        socket = self._context.socket(zmq.PUSH)
        socket.setsockopt(zmq.IPV6, 1)
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(str(self._address))
        self.port = int(socket.getsockopt_string(zmq.LAST_ENDPOINT).rsplit(":", 1)[1])
        self._socket = socket
        sending = repeated(lambda: self._send(socket), name="ec-events")
        self._task = asyncio.create_task(sending, name="ec-events")

    def publish(self, event: ReadyEvent) -> None:
        """Queue one event, dropping the oldest when the queue is full."""
        self._queue.append(encode(event))
        self._filled.set()

    async def close(self) -> None:
        """Stop; unsent events are dropped."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._socket is not None:
            self._socket.close(linger=0)

    async def _send(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            while self._queue:
                await socket.send(self._queue.popleft())
            self._filled.clear()
            await self._filled.wait()
