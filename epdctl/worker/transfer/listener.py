"""The consumer's control port: whatever arrives, somebody gets an answer.

    listener = ControlListener(address, answer, context)   # answer: async (body) -> body, must not raise
    listener.open()                                         # binds; OSError names the port
    listener.port; await listener.close()

Rules of this file: one frame is a request, anything else is refused and answered; requests are answered
independently, so a slow one (a digest of 64 MB) holds nobody else up; if the socket breaks, the loop opens it
again on the same port. A ROUTER socket serves vLLM's REQ clients like its REP does (same frames), without
REP's habit of being stuck after an odd message.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Awaitable, Callable

import structlog
import zmq
import zmq.asyncio

from epdctl.ec.protocol import ControlAddress, Refusal, RefusalCode, encode_refusal

MAX_MESSAGE_BYTES = 8 * 2**20
MAX_OPEN_REQUESTS = 1024
REOPEN_DELAY_S = 0.1

Answer = Callable[[bytes], Awaitable[bytes]]

_ONE_FRAME = encode_refusal(Refusal("a control request is exactly one frame", RefusalCode.INVALID))
_INTERNAL = encode_refusal(Refusal("internal error"))


class ControlListener:
    """Serves one control address; port 0 asks the system for a free one."""

    def __init__(self, address: ControlAddress, answer: Answer, context: zmq.asyncio.Context) -> None:
        self._address = address
        self._answer = answer
        self._context = context
        self._socket: zmq.asyncio.Socket | None = None
        self._loop_task: asyncio.Task[None] | None = None
        self._requests: set[asyncio.Task[None]] = set()
        self._log = structlog.get_logger()

    @property
    def port(self) -> int:
        """The port that is served, also when the system chose it."""
        return self._address.port

    def open(self) -> None:
        """Bind and start to serve; raise OSError naming the address when it is taken or not ours."""
        self._bind()
        self._loop_task = asyncio.create_task(self._supervise(), name="ec-control")

    async def close(self) -> None:
        """Stop serving; requests under way are dropped, their senders time out."""
        tasks = [task for task in (self._loop_task, *self._requests) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._socket is not None:
            self._socket.close(linger=0)

    def _bind(self) -> None:
        socket = self._context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.IPV6, 1)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        try:
            socket.bind(str(self._address))
        except zmq.ZMQError as error:
            socket.close(linger=0)
            raise OSError(
                error.errno or errno.EADDRINUSE,
                f"cannot listen on {self._address} for EC control: {error.strerror} (--ec-ip, --ec-port)",
            ) from error
        endpoint = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._address = self._address.with_port(int(endpoint.rsplit(":", 1)[1]))
        self._socket = socket

    async def _supervise(self) -> None:
        while True:
            try:
                await self._serve()
            except Exception:  # noqa: BLE001 - the supervisor of this loop: a consumer without it is deaf
                self._log.exception("ec_control_loop_failed", port=self.port)
            if self._socket is not None:
                self._socket.close(linger=0)
                self._socket = None
            await asyncio.sleep(REOPEN_DELAY_S)
            try:
                self._bind()
            except OSError as error:
                self._log.error("ec_control_port_lost", port=self.port, error=str(error))

    async def _serve(self) -> None:
        while self._socket is not None:
            # Never under a time-out: a cancelled receive may lose the message that just came in.
            frames = await self._socket.recv_multipart()
            if len(self._requests) >= MAX_OPEN_REQUESTS:
                await asyncio.wait(self._requests, return_when=asyncio.FIRST_COMPLETED)
            task = asyncio.create_task(self._reply(self._socket, frames))
            self._requests.add(task)
            task.add_done_callback(self._requests.discard)

    async def _reply(self, socket: zmq.asyncio.Socket, frames: list[bytes]) -> None:
        envelope, bodies = _split(frames)
        try:
            reply = await self._answer(bodies[0]) if len(bodies) == 1 else _ONE_FRAME
        except Exception:  # noqa: BLE001 - an unanswered REQ hangs its producer until its time-out
            self._log.exception("ec_control_request_failed", port=self.port)
            reply = _INTERNAL
        try:
            await socket.send_multipart([*envelope, reply])
        except zmq.ZMQError as error:
            self._log.debug("ec_control_reply_lost", port=self.port, error=error.strerror)


def _split(frames: list[bytes]) -> tuple[list[bytes], list[bytes]]:
    """Return the routing frames, ended by the empty delimiter a REQ peer expects back, and the bodies."""
    identity, rest = frames[0], frames[1:]
    if rest and rest[0] == b"":
        return [identity, b""], rest[1:]
    # A peer that is no REQ socket and sent no delimiter gets none back.
    return [identity], rest
