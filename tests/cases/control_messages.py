"""Messages to EC control sockets: one, a race of time-outs against answers, a burst.

Rules of this file: raw sockets towards the product's listener, the product's client towards a stub; every
wait has a deadline; what is returned is how many messages were lost and the longest time without progress.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Mapping
from typing import Any

import zmq
import zmq.asyncio

from epdctl.ec.client import ControlClient
from epdctl.errors import ConsumerUnavailable
from tests.cases.stalls import wait_for_a_core
from tests.stubs.consumer import Reservation, StubConsumer

ANSWER_S = 5.0
AT_ONCE = 25
SOCKETS = 20
SPARE_S = 5.0


async def ask(address: str, body: Mapping[str, Any]) -> Any:
    """Send one message and return the JSON that answers it, or None."""
    context = zmq.asyncio.Context()
    try:
        socket = context.socket(zmq.REQ)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(address)
        await socket.send(json.dumps(body).encode())
        async with asyncio.timeout(ANSWER_S):
            return json.loads(await socket.recv())
    except TimeoutError:
        return None
    finally:
        context.destroy(linger=0)


async def race(rounds: int, *, timeout_s: float, delays_s: tuple[float, float]) -> tuple[int, float]:
    """Ask a stub that answers at about the time when the client gives up.

    Lost is a round that ends in neither the answer to its own question nor a time-out, and each question
    afterwards that stays without its answer although there is time.
    """
    async with StubConsumer() as stub:
        low, high = delays_s
        stub.set_behaviour({"status": {"delay_ms": [1000 * low, 1000 * high]}})
        for number in range(rounds):
            stub.reservations[f"t{number}"] = _named(f"hash {number}")
        client = ControlClient(stub.address, timeout_s)
        clock = _Clock()
        try:
            numbers = iter(range(rounds))
            lost = await asyncio.gather(*(_rounds(client, numbers, clock) for _ in range(AT_ONCE)))
        finally:
            await client.close()
        patient = ControlClient(stub.address, SPARE_S)
        try:
            late = await _rounds(patient, iter(range(AT_ONCE)), clock, may_time_out=False)
        finally:
            await patient.close()
        return sum(lost) + late, clock.longest


async def _rounds(client: ControlClient, numbers: Any, clock: _Clock, *, may_time_out: bool = True) -> int:
    lost = 0
    for number in numbers:
        try:
            status = await client.status(f"t{number}")
            lost += status is None or status.mm_hash != f"hash {number}"
        except ConsumerUnavailable:
            lost += not may_time_out
        clock.tick()
    return lost


async def burst(address: str, count: int) -> tuple[int, float]:
    """Send `count` messages at once over a few sockets; each must be answered with its own answer."""
    context = zmq.asyncio.Context()
    clock = _Clock()
    try:
        shares = [count // SOCKETS + (n < count % SOCKETS) for n in range(SOCKETS)]
        answered = await asyncio.gather(*(_share(context, address, share, clock) for share in shares))
    finally:
        context.destroy(linger=0)
    return count - sum(answered), clock.longest


async def _share(context: zmq.asyncio.Context, address: str, count: int, clock: _Clock) -> int:
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.connect(address)
    for _ in range(count):
        await socket.send_multipart([b"", b'{"op": "status", "transfer_id": "nobody"}'])
    answered = 0
    try:
        for _ in range(count):
            async with asyncio.timeout(ANSWER_S):
                frames = await socket.recv_multipart()
            answered += json.loads(frames[-1]) == {"ok": True, "result": None}
            clock.tick()
    except TimeoutError:
        clock.tick()
    finally:
        # Not left to the context's end: what is collected before that is a warning, and so an error.
        socket.close(linger=0)
    return answered


def _named(mm_hash: str) -> Reservation:
    return Reservation(mm_hash=mm_hash, nbytes=1, shape=[1, 1], dtype="uint8")


class _Clock:
    """The longest time between two ticks, without what this process spent waiting for a core."""

    def __init__(self) -> None:
        self._last = self._now()
        self.longest = 0.0

    def tick(self) -> None:
        """Note progress."""
        now = self._now()
        self.longest = max(self.longest, now - self._last)
        self._last = now

    @staticmethod
    def _now() -> float:
        return time.monotonic() - wait_for_a_core(os.getpid())
