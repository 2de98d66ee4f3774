"""A peer that answers with scripted bytes, for adapters that must cope with any."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

Reader, Writer = asyncio.StreamReader, asyncio.StreamWriter
Script = Callable[["Peer", Reader, Writer], Awaitable[None]]


class Peer:
    """What a scripted server saw: connections in order, and the requests on each."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self.url = ""
        self.port = 0
        self.connections = 0
        self.requests: list[tuple[bytes, bytes]] = []
        self.lost = asyncio.Event()
        self.tasks: set[asyncio.Task[None] | None] = set()

    async def serve(self, reader: Reader, writer: Writer) -> None:
        """Run the script on one connection and close it."""
        self.connections += 1
        self.tasks.add(asyncio.current_task())
        try:
            await self._script(self, reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            self.lost.set()
        except asyncio.CancelledError:
            writer.transport.abort()  # the test is over
        finally:
            self.tasks.discard(asyncio.current_task())
            writer.close()

    async def read_request(self, reader: Reader) -> bytes:
        """Read one request and return its body; raises IncompleteReadError at the end of the connection."""
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(
            (
                int(line.split(b":")[1])
                for line in head.split(b"\r\n")
                if line.lower().startswith(b"content-length")
            ),
            0,
        )
        body = await reader.readexactly(length)
        self.requests.append((head, body))
        return body


def answering(*answers: bytes, closes: bool = False) -> Script:
    """Return a script that gives the next of `answers` to each request; the last repeats."""

    async def script(peer: Peer, reader: Reader, writer: Writer) -> None:
        while True:
            await peer.read_request(reader)
            number = min(len(peer.requests), len(answers)) - 1
            writer.write(answers[number])
            await writer.drain()
            if closes:
                return

    return script


async def wait_for_end(reader: Reader) -> None:
    """Return when the other side has closed."""
    while await reader.read(65536):
        pass


def reset(writer: Writer) -> None:
    """Close with a reset instead of a FIN."""
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


@asynccontextmanager
async def peer(script: Script, **options: object) -> AsyncIterator[Peer]:
    """Serve `script` on a loopback port."""
    it = Peer(script)
    server = await asyncio.start_server(it.serve, "127.0.0.1", 0, limit=1 << 26, **options)
    it.port = server.sockets[0].getsockname()[1]
    it.url = f"{'https' if options.get('ssl') else 'http'}://127.0.0.1:{it.port}"
    try:
        yield it
    finally:
        server.close()
        running = [task for task in it.tasks if task is not None]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
