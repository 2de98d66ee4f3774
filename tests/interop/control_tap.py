"""A tap on the EC control channel of a Mooncake consumer: a ZMQ relay that keeps every exchange.

Rules of this file: messages go through unchanged but for the reply to `peers`, whose ports are replaced by
the tap's, so that producers stay with it. `lose` is a fault that a test may put in: operations answered
with an error and never forwarded."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import zmq
import zmq.asyncio

from tests.interop.engines import HOST

_TIMEOUT_MS = 30_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlExchange:
    """One control message and the consumer's reply."""

    request: dict[str, Any]
    reply: dict[str, Any]


class ControlTap:
    """Relays `address` to the consumer's control socket at `target` (both `tcp://host:port`)."""

    def __init__(self, target: str, port: int) -> None:
        self.target = target
        self.address = f"tcp://{HOST}:{port}"
        self.exchanges: list[ControlExchange] = []
        self.lose: frozenset[str] = frozenset()
        self._port = port
        self._context = zmq.asyncio.Context()
        self._task: asyncio.Task[None] | None = None

    async def open(self) -> ControlTap:
        """Start relaying."""
        front = self._context.socket(zmq.ROUTER)
        front.setsockopt(zmq.LINGER, 0)
        front.bind(self.address)
        self._task = asyncio.create_task(self._relay(front))
        return self

    async def close(self) -> None:
        """Stop relaying."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        self._context.destroy(linger=0)

    async def _relay(self, front: zmq.asyncio.Socket) -> None:
        with front:
            while True:
                *envelope, body = await front.recv_multipart()
                reply = await self._exchange(body)
                await front.send_multipart([*envelope, reply])

    async def _exchange(self, body: bytes) -> bytes:
        request = json.loads(body)
        if request.get("op") in self.lose:
            raw = json.dumps({"ok": False, "error": "lost by the tap"}).encode()
        else:
            raw = await self._ask(body)
        reply = json.loads(raw)
        self.exchanges.append(ControlExchange(request=request, reply=reply))
        if request.get("op") == "peers" and reply.get("ok"):
            reply["result"]["ports"] = [self._port for _ in reply["result"]["ports"]]
            return json.dumps(reply).encode()
        return raw

    async def _ask(self, body: bytes) -> bytes:
        with self._context.socket(zmq.REQ) as back:
            back.setsockopt(zmq.LINGER, 0)
            back.setsockopt(zmq.RCVTIMEO, _TIMEOUT_MS)
            back.connect(self.target)
            await back.send(body)
            try:
                return await back.recv()
            except zmq.Again:
                return json.dumps({"ok": False, "error": "the consumer did not answer the tap"}).encode()
