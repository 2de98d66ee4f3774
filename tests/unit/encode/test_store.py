"""The client of the shared store: what Mooncake's codes mean, and masters that do not answer."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest

from epdctl.worker.encode.store import PutOutcome, StoreAddress, StoreClient, StoreDown
from epdctl.worker.encode.store_value import PREFIX
from tests.unit.encode.store_values import FACTS, ROWS, value_of

pytestmark = pytest.mark.unit


class FakeMooncake:
    """A store client of the wheel with scripted codes."""

    def __init__(self) -> None:
        self.values: dict[str, bytearray] = {}
        self.setup_code = 0
        self.put_code = 0
        self.exist_code: int | None = None
        self.closed = 0

    def setup(self, *arguments: Any) -> int:
        """Take part."""
        self.arguments = arguments
        return self.setup_code

    def is_exist(self, key: str) -> int:
        """1, 0, or a negative code."""
        return int(key in self.values) if self.exist_code is None else self.exist_code

    def get_buffer(self, key: str) -> bytearray | None:
        """Return the value; None for every failure."""
        return self.values.get(key)

    def put(self, key: str, value: bytearray) -> int:
        """Keep the first value of a key."""
        if self.put_code == 0:
            self.values.setdefault(key, value)
        return self.put_code

    def remove(self, key: str, force: bool) -> int:
        """Forget a key."""
        assert force
        return 0 if self.values.pop(key, None) is not None else -704

    def close(self) -> int:
        """Leave; a closed client ends the process when it is called again."""
        self.closed += 1
        return 0


@pytest.fixture
async def master() -> AsyncIterator[int]:
    """Return the port of something that listens."""
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    yield server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()


def client_of(port: int, fake: FakeMooncake) -> StoreClient:
    """Return an unconnected client of `fake`."""
    address = StoreAddress(
        address=f"127.0.0.1:{port}", host="h", protocol="tcp", segment_bytes=3, buffer_bytes=5
    )
    return StoreClient(address, load=lambda: fake)


class TestClient:
    """What the codes of Mooncake mean."""

    async def connected(self, port: int, fake: FakeMooncake) -> StoreClient:
        """Return a connected client."""
        client = client_of(port, fake)
        await asyncio.to_thread(client.connect)
        return client

    async def test_set_up_once(self, master: int) -> None:
        """The client takes part as its settings say, and is set up once."""
        fake = FakeMooncake()
        client = await self.connected(master, fake)
        fake.setup_code = -1
        await asyncio.to_thread(client.connect)

        assert fake.arguments == ("h", "P2PHANDSHAKE", 3, 5, "tcp", "", f"127.0.0.1:{master}")

    async def test_a_value_is_read_back(self, master: int) -> None:
        """What was put under a key is what get finds."""
        client = await self.connected(master, FakeMooncake())

        assert client.put("k", value_of("k")) is PutOutcome.STORED
        found = client.get("k")

        assert found is not None and (found.facts, bytes(found.rows)) == (FACTS, ROWS)
        assert client.get("other") is None

    async def test_a_bad_value_is_a_miss_and_goes(self, master: int) -> None:
        """A value that is not right counts as absent and is removed, so that a right one can follow."""
        fake = FakeMooncake()
        client = await self.connected(master, fake)
        bad = value_of("k")
        bad[-1] ^= 1
        fake.values[PREFIX + "k"] = bad

        assert client.get("k") is None
        client.put("k", value_of("k"))
        assert client.get("k") is not None

    @pytest.mark.parametrize(
        ("code", "outcome"),
        [
            (-200, PutOutcome.FULL),
            (-600, PutOutcome.FULL),
            (-704, PutOutcome.FAILED),
            (-800, PutOutcome.FAILED),
        ],
    )
    async def test_refused_values(self, master: int, code: int, outcome: PutOutcome) -> None:
        """No space and a lost owner are about one value; the store is still there."""
        fake = FakeMooncake()
        client = await self.connected(master, fake)
        fake.put_code = code

        assert client.put("k", value_of("k")) is outcome

    @pytest.mark.parametrize("code", [-900, -901])
    async def test_a_master_that_does_not_answer(self, master: int, code: int) -> None:
        """A master that is gone or hangs is an outage for reads, writes and connecting."""
        fake = FakeMooncake()
        client = await self.connected(master, fake)
        fake.exist_code = fake.put_code = code

        for call in (lambda: client.get("k"), lambda: client.put("k", bytearray(1)), client.connect):
            with pytest.raises(StoreDown):
                await asyncio.to_thread(call)

    async def test_nobody_listens(self) -> None:
        """Without a listener Mooncake is not even loaded, which would block for seconds."""
        server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        server.close()
        await server.wait_closed()
        fake = FakeMooncake()

        with pytest.raises(StoreDown, match="nobody listens"):
            await asyncio.to_thread(client_of(port, fake).connect)
        assert not hasattr(fake, "arguments")

    async def test_a_master_that_hangs_is_left_alone(self) -> None:
        """At a master that reads nothing neither set-up nor leaving is begun: they would stop us."""
        fake = FakeMooncake()
        with socket.create_server(("127.0.0.1", 0)) as mute:
            client = client_of(mute.getsockname()[1], fake)

            with pytest.raises(StoreDown, match="does not answer"):
                await asyncio.to_thread(client.connect)
            client._store = fake
            with pytest.raises(StoreDown, match="does not answer"):
                await asyncio.to_thread(client.close)

        assert not hasattr(fake, "arguments") and fake.closed == 0

    async def test_leaving_a_master_that_answers(self, master: int) -> None:
        """A client is closed once, and never called again."""
        fake = FakeMooncake()
        client = await self.connected(master, fake)

        await asyncio.to_thread(client.close)
        await asyncio.to_thread(client.close)

        assert fake.closed == 1
        with pytest.raises(StoreDown):
            client.get("k")
