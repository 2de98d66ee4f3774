"""Asks a prefill's KV socket: one JSON frame out, one back.

Rules of this file: every exchange has a deadline and a socket of its own. Foreign exceptions become ours
here: `KvUnreachable` when nothing was asked, `KvUndelivered` when nobody knows what became of it.
"""

from __future__ import annotations

import asyncio
from typing import Any

import zmq
import zmq.asyncio

from epdctl.ec.protocol import ControlAddress
from epdctl.errors import KvUndelivered
from epdctl.worker.language.kv_messages import (
    BadKvMessage,
    Fetch,
    Fetched,
    Refusal,
    Release,
    encode_request,
    parse_fetched,
)

_CONNECT_S = 5.0
_RELEASE_S = 2.0


class KvUnreachable(Exception):
    """Nobody listens at the prefill's KV address: nothing was asked, so nothing will be written."""


class _PeerLost(Exception):
    """The connection was lost before the answer."""


class KvClient:
    """Talks to any prefill; make it inside the event loop."""

    def __init__(self) -> None:
        self._context = zmq.asyncio.Context()

    def close(self) -> None:
        """Drop what is under way."""
        self._context.destroy(linger=0)

    async def fetch(self, address: ControlAddress, request: Fetch, deadline_s: float) -> Fetched | Refusal:
        """Have KV written, and wait for that.

        Raises:
            KvUnreachable: nothing was asked.
            KvUndelivered: no answer in time, or none that can be read; bytes may still arrive.
        """
        await self._knock(address)
        try:
            async with asyncio.timeout(deadline_s):
                return parse_fetched(await self._exchange(address, encode_request(request)))
        except TimeoutError as error:
            raise KvUndelivered(
                f"the prefill worker did not hand over its KV within {deadline_s:g} s"
            ) from error
        except _PeerLost as error:
            raise KvUndelivered("the prefill worker went away while it handed over its KV") from error
        except (zmq.ZMQError, BadKvMessage) as error:
            raise KvUndelivered("the prefill worker's KV socket gave no usable answer") from error

    async def release(self, address: ControlAddress, kv_id: str) -> None:
        """Tell a prefill that nobody will fetch; it would find out by its lease."""
        try:
            async with asyncio.timeout(_RELEASE_S):
                await self._knock(address)
                await self._exchange(address, encode_request(Release(kv_id=kv_id)))
        except (TimeoutError, KvUnreachable, _PeerLost, zmq.ZMQError):
            return

    async def _knock(self, address: ControlAddress) -> None:
        """Find out at once that nobody listens: a REQ socket would try again in silence."""
        try:
            async with asyncio.timeout(_CONNECT_S):
                _, writer = await asyncio.open_connection(address.host, address.port)
        except (TimeoutError, OSError, ValueError) as error:
            # A host that cannot be encoded for the resolver is a ValueError there.
            raise KvUnreachable(str(address)) from error
        writer.close()

    async def _exchange(self, address: ControlAddress, body: bytes) -> bytes:
        """Send and receive; a peer that goes away meanwhile ends the wait at once."""
        socket = self._context.socket(zmq.REQ)
        socket.setsockopt(zmq.IPV6, 1)
        socket.setsockopt(zmq.LINGER, 0)
        monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED)
        waits: list[asyncio.Future[Any]] = []
        try:
            socket.connect(str(address))
            await socket.send(body)
            waits = [asyncio.ensure_future(socket.recv()), asyncio.ensure_future(monitor.recv_multipart())]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if not waits[0].done():
                raise _PeerLost
            return bytes(waits[0].result())
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)
            socket.disable_monitor()
            monitor.close(linger=0)
            socket.close(linger=0)
