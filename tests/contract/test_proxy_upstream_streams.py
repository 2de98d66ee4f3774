"""Streams that the client for instances relays, against peers that send them in any way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from epdctl.domain import InstanceUrl
from epdctl.proxy.connection import CallFailed
from epdctl.proxy.retry import FailureKind
from epdctl.proxy.upstream import UpstreamClient
from tests.contract.calls import CHAT, Scenario
from tests.contract.scripted import Peer, Reader, Writer, peer, reset, wait_for_end

pytestmark = pytest.mark.contract


class Collected:
    """A sink that takes everything, or blocks after each write until it is released."""

    def __init__(self, *, blocks: bool = False) -> None:
        self.pieces: list[bytes] = []
        self.blocks = blocks
        self.released = asyncio.Event()

    def write(self, pieces: list[bytes]) -> bool:
        """Take a write."""
        self.pieces.extend(pieces)
        return not self.blocks

    async def drained(self) -> None:
        """Wait to be released."""
        await self.released.wait()

    @property
    def body(self) -> bytes:
        """All that was written."""
        return b"".join(self.pieces)


class Telling(Collected):
    """A sink that takes everything, and tells the peer of each write."""

    def __init__(self, peer: Peer) -> None:
        super().__init__()
        self.peer = peer

    def write(self, pieces: list[bytes]) -> bool:
        """Take a write."""
        self.peer.lost.set()
        return super().write(pieces)


class TestStreams:
    """Bodies that are relayed while they arrive."""

    def test_pieces_arrive_as_they_come(self, run: Callable[[Scenario], None]) -> None:
        """Each piece is passed on before the next one was sent."""

        async def by_turns(it: Peer, reader: Reader, writer: Writer) -> None:
            await it.read_request(reader)
            writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
            for number in range(3):
                writer.write(b"1\r\n%d\r\n" % number)
                await it.lost.wait()
                it.lost.clear()
            writer.write(b"0\r\n\r\n")
            await wait_for_end(reader)

        async def scenario() -> None:
            async with peer(by_turns) as it:
                client = UpstreamClient(connect_timeout_s=1.0)
                opened = await client.open(InstanceUrl(it.url), CHAT, timeout_s=5)
                sink = Telling(it)
                await opened.relay(sink, idle_s=5)
                assert sink.pieces == [b"0", b"1", b"2"]
                opened.close()
                assert client.connection_count == 1
                await client.close()

        run(scenario)

    def test_a_slow_reader_holds_the_sender_up(self, run: Callable[[Scenario], None]) -> None:
        """What the client cannot take is not gathered: the peer is paused, and nothing gets lost."""
        total = 32 * 1024 * 1024

        async def much(it: Peer, reader: Reader, writer: Writer) -> None:
            await it.read_request(reader)
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % total)
            sent = 0
            while sent < total:
                writer.write(bytes(65536))
                await writer.drain()
                sent += 65536
                it.port = sent
            await wait_for_end(reader)

        async def scenario() -> None:
            async with peer(much) as it:
                client = UpstreamClient(connect_timeout_s=1.0)
                opened = await client.open(InstanceUrl(it.url), CHAT, timeout_s=5)
                sink = Collected(blocks=True)
                relay = asyncio.ensure_future(opened.relay(sink, idle_s=0.3))
                seen = -1
                while seen != it.port:
                    seen = it.port
                    await asyncio.sleep(0.2)
                assert seen < total / 2
                sink.blocks = False
                sink.released.set()
                await relay
                assert len(sink.body) == total
                opened.close()
                await client.close()

        run(scenario)

    @pytest.mark.parametrize(
        ("end", "kind"),
        [("close", FailureKind.BROKEN), ("reset", FailureKind.BROKEN), ("hang", FailureKind.TIMEOUT)],
    )
    def test_a_stream_that_is_cut(self, run: Callable[[Scenario], None], end: str, kind: FailureKind) -> None:
        """What came is passed on; then the failure says how it ended."""

        async def cut(it: Peer, reader: Reader, writer: Writer) -> None:
            await it.read_request(reader)
            writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n")
            await writer.drain()
            await it.lost.wait()
            if end == "reset":
                reset(writer)
            elif end == "hang":
                await wait_for_end(reader)

        async def scenario() -> None:
            async with peer(cut) as it:
                client = UpstreamClient(connect_timeout_s=1.0)
                opened = await client.open(InstanceUrl(it.url), CHAT, timeout_s=5)
                sink = Telling(it)
                with pytest.raises(CallFailed) as caught:
                    await opened.relay(sink, idle_s=0.3)
                assert (sink.body, caught.value.kind) == (b"hello", kind)
                opened.close()
                assert client.connection_count == 0
                await client.close()

        run(scenario)
