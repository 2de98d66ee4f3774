"""Asks an EC consumer's control port: one JSON frame out, one back.

    client = ControlClient("tcp://host:port", timeout_s=2.0)
    await client.peers() -> list[int]
    await client.reserve(item) -> Reservation | Refusal
    await client.reserve_batch(items) -> list[Reservation | Refusal]
    await client.complete_batch(items) -> list[CompleteResult]
    await client.cancel(transfer_id) -> bool
    await client.status(transfer_id) -> TransferStatus | None
    await client.close()

Rules of this file: every exchange has a deadline; a socket whose exchange failed or was cancelled is thrown
away, so that a late reply is never taken for another's; no exchange waits for another one's reply. What is
asked of a consumer that was asked before is sent by the call itself, and not when its task gets a turn: in a
burst the consumer then works while the rest of the burst is still being made. Foreign
exceptions become `ConsumerUnavailable` (nobody is there; `ConsumerSilent` when it did not answer in time) or
`UpstreamProtocol` (the answer is not in the protocol) here.
"""

from __future__ import annotations

import asyncio
import socket as tcp
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import Any, TypeVar

import msgspec
import zmq
import zmq.asyncio

from epdctl.ec.protocol import (
    BadMessage,
    Cancel,
    CancelResult,
    CompleteBatch,
    CompleteItem,
    CompleteResult,
    Peers,
    PeersResult,
    Refusal,
    Reservation,
    Reserve,
    ReserveBatch,
    ReserveItem,
    Status,
    TransferStatus,
    encode,
    parse_address,
    parse_complete_replies,
    parse_reply,
    parse_reserve_replies,
)
from epdctl.errors import ConsumerUnavailable, InvalidRequest, UpstreamProtocol

T = TypeVar("T")
A = TypeVar("A")

MAX_IDLE_SOCKETS = 4


class ConsumerSilent(ConsumerUnavailable):
    """The consumer is there, and did not answer in time."""


class ControlClient:
    """Talks to one control address; exchanges may overlap, each on a socket of its own.

    Make it inside a running event loop. A given `context` is shared, else the client owns and closes one.
    Raises InvalidRequest when `address` is not `tcp://host:port`.
    """

    def __init__(self, address: str, timeout_s: float, *, context: zmq.asyncio.Context | None = None) -> None:
        try:
            self.address = parse_address(address)
        except BadMessage as error:
            raise InvalidRequest(str(error), param="consumer_zmq") from error
        self._timeout_s = timeout_s
        self._context = context if context is not None else zmq.asyncio.Context()
        self._owns_context = context is None
        self._idle: list[zmq.asyncio.Socket] = []
        self._busy: set[zmq.asyncio.Socket] = set()
        self._closed = False

    async def peers(self) -> list[int]:
        """Return the control ports of all ranks of the replica, in rank order."""
        result = await self._ask("peers", Peers(), partial(parse_reply, kind=PeersResult))
        if isinstance(result, Refusal):
            raise UpstreamProtocol("the EC consumer refused to name its ranks")
        return list(result.ports)

    def reserve(self, item: ReserveItem) -> Coroutine[Any, Any, Reservation | Refusal]:
        """Ask for the space of one item; a refusal is a value, not an exception."""
        request = Reserve(**msgspec.structs.asdict(item))
        return self._ask("reserve", request, partial(parse_reply, kind=Reservation))

    def reserve_batch(self, items: Sequence[ReserveItem]) -> Coroutine[Any, Any, list[Reservation | Refusal]]:
        """Ask for the space of several items; one answer each, in order."""
        request = ReserveBatch(items=[msgspec.Raw(encode(item)) for item in items])

        def parse(body: bytes) -> list[Reservation | Refusal]:
            answers = parse_reserve_replies(body)
            return [answers] * len(items) if isinstance(answers, Refusal) else _as_many(answers, items)

        return self._ask("reserve_batch", request, parse)

    def complete_batch(self, items: Sequence[CompleteItem]) -> Coroutine[Any, Any, list[CompleteResult]]:
        """Publish finished writes; one answer each, in order. A refused batch counts as not completed."""
        request = CompleteBatch(items=[msgspec.Raw(encode(item)) for item in items])

        def parse(body: bytes) -> list[CompleteResult]:
            answers = parse_complete_replies(body)
            if isinstance(answers, Refusal):
                return [CompleteResult(completed=False, became_ready=False)] * len(items)
            return _as_many(answers, items)

        return self._ask("complete_batch", request, parse)

    async def cancel(
        self,
        transfer_id: str,
        reservation_id: str = "",
        *,
        abandon: bool = False,
        refresh: bool = False,
        failed: bool = False,
        fenced: bool = False,
    ) -> bool:
        """Give a transfer up (see `protocol.Cancel`); true when it had something to act on, now or later."""
        request = Cancel(
            transfer_id=transfer_id,
            reservation_id=reservation_id,
            abandon=abandon,
            refresh=refresh,
            failed=failed,
            fenced=fenced,
        )
        answer = await self._ask("cancel", request, partial(parse_reply, kind=CancelResult))
        return not isinstance(answer, Refusal) and bool(answer.cancelled)

    async def status(self, transfer_id: str) -> TransferStatus | None:
        """Return what the consumer holds under `transfer_id`, or None when its reservation is gone."""
        request = Status(transfer_id=transfer_id)
        answer = await self._ask("status", request, partial(parse_reply, kind=TransferStatus | None))
        return None if isinstance(answer, Refusal) else answer

    async def close(self) -> None:
        """Close all sockets at once, without waiting for anything unsent."""
        self._closed = True
        for socket in (*self._idle, *self._busy):
            socket.close(linger=0)
        self._idle.clear()
        self._busy.clear()
        if self._owns_context:
            self._context.destroy(linger=0)

    def _ask(self, op: str, request: object, parse: Callable[[bytes], T]) -> Coroutine[Any, Any, T]:
        body = encode(request)
        sending: tuple[zmq.asyncio.Socket, Awaitable[object]] | None = None
        if self._idle:
            socket = self._idle.pop()
            self._busy.add(socket)
            sending = socket, socket.send(body)
        return self._answer(op, body, sending, parse)

    async def _answer(
        self,
        op: str,
        body: bytes,
        sending: tuple[zmq.asyncio.Socket, Awaitable[object]] | None,
        parse: Callable[[bytes], T],
    ) -> T:
        answer = await self._exchange(op, body, sending)
        try:
            return parse(answer)
        except BadMessage as error:
            raise UpstreamProtocol(f"the EC consumer's answer to '{op}' is not in the protocol") from error

    async def _exchange(
        self, op: str, body: bytes, sending: tuple[zmq.asyncio.Socket, Awaitable[object]] | None
    ) -> bytes:
        socket = None if sending is None else sending[0]
        healthy = False
        try:
            async with asyncio.timeout(self._timeout_s):
                if sending is None:
                    socket = await self._connect()
                    sending = socket, socket.send(body)
                socket, sent = sending
                await sent
                frames = await socket.recv_multipart()
            healthy = len(frames) == 1
        except (TimeoutError, zmq.ZMQError) as error:
            raise ConsumerSilent(f"the EC consumer did not answer '{op}' in time") from error
        except OSError as error:
            raise ConsumerUnavailable("the EC consumer cannot be reached") from error
        finally:
            if socket is not None:
                self._give_back(socket, healthy)
        if not healthy:
            raise UpstreamProtocol(f"the EC consumer's answer to '{op}' is not one frame")
        return bytes(frames[0])

    async def _connect(self) -> zmq.asyncio.Socket:
        # A REQ socket retries a refused connection in silence; a plain connect tells us at once.
        await _check_reachable(self.address.host, self.address.port)
        socket = self._context.socket(zmq.REQ)
        self._busy.add(socket)
        socket.setsockopt(zmq.IPV6, 1)
        socket.setsockopt(zmq.LINGER, 0)
        try:
            socket.connect(str(self.address))
        except zmq.ZMQError as error:
            self._give_back(socket, healthy=False)
            raise OSError(error.errno, error.strerror) from error
        return socket

    def _give_back(self, socket: zmq.asyncio.Socket, healthy: bool) -> None:
        self._busy.discard(socket)
        if healthy and not self._closed and len(self._idle) < MAX_IDLE_SOCKETS:
            self._idle.append(socket)
        else:
            socket.close(linger=0)


async def _check_reachable(host: str, port: int) -> None:
    """Connect to one of the host's addresses and hang up at once; raise OSError when none takes it."""
    loop = asyncio.get_running_loop()
    failure = OSError(f"{host} has no address")
    for family, kind, protocol, _, address in await _resolve(host, port):
        # A bare socket and no stream: a stream's transport outlives its closing by a turn of the loop.
        with tcp.socket(family, kind, protocol) as attempt:
            attempt.setblocking(False)
            try:
                await loop.sock_connect(attempt, address)
            except OSError as error:
                failure = error
            else:
                return
    raise failure


async def _resolve(host: str, port: int) -> Sequence[Any]:
    """Return the system's addresses of a host; raise OSError when it knows none, or takes it for no host."""
    try:
        return await asyncio.get_running_loop().getaddrinfo(host, port, type=tcp.SOCK_STREAM)
    except ValueError as error:
        # What cannot be encoded for the resolver at all (an empty label) is no OSError there.
        raise OSError(f"{host!r} is no host") from error


def _as_many(answers: list[A], items: Sequence[object]) -> list[A]:
    if len(answers) != len(items):
        raise UpstreamProtocol(f"the EC consumer answered {len(answers)} of {len(items)} items")
    return answers
