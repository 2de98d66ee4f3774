"""The shared store as a cache: what it does well, and that no failure of it gets out."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from blake3 import blake3

from epdctl.metrics import WorkerMetrics
from epdctl.worker import duties
from epdctl.worker.encode.breaker import Breaker
from epdctl.worker.encode.cache import Facts
from epdctl.worker.encode.shared_tier import PinnedRows, SharedPolicy, SharedTier
from epdctl.worker.encode.store import PutOutcome, StoreAddress, StoreClient, StoreDown, StoredValue
from epdctl.worker.encode.store_value import PREFIX, header_of, parse_value
from tests.stubs.process import wait_until

pytestmark = pytest.mark.unit

ROWS = bytes(range(64)) * 4
FACTS = Facts(
    rows=4, width=16, dtype="float32", digest=blake3(ROWS).hexdigest(), metadata={"image_grid_thw": [1, 4, 4]}
)


def value_of(key: str, rows: bytes = ROWS, facts: Facts = FACTS) -> bytearray:
    """Return a value as it lies in the store."""
    return bytearray(header_of(key, len(rows), facts) + rows)


class TestValues:
    """What counts as a value."""

    def test_a_value_gives_facts_and_rows_back(self) -> None:
        """What was written is what is read, and the rows begin at a multiple of 64 bytes."""
        value = value_of("k")

        parsed = parse_value("k", memoryview(value))

        assert parsed is not None
        facts, rows = parsed
        assert (facts, bytes(rows)) == (FACTS, ROWS)
        assert (len(value) - len(ROWS)) % 64 == 0

    def test_any_changed_byte_makes_it_no_value(self) -> None:
        """Whichever byte of a value is another one, in header or rows, it counts as absent."""
        good = value_of("k")
        for index in range(len(good)):
            bad = bytearray(good)
            bad[index] ^= 1
            assert parse_value("k", memoryview(bad)) is None, index

    @pytest.mark.parametrize("cut", [0, 5, 43, 44, 100, 300])
    def test_a_cut_value_is_none(self, cut: int) -> None:
        """A value that is cut short anywhere counts as absent."""
        assert parse_value("k", memoryview(value_of("k")[:cut])) is None

    def test_a_longer_value_is_none(self) -> None:
        """A value with bytes behind its rows counts as absent."""
        assert parse_value("k", memoryview(value_of("k") + b"x")) is None

    def test_another_keys_value_is_none(self) -> None:
        """A value that was written for another key counts as absent."""
        assert parse_value("other", memoryview(value_of("k"))) is None

    def test_odd_headers_are_none(self) -> None:
        """A header that is no JSON of ours, yet has its digest, counts as absent."""
        for text in (b"", b"[]", b'{"key": "k"}', b"\xff"):
            start = b"epdec1\0\0" + len(text).to_bytes(4, "little") + blake3(text).digest()
            assert parse_value("k", memoryview(start + text + ROWS)) is None


class TestBreaker:
    """When it is tried again."""

    def test_pauses_double_up_to_the_longest(self) -> None:
        """Each failed try doubles the pause; a success starts anew."""
        breaker = Breaker(first_s=1, most_s=5)
        breaker.succeeded()

        pauses = []
        for _ in range(5):
            breaker.failed(100.0)
            pauses.append(breaker.retry_at - 100.0)
        breaker.succeeded()
        breaker.failed(200.0)

        assert pauses == [1, 2, 4, 5, 5]
        assert breaker.retry_at == 201.0

    def test_only_changes_are_told(self) -> None:
        """Going down and coming up are told once each."""
        breaker = Breaker(first_s=1, most_s=5)

        told = [breaker.succeeded(), breaker.succeeded(), breaker.failed(0), breaker.failed(0)]

        assert told == [True, False, True, False]
        assert breaker.succeeded()


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


class FakeStore:
    """A `StoreClient` whose calls can fail or hang."""

    def __init__(self) -> None:
        self.values: dict[str, bytearray] = {}
        self.down = False
        self.outcome = PutOutcome.STORED
        self.gate = threading.Event()
        self.gate.set()
        self.calls: list[str] = []
        self.closed = False

    def _call(self, name: str) -> None:
        self.calls.append(name)
        self.gate.wait(20)
        if self.down:
            raise StoreDown("scripted")

    def connect(self) -> None:
        """Connect."""
        self._call("connect")

    def get(self, key: str) -> StoredValue | None:
        """Look up."""
        self._call("get")
        parsed = parse_value(key, memoryview(self.values[key])) if key in self.values else None
        return StoredValue(facts=parsed[0], rows=parsed[1]) if parsed else None

    def put(self, key: str, value: bytearray) -> PutOutcome:
        """Publish."""
        self._call("put")
        if self.outcome is PutOutcome.STORED:
            self.values[key] = value
        return self.outcome

    def close(self) -> None:
        """Leave."""
        self.closed = True


POLICY = SharedPolicy(
    look_s=0.2, publish_s=0.2, first_connect_s=5, close_s=5, backlog=3, retry_first_s=0.05, retry_most_s=0.1
)


class Bench:
    """A shared tier over a `FakeStore`, with arena rows of `ROWS` for every key."""

    def __init__(self) -> None:
        self.store = FakeStore()
        self.metrics = WorkerMetrics()
        self.pins = 0
        self.most_pins = 0
        self.in_arena = True
        self.shared = SharedTier(self.store, POLICY, self.metrics, self._pin)

    def _pin(self, key: str) -> PinnedRows | None:
        if not self.in_arena:
            return None
        self.pins += 1
        self.most_pins = max(self.pins, self.most_pins)
        return PinnedRows(facts=FACTS, nbytes=len(ROWS), parts=self._parts(), release=self._release)

    def _parts(self) -> Iterator[memoryview]:
        """Give the rows through one small buffer, as an arena on a device does."""
        buffer = memoryview(bytearray(100))
        for at in range(0, len(ROWS), 100):
            piece = ROWS[at : at + 100]
            buffer[: len(piece)] = piece
            yield buffer[: len(piece)]

    def _release(self) -> None:
        self.pins -= 1

    def published(self, outcome: str) -> float:
        """Return how many publications ended so."""
        value = self.metrics.registry.get_sample_value(
            "epdctl_store_publications_total", {"outcome": outcome}
        )
        return value or 0.0

    def looked(self, result: str) -> float:
        """Return how many look-ups ended so."""
        labels = {"tier": "l3", "result": result}
        return self.metrics.registry.get_sample_value("epdctl_cache_requests_total", labels) or 0.0


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    """Return a bench that is not started; it is closed after the test."""
    bench = Bench()
    yield bench
    bench.store.gate.set()
    await bench.shared.close()


async def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for a condition."""
    await wait_until(condition, what, 20.0)


class TestSharedTier:
    """The tier: look-ups, publications, outages."""

    async def test_what_one_publishes_another_finds(self, bench: Bench) -> None:
        """A published embedding is found with its facts and rows; its arena memory is not held any more."""
        await bench.shared.start()

        bench.shared.publish("k")
        await until(lambda: bench.published("stored") == 1, "published")
        found = await bench.shared.look("k")

        assert found is not None and (found.facts, bytes(found.rows)) == (FACTS, ROWS)
        assert await bench.shared.look("other") is None
        assert (bench.looked("hit"), bench.looked("miss"), bench.pins) == (1, 1, 0)

    async def test_a_bug_in_a_publication_costs_that_one(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What the store's client raises without a name is logged, and later embeddings are published."""
        monkeypatch.setattr(duties, "REPEAT_PAUSE_S", 0.01)
        await bench.shared.start()
        with monkeypatch.context() as patched:
            patched.setattr(bench.store, "_call", lambda name: 1 / 0)
            bench.shared.publish("lost")
            await until(lambda: not bench.shared._backlog and bench.pins == 0, "it was tried")

        bench.shared.publish("k")
        await until(lambda: bench.published("stored") == 1, "published")

    async def test_a_hanging_store_costs_one_deadline(self, bench: Bench) -> None:
        """The first look-up waits for its deadline, the next ones do not; the store comes back by itself."""
        await bench.shared.start()
        loop = asyncio.get_running_loop()
        bench.store.gate.clear()

        assert await bench.shared.look("a") is None
        begun = loop.time()
        for _ in range(100):
            assert await bench.shared.look("b") is None
        assert loop.time() - begun < POLICY.look_s
        assert (bench.looked("late"), bench.looked("skipped")) == (1, 100)

        bench.store.gate.set()
        await until(lambda: bench.shared.is_up, "up again")

    async def test_waiting_behind_others_is_no_outage(self, bench: Bench) -> None:
        """A look-up that was late because another one was slow does not take the store down by itself."""
        await bench.shared.start()
        bench.store.gate.clear()
        hold = bench.shared._reading.submit(bench.store.gate.wait, 20)

        assert await bench.shared.look("a") is None

        assert bench.shared.is_up
        bench.store.gate.set()
        await hold.future

    async def test_a_store_that_is_not_there_at_the_start(self, bench: Bench) -> None:
        """Without a store the start goes on and nothing is asked of it; it joins when it comes."""
        bench.store.down = True
        await bench.shared.start()

        assert await bench.shared.look("k") is None
        bench.shared.publish("k")
        assert (bench.looked("skipped"), bench.published("skipped")) == (1, 1)
        assert "get" not in bench.store.calls and "put" not in bench.store.calls

        bench.store.down = False
        await until(lambda: bench.shared.is_up, "up")
        bench.shared.publish("k")
        await until(lambda: bench.published("stored") == 1, "published")

    async def test_an_outage_in_the_middle(self, bench: Bench) -> None:
        """A failing look-up is a miss and takes the store down until it answers again."""
        await bench.shared.start()
        bench.store.down = True

        assert await bench.shared.look("k") is None
        assert not bench.shared.is_up and bench.looked("failed") == 1

        bench.store.down = False
        await until(lambda: bench.shared.is_up, "up again")

    async def test_the_backlog_is_bounded_and_pins_nothing(self, bench: Bench) -> None:
        """While one publication hangs only so many wait, more are dropped and counted, and none is pinned."""
        await bench.shared.start()
        bench.store.gate.clear()
        bench.shared.publish("first")
        await until(lambda: "put" in bench.store.calls, "a publication under way")

        for number in range(5):
            bench.shared.publish(f"k{number}")

        assert (bench.published("dropped"), bench.pins, bench.most_pins) == (2, 0, 1)

    async def test_a_hanging_publication_ends_in_an_outage(self, bench: Bench) -> None:
        """A publication without an end is counted as late, and the waiting ones are skipped."""
        await bench.shared.start()
        bench.store.gate.clear()

        bench.shared.publish("a")
        await until(lambda: "put" in bench.store.calls, "a publication under way")
        bench.shared.publish("b")
        await until(lambda: bench.published("skipped") == 1, "the next is skipped")

        assert bench.published("late") == 1

    async def test_a_full_store_is_no_outage(self, bench: Bench) -> None:
        """A store without space loses the publication and nothing else."""
        await bench.shared.start()
        bench.store.outcome = PutOutcome.FULL

        bench.shared.publish("k")
        await until(lambda: bench.published("full") == 1, "refused")

        assert bench.shared.is_up

    async def test_what_left_the_arena_is_not_published(self, bench: Bench) -> None:
        """An embedding that was evicted before its turn is counted and nothing is sent."""
        await bench.shared.start()
        bench.in_arena = False

        bench.shared.publish("k")
        await until(lambda: bench.published("evicted") == 1, "skipped")

        assert "put" not in bench.store.calls

    async def test_a_store_that_answers_is_left_orderly(self, bench: Bench) -> None:
        """Closing leaves a store that is up, within its deadline; one that hangs is not waited for."""
        await bench.shared.start()

        await bench.shared.close()

        assert bench.store.closed
