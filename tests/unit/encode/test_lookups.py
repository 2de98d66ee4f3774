"""Look-ups below the arena: promoted, waited for, or left to the tower."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from epdctl.errors import Overloaded
from epdctl.metrics import WorkerMetrics
from epdctl.worker.encode.arena_memory import HostArena
from epdctl.worker.encode.cache import Entry, Facts
from epdctl.worker.encode.lookups import LookupPolicy, Lookups, Result
from epdctl.worker.encode.mover import Mover
from epdctl.worker.encode.shared_tier import SharedPolicy, SharedTier
from epdctl.worker.encode.store import PutOutcome, StoredValue
from epdctl.worker.encode.tiers import Promotion, Stays, Tiers
from epdctl.worker.transfer.arena import Arena
from epdctl.worker.transfer.memory import HostMemory
from tests.stubs.process import wait_until

pytestmark = pytest.mark.unit

UNIT = 4096
FACTS = Facts(rows=1, width=4, dtype="float32", digest="d", metadata={})


class OneValueStore:
    """A store that has `rows` under every key."""

    def __init__(self) -> None:
        self.rows: bytes | None = None

    def connect(self) -> None:
        """It is there."""

    def get(self, key: str) -> StoredValue | None:
        """Return the value."""
        if self.rows is None:
            return None
        return StoredValue(facts=FACTS, rows=memoryview(bytearray(self.rows)))

    def put(self, key: str, value: bytearray) -> PutOutcome:
        """Take nothing."""
        return PutOutcome.FULL

    def close(self) -> None:
        """Leave."""


class Bench:
    """Look-ups over an arena of two units and memory for four."""

    def __init__(self, room_wait_s: float = 10.0) -> None:
        self.memory = HostMemory(2 * UNIT)
        self.arena = Arena(2 * UNIT)
        self.mover = Mover(HostArena(self.memory))
        self.metrics = WorkerMetrics()
        self.tiers = Tiers(self.arena, 4 * UNIT, demote=self.mover.demote, evicted=lambda tier, count: None)
        self.store = OneValueStore()
        policy = SharedPolicy(look_s=5.0)
        self.shared = SharedTier(self.store, policy, self.metrics, source=lambda key: None)
        self.fits = True
        self.results: dict[str, Result] = {}
        self.seen: dict[str, bytes] = {}
        self.lookups = Lookups(
            self.tiers,
            self.mover,
            self.shared,
            self.metrics,
            LookupPolicy(room_wait_s=room_wait_s, fits=lambda value: self.fits),
            self._found,
        )

    def _found(self, key: str, result: Result) -> None:
        assert key not in self.results, "told once"
        self.results[key] = result
        if isinstance(result, Entry):
            assert result.pins == 1
            self.seen[key] = self.bytes_of(result)

    def bytes_of(self, entry: Entry) -> bytes:
        """Return an entry's bytes."""
        return bytes(self.memory.view(entry.region.offset, entry.region.nbytes))

    async def encode(self, key: str, units: int = 1) -> Entry:
        """Put an embedding into the arena, as the tower does."""
        entry = self.tiers.cache.reserve(key, units * UNIT)
        assert entry is not None
        await self.mover.settled()
        self.memory.view(entry.region.offset, units * UNIT)[:] = key.encode() * (units * UNIT)
        self.tiers.cache.publish(entry, FACTS)
        self.tiers.cache.unpin(entry)
        return entry

    async def look(self, key: str) -> Result:
        """Begin a look-up and wait for its end."""
        assert self.lookups.begin(key)
        return await self.ended(key)

    async def ended(self, key: str) -> Result:
        """Wait for a look-up's end."""
        await wait_until(lambda: key in self.results, f"{key} is found or not", 20.0)
        return self.results[key]

    def counted(self, tier: str, result: str) -> float:
        """Return how many look-ups in `tier` ended so."""
        labels = {"tier": tier, "result": result}
        return self.metrics.registry.get_sample_value("epdctl_cache_requests_total", labels) or 0.0


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    """Return a bench with the store up, closed after the test."""
    bench = Bench()
    await bench.shared.start()
    yield bench
    await bench.lookups.close()
    await bench.shared.close()
    bench.mover.close()


async def test_a_demoted_embedding_comes_back(bench: Bench) -> None:
    """What the arena evicted is brought back with its bytes, unpinned once everybody was told."""
    for key in "abc":
        await bench.encode(key)

    found = await bench.look("a")

    assert isinstance(found, Entry) and bench.seen["a"] == b"a" * UNIT
    await wait_until(lambda: found.pins == 0, "unpinned")
    assert bench.tiers.cache.get("a") is found
    assert bench.counted("l2", "hit") == 1


async def test_a_promotion_waits_for_room(bench: Bench) -> None:
    """While pushes read the whole arena an embedding stays in memory; when one ends it is brought back."""
    await bench.encode("a", units=2)
    entries = [await bench.encode(key) for key in "bc"]
    for entry in entries:
        bench.tiers.cache.pin(entry)

    assert bench.lookups.begin("a")
    await asyncio.sleep(0)
    assert "a" in bench.tiers.dram and bench.results == {}
    for entry in entries:
        bench.tiers.cache.unpin(entry)
        bench.lookups.wake()

    assert isinstance(await bench.ended("a"), Entry)
    assert bench.seen["a"] == b"a" * 2 * UNIT


async def test_a_promotion_without_room_in_time_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """When no room comes in time the answer says so, and the embedding is still there."""
    bench = Bench(room_wait_s=0.1)
    asked = 0
    promote = bench.tiers.promote

    def counted(key: str) -> Promotion | Stays | None:
        nonlocal asked
        asked += 1
        return promote(key)

    monkeypatch.setattr(bench.tiers, "promote", counted)
    await bench.encode("a", units=2)
    for key in "bc":
        bench.tiers.cache.pin(await bench.encode(key))

    result = await bench.look("a")

    assert isinstance(result, Overloaded) and "--cache-bytes" in result.message
    assert "a" in bench.tiers.dram
    assert (bench.counted("l2", "no_room"), asked) == (1, 1)
    bench.mover.close()


async def test_the_store_is_asked_after_memory(bench: Bench) -> None:
    """What only the shared store has is brought to the arena; what nobody has is left to the tower."""
    assert await bench.look("none") is None
    bench.store.rows = b"s" * UNIT

    found = await bench.look("k")

    assert isinstance(found, Entry) and bench.seen["k"] == b"s" * UNIT
    assert bench.tiers.cache.get("k") is found
    assert [bench.counted("l3", result) for result in ("miss", "hit")] == [1, 1]
    assert bench.counted("l2", "miss") == 2


async def test_a_value_that_is_not_ours_is_left(bench: Bench) -> None:
    """A stored value of another width, type or size is not taken; the tower makes the embedding."""
    bench.store.rows = b"s" * UNIT
    bench.fits = False

    assert await bench.look("k") is None
    assert bench.arena.bytes_by_state()["free"] == 2 * UNIT


async def test_a_stored_value_larger_than_the_arena_is_left(bench: Bench) -> None:
    """A stored value that the arena cannot hold is a miss, and evicts nothing."""
    await bench.encode("a")
    bench.store.rows = b"s" * (3 * UNIT)

    assert await bench.look("k") is None
    assert bench.tiers.cache.get("a") is not None


async def test_without_lower_tiers_nothing_is_begun() -> None:
    """With neither memory nor store a look-up is not begun: the tower's path is as short as without tiers."""
    mover = Mover(HostArena(HostMemory(UNIT)))
    tiers = Tiers(Arena(UNIT), 0, demote=mover.demote, evicted=lambda tier, count: None)
    policy = LookupPolicy(room_wait_s=1, fits=lambda value: True)
    metrics = WorkerMetrics()
    lookups = Lookups(tiers, mover, None, metrics, policy, lambda key, result: None)

    assert not lookups.begin("k")
    assert metrics.registry.get_sample_value(
        "epdctl_cache_requests_total", {"tier": "l2", "result": "miss"}
    ) in (None, 0.0)
    mover.close()
