"""Small servers that cases need: a canary that counts connections, a file server, a redirector.

Rules of this file: each binds a free port on loopback and is freed by `close`.
"""

from __future__ import annotations

import asyncio
import urllib.parse
from collections import defaultdict
from collections.abc import Mapping

from tests.cases.placeholders import Pictures
from tests.stubs.http_wire import head_bytes, read_head
from tests.stubs.ports import free_port


class SmallServer:
    """A TCP server on loopback that counts its connections; subclasses answer."""

    def __init__(self) -> None:
        self.port = free_port()
        self.connections = 0
        self._server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        """Its base URL."""
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Listen."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)

    async def close(self) -> None:
        """Stop listening."""
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            async with asyncio.timeout(5):
                await self.answer(reader, writer)
        except (TimeoutError, ConnectionError, ValueError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one connection; a canary has nothing to say."""


class FileServer(SmallServer):
    """Answers each path with its media files: a list is one file a request, the last one repeats."""

    def __init__(self, files: Mapping[str, str | list[str]], pictures: Pictures) -> None:
        super().__init__()
        self.requests: dict[str, int] = defaultdict(int)
        self._files = files
        self._pictures = pictures

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request with the next file of its path, or 404."""
        head = await read_head(reader)
        if head is None:
            return
        names = self._files.get(head.path)
        call = self.requests[head.path]
        self.requests[head.path] += 1
        if names is None:
            writer.write(head_bytes(404, [("Content-Length", "0"), ("Connection", "close")]))
        else:
            listed = [names] if isinstance(names, str) else names
            body = self._pictures.read(listed[min(call, len(listed) - 1)])
            headers = [("Content-Type", "image/png"), ("Content-Length", str(len(body)))]
            writer.write(head_bytes(200, [*headers, ("Connection", "close")]) + body)
        await writer.drain()


class Redirector(SmallServer):
    """Answers `/to?u=URL` with a redirect to URL."""

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Redirect one request."""
        head = await read_head(reader)
        if head is None:
            return
        query = urllib.parse.parse_qs(head.target.partition("?")[2])
        target = (query.get("u") or [self.url])[0]
        headers = [("Location", target), ("Content-Length", "0"), ("Connection", "close")]
        writer.write(head_bytes(302, headers))
        await writer.drain()
