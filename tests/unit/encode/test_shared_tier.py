"""The shared store as a cache: what it does well, and that no failure of it gets out."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator

import pytest

from epdctl.metrics import WorkerMetrics
from epdctl.worker import duties
from epdctl.worker.encode.shared_tier import PinnedRows, SharedPolicy, SharedTier
from epdctl.worker.encode.store import PutOutcome, StoreDown, StoredValue
from epdctl.worker.encode.store_value import parse_value
from tests.stubs.process import wait_until
from tests.unit.encode.store_values import FACTS, ROWS

pytestmark = pytest.mark.unit


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
