"""Messages between a worker's front process and its engine process, over ZMQ PUSH/PULL on ipc sockets.

Rules of this file:
- One message is `[header, frame, ...]`: a msgpack header (kind, call id, typed body) and raw byte frames.
  Nothing is ever pickled.
- Both directions are bounded; a send that cannot be queued within its deadline fails, it never waits on.
- Every engine process gets sockets of its own, so nothing of a dead one reaches its successor.
- Only one task may receive from a channel, and it must not be cancelled to implement a time-out: a cancelled
  receive may lose the message that has just arrived.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import zmq
import zmq.asyncio

from epdctl import errors
from epdctl.errors import EngineUnavailable, EpdError
from epdctl.worker.socket_folder import SOCKET_NAMES

T = TypeVar("T")
Buffer = bytes | bytearray | memoryview

HIGH_WATER_MARK = 1024
SEND_DEADLINE_S = 5.0
_COPY_BELOW_BYTES = 65536
_IPC_PATH_LIMIT = 100  # sun_path holds 108 bytes on Linux


class MalformedMessage(ValueError):
    """The peer sent something that is no message of this channel."""


class _Header(msgspec.Struct, array_like=True):
    kind: str
    call_id: str
    body: msgspec.Raw


class ErrorBody(msgspec.Struct):
    """Body of an `error` message: one of our failures, crossing the process border."""

    name: str
    message: str
    param: str | None = None
    retry_after_s: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message: what it is, which call it belongs to ("" for none), its body and its byte frames."""

    kind: str
    call_id: str = ""
    body: bytes = b"\xc0"
    frames: tuple[Buffer, ...] = ()

    def parse(self, kind: type[T]) -> T:
        """Return the body as a `kind`; raise MalformedMessage when it is not one."""
        try:
            return msgspec.msgpack.decode(self.body, type=kind)
        except msgspec.DecodeError as error:
            raise MalformedMessage(f"{self.kind}: {error}") from error


def message(kind: str, body: Any = None, *, call_id: str = "", frames: Sequence[Buffer] = ()) -> Message:
    """Return a message with `body` (a msgspec struct or plain values) in msgpack."""
    packed = msgspec.msgpack.encode(body)
    return Message(kind=kind, call_id=call_id, body=packed, frames=tuple(frames))


def error_message(error: EpdError, *, call_id: str) -> Message:
    """Return the `error` message that ends call `call_id`."""
    body = ErrorBody(
        name=type(error).__name__,
        message=error.message,
        param=error.param,
        retry_after_s=error.retry_after_s,
    )
    return message("error", body, call_id=call_id)


def error_of(body: ErrorBody) -> EpdError:
    """Return the failure that `body` names; a name we do not know becomes EngineUnavailable."""
    kind = getattr(errors, body.name, None)
    if not (isinstance(kind, type) and issubclass(kind, EpdError)) or kind in _NOT_REBUILT:
        return EngineUnavailable(body.message, param=body.param, retry_after_s=body.retry_after_s)
    return kind(body.message, param=body.param, retry_after_s=body.retry_after_s)


_NOT_REBUILT = (
    EpdError,
    errors.NoInstance,
    errors.UpstreamRefused,
)  # their constructors take other arguments


def pack(message: Message) -> list[Buffer]:
    """Return the frames of `message` as they go over the socket."""
    header = _Header(kind=message.kind, call_id=message.call_id, body=msgspec.Raw(message.body))
    return [msgspec.msgpack.encode(header), *message.frames]


def unpack(frames: Sequence[zmq.Frame]) -> Message:
    """Return the message in `frames`; its byte frames stay views of the received memory.

    Raises:
        MalformedMessage: when the first frame is no header.
    """
    try:
        header = msgspec.msgpack.decode(frames[0].buffer, type=_Header)
    except (IndexError, msgspec.DecodeError) as error:
        raise MalformedMessage(f"no header: {error}") from error
    rest = tuple(frame.buffer for frame in frames[1:])
    return Message(kind=header.kind, call_id=header.call_id, body=bytes(header.body), frames=rest)


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoints:
    """The two socket addresses of one engine process."""

    to_engine: str
    to_front: str

    @property
    def folder(self) -> Path:
        """The folder of both sockets."""
        return Path(self.to_engine.removeprefix("ipc://")).parent


class Channel:
    """One end of the connection; owns its two sockets."""

    def __init__(self, send: zmq.asyncio.Socket, receive: zmq.asyncio.Socket) -> None:
        self._send = send
        self._receive = receive

    async def send(self, message: Message, *, deadline_s: float = SEND_DEADLINE_S) -> None:
        """Queue `message` for the peer.

        Raises:
            EngineUnavailable: the peer took no message for `deadline_s`, or the channel is closed.
        """
        frames = pack(message)
        large = any(memoryview(frame).nbytes >= _COPY_BELOW_BYTES for frame in message.frames)
        try:
            async with asyncio.timeout(deadline_s):
                await self._send.send_multipart(frames, copy=not large)
        except (TimeoutError, zmq.ZMQError) as error:
            raise EngineUnavailable("the engine process does not take messages", retry_after_s=1) from error
        except asyncio.CancelledError as error:
            if _is_cancelled():
                raise
            # Closing a socket cancels its pending sends (pyzmq 27); that is no cancellation of the caller.
            raise EngineUnavailable("the engine process is gone", retry_after_s=1) from error

    async def receive(self) -> Message:
        """Wait for the next message; raises MalformedMessage for one that cannot be read."""
        return unpack(await self._receive.recv_multipart(copy=False))

    def close(self) -> None:
        """Close both sockets; what was not sent is dropped."""
        self._send.close(linger=0)
        self._receive.close(linger=0)


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _socket(context: zmq.asyncio.Context, kind: int) -> zmq.asyncio.Socket:
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
    return socket


def bind_channel(context: zmq.asyncio.Context, directory: Path) -> tuple[Channel, Endpoints]:
    """Return the front's end, bound to two new ipc sockets in the private `directory`, and their addresses.

    Raises:
        OSError: when the folder's path is too long for a socket.
    """
    paths = [directory / name for name in SOCKET_NAMES]
    for path in paths:
        if len(str(path).encode()) > _IPC_PATH_LIMIT:
            raise OSError(f"the path {path} is too long for a socket: set TMPDIR to a shorter folder")
    endpoints = Endpoints(to_engine=f"ipc://{paths[0]}", to_front=f"ipc://{paths[1]}")
    send, receive = _socket(context, zmq.PUSH), _socket(context, zmq.PULL)
    send.bind(endpoints.to_engine)
    receive.bind(endpoints.to_front)
    return Channel(send, receive), endpoints


def connect_channel(context: zmq.asyncio.Context, endpoints: Endpoints) -> Channel:
    """Return the engine's end of the channel at `endpoints`."""
    send, receive = _socket(context, zmq.PUSH), _socket(context, zmq.PULL)
    send.connect(endpoints.to_front)
    receive.connect(endpoints.to_engine)
    return Channel(send, receive)
