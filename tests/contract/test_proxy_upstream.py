"""The client for instances, against peers that answer with any bytes; on asyncio and on uvloop."""

from __future__ import annotations

import asyncio
import socket
import ssl
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from epdctl.domain import InstanceUrl
from epdctl.proxy.connection import WRITE_BYTES, CallFailed, Connection, bounded_groups
from epdctl.proxy.retry import FailureKind
from epdctl.proxy.upstream import Call, UpstreamClient
from tests.contract.calls import CHAT, CHUNKED, OK, Scenario, ask, kind_of_failure
from tests.contract.scripted import Peer, Reader, Writer, answering, peer, reset, wait_for_end
from tests.stubs.ports import free_port
from tests.stubs.process import wait_until

pytestmark = pytest.mark.contract


class TestAnswers:
    """Every framing that HTTP/1.1 allows."""

    @pytest.mark.parametrize(
        "answer",
        [
            OK,
            CHUNKED + b"1;x=y\r\n{\r\n1\r\n}\r\n0\r\nx-trailer: 1\r\n\r\n",
            b"HTTP/1.1 100 Continue\r\n\r\n" + OK,
            b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" + OK,
            b"HTTP/1.1 200\r\nContent-Length: 2\r\n\r\n{}",
        ],
    )
    def test_a_whole_answer(self, run: Callable[[Scenario], None], answer: bytes) -> None:
        """Length, chunks, interim answers and a missing reason all give the same answer."""

        async def scenario() -> None:
            async with peer(answering(answer)) as it:
                got = await ask(it)
                assert (got.status, got.body) == (200, b"{}")
                assert all(name != b"x-trailer" and name != b"link" for name, _ in got.headers)

        run(scenario)

    def test_a_body_that_ends_with_the_connection(self, run: Callable[[Scenario], None]) -> None:
        """A body without a length ends where the connection does."""

        async def scenario() -> None:
            async with peer(answering(b"HTTP/1.1 200 OK\r\n\r\n{}", closes=True)) as it:
                assert (await ask(it)).body == b"{}"

        run(scenario)

    def test_what_is_sent(self, run: Callable[[Scenario], None]) -> None:
        """Request line, host, our headers and the length, then the pieces of the body."""

        async def scenario() -> None:
            async with peer(answering(OK)) as it:
                it.url += "/base/"
                await ask(it)
                head, body = it.requests[0]
                assert head.startswith(b"POST /base/v1/chat/completions HTTP/1.1\r\n")
                assert f"\r\nHost: 127.0.0.1:{it.port}\r\n".encode() in head
                assert b"\r\nX-A: 1\r\n" in head
                assert body == b'{"a":1}'

        run(scenario)

    def test_a_large_request_is_sent_in_bounded_pieces(self, run: Callable[[Scenario], None]) -> None:
        """Megabytes arrive whole, also when the peer reads slowly."""

        async def slowly(it: Peer, reader: Reader, writer: Writer) -> None:
            writer.transport.pause_reading()
            asyncio.get_running_loop().call_later(0.1, writer.transport.resume_reading)
            await it.read_request(reader)
            writer.write(OK)

        async def scenario() -> None:
            picture = bytes(range(256)) * 32_768
            async with peer(slowly) as it:
                client = UpstreamClient(connect_timeout_s=1.0)
                call = Call(path="/", body=(b"<", memoryview(picture), b">"))
                assert (await client.call(InstanceUrl(it.url), call, timeout_s=10)).status == 200
                assert it.requests[0][1] == b"<" + picture + b">"
                await client.close()

        run(scenario)

    def test_an_early_answer_stops_the_request(self, run: Callable[[Scenario], None]) -> None:
        """A peer that refuses before it has read the body is heard; its connection is not used again."""

        async def refuses(it: Peer, reader: Reader, writer: Writer) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 413 Too Large\r\ncontent-length: 2\r\n\r\n{}")
            await writer.drain()
            it.lost.set()
            await wait_for_end(reader)

        async def scenario() -> None:
            async with peer(refuses) as it:
                client = UpstreamClient(connect_timeout_s=1.0)
                call = Call(path="/", body=(bytes(64 * 1024 * 1024),))
                assert (await client.call(InstanceUrl(it.url), call, timeout_s=10)).status == 413
                assert client.connection_count == 0
                await client.close()

        run(scenario)


class TestFailures:
    """What is no answer, and how it is called."""

    @pytest.mark.parametrize(
        ("answer", "kind"),
        [
            (b"", FailureKind.UNREACHABLE),
            (b"HTTP/1.1 2", FailureKind.BROKEN),
            (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{}", FailureKind.BROKEN),
            (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\n{\r\n", FailureKind.BROKEN),
            (b"SSH-2.0-x\r\n\r\n", FailureKind.PROTOCOL),
            (
                b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
                FailureKind.PROTOCOL,
            ),
            (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\n{} ", FailureKind.PROTOCOL),
            (b"HTTP/1.1 200 OK\r\nx: " + b"a" * 70_000, FailureKind.PROTOCOL),
            (
                b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",
                FailureKind.PROTOCOL,
            ),
        ],
    )
    def test_bytes_that_are_no_answer(
        self, run: Callable[[Scenario], None], answer: bytes, kind: FailureKind
    ) -> None:
        """Closed before the first byte, cut inside the answer, and not HTTP are three different things."""

        async def scenario() -> None:
            async with peer(answering(answer, closes=True)) as it:
                assert await kind_of_failure(it) is kind

        run(scenario)

    def test_reset_before_the_first_byte(self, run: Callable[[Scenario], None]) -> None:
        """A reset on a fresh connection is unreachable, and is not repeated."""

        async def resets(it: Peer, reader: Reader, writer: Writer) -> None:
            await it.read_request(reader)
            reset(writer)

        async def scenario() -> None:
            async with peer(resets) as it:
                assert await kind_of_failure(it) is FailureKind.UNREACHABLE
                assert it.connections == 1

        run(scenario)

    def test_refused(self, run: Callable[[Scenario], None]) -> None:
        """Nobody listens: unreachable at once."""

        async def scenario() -> None:
            client = UpstreamClient(connect_timeout_s=1.0)
            with pytest.raises(CallFailed) as caught:
                await client.call(InstanceUrl(f"http://127.0.0.1:{free_port()}"), CHAT, timeout_s=5)
            assert caught.value.kind is FailureKind.UNREACHABLE
            await client.close()

        run(scenario)

    def test_a_black_hole_costs_the_connect_deadline(self, run: Callable[[Scenario], None]) -> None:
        """A peer whose backlog is full does not answer the handshake."""

        async def scenario() -> None:
            hole = socket.socket()
            hole.bind(("127.0.0.1", 0))
            hole.listen(0)
            address = hole.getsockname()
            fillers = [socket.socket() for _ in range(4)]
            for filler in fillers:
                filler.setblocking(False)
                filler.connect_ex(address)
            client = UpstreamClient(connect_timeout_s=0.2)
            started = asyncio.get_running_loop().time()
            with pytest.raises(CallFailed) as caught:
                await client.call(InstanceUrl(f"http://127.0.0.1:{address[1]}"), CHAT, timeout_s=5)
            assert caught.value.kind is FailureKind.UNREACHABLE
            assert asyncio.get_running_loop().time() - started < 2
            for one in (hole, *fillers):
                one.close()
            await client.close()

        run(scenario)

    @pytest.mark.parametrize("head", [b"", b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{"])
    def test_silence_ends_at_the_deadline(self, run: Callable[[Scenario], None], head: bytes) -> None:
        """A call has one deadline for all of its answer, and the peer sees the connection go."""

        async def hangs(it: Peer, reader: Reader, writer: Writer) -> None:
            await it.read_request(reader)
            writer.write(head)
            await wait_for_end(reader)
            it.lost.set()

        async def scenario() -> None:
            async with peer(hangs) as it:
                assert await kind_of_failure(it, timeout_s=0.2) is FailureKind.TIMEOUT
                await it.lost.wait()

        run(scenario)

    def test_an_answer_above_the_limit(self, run: Callable[[Scenario], None]) -> None:
        """An endless answer is given up, not gathered."""

        async def endless(it: Peer, reader: Reader, writer: Writer) -> None:
            await it.read_request(reader)
            writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
            while True:
                writer.write(b"10000\r\n" + bytes(0x10000) + b"\r\n")
                await writer.drain()

        async def scenario() -> None:
            async with peer(endless) as it:
                client = UpstreamClient(connect_timeout_s=1.0)
                with pytest.raises(CallFailed) as caught:
                    await client.call(InstanceUrl(it.url), CHAT, timeout_s=10, limit=1_000_000)
                assert caught.value.kind is FailureKind.PROTOCOL
                await client.close()
                await it.lost.wait()

        run(scenario)

    def test_cancel_closes_the_connection(self, run: Callable[[Scenario], None]) -> None:
        """A call that is cancelled lets go of its connection at once."""

        async def hangs(it: Peer, reader: Reader, writer: Writer) -> None:
            await it.read_request(reader)
            await wait_for_end(reader)
            it.lost.set()

        async def scenario() -> None:
            async with peer(hangs) as it:
                client = UpstreamClient(connect_timeout_s=1.0)
                task = asyncio.ensure_future(ask(it, client, timeout_s=30))
                await wait_until(lambda: bool(it.requests), "the request has arrived")
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                assert client.connection_count == 0
                await it.lost.wait()
                await client.close()

        run(scenario)


def test_https_with_an_own_authority(run: Callable[[Scenario], None], tmp_path: Path) -> None:
    """An https instance is verified with the CA file; without it, it is not reached."""
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=x"),
            *("-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate),
        ],
        check=True,
        capture_output=True,
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)

    async def scenario() -> None:
        async with peer(answering(OK), ssl=context) as it:
            trusting = UpstreamClient(connect_timeout_s=5.0, ca_file=certificate)
            for _ in range(2):
                assert (await ask(it, trusting)).body == b"{}"
            await trusting.close()
            assert await kind_of_failure(it) is FailureKind.UNREACHABLE

    run(scenario)


@pytest.mark.parametrize(
    "sizes", [(), (0,), (3, 5), (300_000,), (10, WRITE_BYTES, 10), (1, 900_000, 2, 700_000)]
)
def test_groups_are_bounded_and_whole(sizes: tuple[int, ...]) -> None:
    """Pieces are grouped and cut to the limit, in order, with nothing copied or lost."""
    pieces = tuple(bytes([65 + number]) * size for number, size in enumerate(sizes))
    groups = list(bounded_groups(pieces, WRITE_BYTES))

    assert all(sum(map(len, group)) <= WRITE_BYTES for group in groups)
    assert b"".join(bytes(part) for group in groups for part in group) == b"".join(pieces)


def test_the_loop_turns_between_the_pieces_of_a_large_request(run: Callable[[Scenario], None]) -> None:
    """Others get their turn after each piece, also when the socket takes everything at once."""

    class Greedy(asyncio.Transport):
        """A transport that is never full."""

        def writelines(self, list_of_data: Any) -> None:
            writes.append(ticks[0])

        def is_closing(self) -> bool:
            return False

    writes: list[int] = []
    ticks = [0]

    async def scenario() -> None:
        loop = asyncio.get_running_loop()

        def tick() -> None:
            ticks[0] += 1
            loop.call_soon(tick)

        connection = Connection(memoryview(bytearray(1024)))
        connection.connection_made(Greedy())
        connection.start()
        loop.call_soon(tick)
        await connection.send(b"", (bytes(8 * WRITE_BYTES),), 8 * WRITE_BYTES)
        assert len(writes) == 8
        assert len(set(writes)) == 8

    run(scenario)
