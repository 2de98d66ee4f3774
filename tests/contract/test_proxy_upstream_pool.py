"""Connections that the client for instances keeps, against peers that answer with any bytes."""

from __future__ import annotations

import socket
from collections.abc import Callable

import pytest

from epdctl.domain import InstanceUrl
from epdctl.proxy.upstream import UpstreamClient
from tests.contract.calls import CHAT, OK, Scenario, ask
from tests.contract.scripted import Peer, Reader, Writer, answering, peer, reset, wait_for_end
from tests.stubs.process import wait_until

pytestmark = pytest.mark.contract


class TestPool:
    """Connections that are used again."""

    def test_a_connection_is_used_again(self, run: Callable[[Scenario], None]) -> None:
        """One connection serves calls one after another."""

        async def scenario() -> None:
            async with peer(answering(OK)) as it:
                client = UpstreamClient(connect_timeout_s=1.0)
                for _ in range(3):
                    await ask(it, client)
                assert (it.connections, len(it.requests), client.connection_count) == (1, 3, 1)
                await client.close()
                assert client.connection_count == 0

        run(scenario)

    @pytest.mark.parametrize(
        "answer",
        [
            b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\n{}",
            b"HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\n{}",
            OK + OK,
            OK + b"x",
        ],
    )
    def test_a_connection_that_may_not_be_used_again(
        self, run: Callable[[Scenario], None], answer: bytes
    ) -> None:
        """Closing, old HTTP, and bytes behind the answer: the next call has a fresh connection."""

        async def scenario() -> None:
            async with peer(answering(answer)) as it:
                client = UpstreamClient(connect_timeout_s=1.0)
                for _ in range(2):
                    assert (await ask(it, client)).body == b"{}"
                assert it.connections == 2
                await client.close()

        run(scenario)

    def test_a_reset_on_an_idle_connection_is_repeated_once(self, run: Callable[[Scenario], None]) -> None:
        """A server that closed at the moment of reuse costs nothing but a new connection."""

        async def closes_the_second(it: Peer, reader: Reader, writer: Writer) -> None:
            await it.read_request(reader)
            writer.write(OK)
            if it.connections == 1:
                await reader.readuntil(b"\r\n\r\n")
                reset(writer)
            else:
                await wait_for_end(reader)

        async def scenario() -> None:
            async with peer(closes_the_second) as it:
                client = UpstreamClient(connect_timeout_s=1.0)
                await ask(it, client)
                assert (await ask(it, client)).body == b"{}"
                assert (it.connections, len(it.requests)) == (2, 2)
                await client.close()

        run(scenario)

    def test_a_connection_that_the_server_closed_is_not_used(self, run: Callable[[Scenario], None]) -> None:
        """A FIN that has arrived is seen before the connection is handed out."""

        async def scenario() -> None:
            async with peer(answering(OK, closes=True)) as it:
                client = UpstreamClient(connect_timeout_s=1.0)
                for _ in range(3):
                    assert (await ask(it, client)).body == b"{}"
                    await wait_until(lambda: not client.open_count, "the FIN has arrived")
                assert len(it.requests) == 3
                await client.close()

        run(scenario)

    def test_an_idle_connection_is_given_up_before_the_server_does(
        self, run: Callable[[Scenario], None]
    ) -> None:
        """A server that says it keeps connections for a second never sees an older one from us."""
        answer = b"HTTP/1.1 200 OK\r\nkeep-alive: timeout=1\r\ncontent-length: 2\r\n\r\n{}"

        async def scenario() -> None:
            async with peer(answering(answer)) as it:
                client = UpstreamClient(connect_timeout_s=1.0)
                await ask(it, client)
                await it.lost.wait()
                assert client.connection_count == 0
                await client.close()

        run(scenario)

    def test_delays_of_small_packets_are_off(self, run: Callable[[Scenario], None]) -> None:
        """TCP_NODELAY is set: a token does not wait for an acknowledgement."""

        async def scenario() -> None:
            async with peer(answering(OK)) as it:
                client = UpstreamClient(connect_timeout_s=1.0)
                opened = await client.open(InstanceUrl(it.url), CHAT, timeout_s=5)
                transport = opened._connection._transport
                sock = transport.get_extra_info("socket")
                assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
                opened.close()
                await client.close()

        run(scenario)
