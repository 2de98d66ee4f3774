"""The tiers in this process: what moves where, and that nothing gets lost on the way."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from epdctl.worker.encode.cache import Entry, Facts
from epdctl.worker.encode.dram import DramTier, Slot
from epdctl.worker.encode.tiers import Promotion, Stays, Tiers
from epdctl.worker.transfer.arena import Arena, Region

pytestmark = pytest.mark.unit

UNIT = 256
FACTS = Facts(rows=1, width=4, dtype="float32", digest="d", metadata={})


class World:
    """Tiers over real bytes, with a mover that copies only when it is told to."""

    def __init__(self, arena_units: int, dram_bytes: int) -> None:
        self.arena = Arena(arena_units * UNIT)
        self.memory = bytearray(self.arena.nbytes)
        self.moves: deque[tuple[bool, Callable[[], None]]] = deque()
        self.evicted = {"l1": 0, "l2": 0}
        self.tiers = Tiers(self.arena, dram_bytes, demote=self._demote, evicted=self._count)

    def _count(self, tier: str, count: int) -> None:
        self.evicted[tier] += count

    def _demote(self, slot: Slot, region: Region) -> None:
        def copy() -> None:
            slot.rows = memoryview(self.memory[region.offset : region.offset + region.nbytes])

        self.moves.append((True, copy))

    def move_one(self) -> None:
        """Let the mover do its oldest move."""
        self.moves.popleft()[1]()

    def settle(self) -> None:
        """Let the mover end every demotion, as a writer waits for before it writes."""
        while any(is_demotion for is_demotion, _ in self.moves):
            self.move_one()

    def read(self, entry: Entry) -> bytes:
        """Return the bytes of an entry."""
        return bytes(self.memory[entry.region.offset : entry.region.offset + entry.region.nbytes])

    def write(self, region: Region, rows: bytes) -> None:
        """Write into the arena."""
        self.memory[region.offset : region.offset + region.nbytes] = rows

    def encode(self, key: str, rows: bytes, *, wait: bool = True) -> Entry | None:
        """Let the tower make an embedding; return its entry, unpinned."""
        entry = self.tiers.cache.reserve(key, len(rows))
        if entry is not None:
            if wait:
                self.settle()
            self.write(entry.region, rows)
            self.tiers.cache.publish(entry, FACTS)
            self.tiers.cache.unpin(entry)
        return entry

    def promote(self, key: str, ended: Callable[[Promotion], None]) -> Promotion | Stays | None:
        """Begin a promotion; `ended` is called with it when the mover is there."""
        promotion = self.tiers.promote(key)
        if isinstance(promotion, Promotion):

            def copy() -> None:
                assert promotion.slot.rows is not None
                self.write(promotion.entry.region, bytes(promotion.slot.rows))
                self.tiers.promoted(promotion)
                ended(promotion)
                self.tiers.cache.unpin(promotion.entry)

            self.moves.append((False, copy))
        return promotion


def rows_of(key: str, units: int) -> bytes:
    """Return rows that only this key has."""
    return (key.encode() * (units * UNIT))[: units * UNIT]


def test_what_the_arena_evicts_is_found_in_memory_and_comes_back_whole() -> None:
    """An evicted embedding is promoted with its own bytes; the one it displaces is not lost either."""
    world = World(arena_units=1, dram_bytes=UNIT)
    world.encode("a", rows_of("a", 1))
    world.encode("b", rows_of("b", 1))
    assert "a" in world.tiers.dram

    world.promote("a", lambda promotion: None)
    while world.moves:
        world.move_one()

    entry = world.tiers.cache.get("a")
    assert entry is not None and world.read(entry) == rows_of("a", 1)
    slot = world.tiers.dram.get("b")
    assert slot is not None and slot.rows == rows_of("b", 1)
    assert world.evicted == {"l1": 2, "l2": 0}


def test_a_promotion_asked_for_before_the_demotion_was_copied() -> None:
    """An embedding asked for again while it is still being copied out comes back whole."""
    world = World(arena_units=1, dram_bytes=4 * UNIT)
    world.encode("a", rows_of("a", 1))
    entry = world.tiers.cache.reserve("b", UNIT)
    assert entry is not None and world.moves
    world.tiers.cache.drop(entry)
    world.tiers.cache.unpin(entry)

    world.promote("a", lambda promotion: None)
    while world.moves:
        world.move_one()

    back = world.tiers.cache.get("a")
    assert back is not None and world.read(back) == rows_of("a", 1)


def test_many_small_ones_make_room_for_a_large_one() -> None:
    """Demoting several embeddings for one keeps all of them, and the one that came back is in one tier."""
    world = World(arena_units=4, dram_bytes=8 * UNIT)
    world.encode("big", rows_of("B", 4))
    for key in "abcd":
        world.encode(key, rows_of(key, 1))
    assert "big" in world.tiers.dram

    world.promote("big", lambda promotion: None)
    while world.moves:
        world.move_one()

    assert [key for key in ("a", "b", "c", "d", "big") if key in world.tiers.dram] == list("abcd")
    assert world.tiers.dram.nbytes == 4 * UNIT
    assert world.tiers.cache.get("big") is not None


def test_a_hit_that_finds_no_room_stays_where_it_is() -> None:
    """While pushes read the whole arena nothing moves, in neither tier; afterwards the promotion succeeds."""
    world = World(arena_units=2, dram_bytes=4 * UNIT)
    world.encode("a", rows_of("a", 2))
    world.encode("b", rows_of("b", 1))
    read = world.encode("c", rows_of("c", 1))
    assert read is not None
    world.tiers.cache.pin(read)

    assert world.promote("a", lambda promotion: None) is Stays.NO_ROOM
    assert "a" in world.tiers.dram
    assert world.tiers.cache.get("b") is not None, "nothing is evicted in vain"
    world.tiers.cache.unpin(read)

    assert isinstance(world.promote("a", lambda promotion: None), Promotion)


def test_a_hit_larger_than_the_arena_is_refused_and_kept() -> None:
    """An embedding between the sizes of both tiers is not taken out: the second ask finds it too."""
    world = World(arena_units=1, dram_bytes=8 * UNIT)
    world.tiers.dram.add("large", 3 * UNIT, FACTS)

    answers = [world.promote("large", lambda promotion: None) for _ in range(2)]

    assert answers == [Stays.TOO_LARGE, Stays.TOO_LARGE]
    assert world.tiers.dram.nbytes == 3 * UNIT


def test_a_failed_copy_leaves_no_half_entry() -> None:
    """Rows that could not be copied are in no tier, and their place is free again."""
    world = World(arena_units=1, dram_bytes=UNIT)
    world.encode("a", rows_of("a", 1))
    world.encode("b", rows_of("b", 1))
    promotion = world.tiers.promote("a")
    assert isinstance(promotion, Promotion)

    world.tiers.failed(promotion)

    assert world.tiers.cache.get("a") is None and "a" not in world.tiers.dram
    assert world.arena.bytes_by_state()["free"] == UNIT


def test_without_memory_for_it_nothing_is_demoted() -> None:
    """With a budget of 0 evicted embeddings are gone, and nobody is asked to copy them."""
    world = World(arena_units=1, dram_bytes=0)
    world.encode("a", rows_of("a", 1))
    world.encode("b", rows_of("b", 1))

    assert not world.moves
    assert world.tiers.promote("a") is None


class TestDramTier:
    """The second tier alone."""

    def test_least_recently_used_makes_room(self) -> None:
        """The slot used longest ago goes, and no more than needed."""
        dram = DramTier(300)
        for key in "abc":
            dram.add(key, 100, FACTS)
        dram.get("a")

        dram.add("d", 50, FACTS)

        assert [key for key in "abcd" if key in dram] == ["a", "c", "d"]
        assert (dram.nbytes, dram.evictions) == (250, 1)

    def test_what_is_larger_than_all_of_it_evicts_nothing(self) -> None:
        """An embedding above the budget is refused before anything goes."""
        dram = DramTier(300)
        dram.add("a", 100, FACTS)

        assert dram.add("big", 301, FACTS) is None
        assert "a" in dram and dram.evictions == 0

    def test_taking_twice_counts_once(self) -> None:
        """A slot that is gone already takes no bytes along."""
        dram = DramTier(300)
        slot = dram.add("a", 100, FACTS)
        assert slot is not None
        dram.add("b", 100, FACTS)

        dram.take(slot)
        dram.take(slot)

        assert dram.nbytes == 100

    def test_a_key_again_replaces_its_slot(self) -> None:
        """A key has one slot; its bytes are counted once."""
        dram = DramTier(300)
        dram.add("a", 100, FACTS)
        dram.add("a", 200, FACTS)

        assert (len(dram), dram.nbytes) == (1, 200)


KEYS = [f"k{number}" for number in range(9)]
ARENA_UNITS = 6


class TierMachine(RuleBasedStateMachine):
    """Any order of encodes, hits, promotions, pushes and copies, with a mover that lags behind."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(ARENA_UNITS, dram_bytes=7 * UNIT)
        self.sizes = {key: 1 + number % 4 for number, key in enumerate(KEYS)}
        self.made: set[str] = set()
        """Keys that were published and have not been evicted for good, promotions under way included."""
        self.under_way: dict[str, Promotion] = {}
        self.pins: list[Entry] = []

    def _rows(self, key: str) -> bytes:
        return rows_of(key, self.sizes[key])

    def _in_arena(self, key: str) -> bool:
        return self.world.tiers.cache._entries.get(key) is not None

    def _forget_evicted(self, before: dict[str, int]) -> None:
        gone = {key for key in self.made if not self._somewhere(key)}
        assert len(gone) == self.world.evicted["l2"] - before["l2"], f"lost: {gone}"
        self.made -= gone

    def _somewhere(self, key: str) -> bool:
        return self._in_arena(key) or key in self.world.tiers.dram

    @rule(key=st.sampled_from(KEYS))
    def encode(self, key: str) -> None:
        """The tower makes an embedding that no tier has."""
        if self._somewhere(key):
            return
        before = dict(self.world.evicted)
        if self.world.encode(key, self._rows(key)) is not None:
            self.made.add(key)
        self._forget_evicted(before)

    @rule(key=st.sampled_from(KEYS))
    def hit(self, key: str) -> None:
        """A hit in the arena has the right bytes; a push pins it."""
        entry = self.world.tiers.cache.get(key)
        if entry is not None and len(self.pins) < 3:
            assert self.world.read(entry) == self._rows(key)
            self.world.tiers.cache.pin(entry)
            self.pins.append(entry)

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def push_ends(self, data: Any) -> None:
        """A push ends."""
        entry = self.pins.pop(data.draw(st.integers(0, len(self.pins) - 1)))
        assert self.world.read(entry) == self._rows(entry.key)
        self.world.tiers.cache.unpin(entry)

    @rule(key=st.sampled_from(KEYS))
    def promote(self, key: str) -> None:
        """A promotion begins, or nothing at all changes."""
        before = dict(self.world.evicted)
        image = (self.world.arena.bytes_by_state(), self.world.tiers.dram.nbytes, len(self.world.moves))
        answer = self.world.promote(key, lambda promotion: self._promoted(key))
        if isinstance(answer, Promotion):
            self.under_way[key] = answer
        else:
            after = (self.world.arena.bytes_by_state(), self.world.tiers.dram.nbytes, len(self.world.moves))
            assert after == image and self.world.evicted == before
        self._forget_evicted(before)

    def _promoted(self, key: str) -> None:
        promotion = self.under_way.pop(key)
        assert self.world.read(promotion.entry) == self._rows(key)

    @precondition(lambda self: self.world.moves)
    @rule()
    def move(self) -> None:
        """The mover does one move."""
        self.world.move_one()

    @invariant()
    def one_tier_each(self) -> None:
        """No embedding is in two tiers, and none that was made is in none."""
        for key in KEYS:
            assert not (self._in_arena(key) and key in self.world.tiers.dram)
        assert all(self._somewhere(key) for key in self.made)

    @invariant()
    def bytes_add_up(self) -> None:
        """Bytes are the sums over what is there, within the budgets."""
        cache, dram = self.world.tiers.cache, self.world.tiers.dram
        states = self.world.arena.bytes_by_state()
        entries = cache._entries.values()
        assert sum(states.values()) == ARENA_UNITS * UNIT
        assert states["used"] + states["pinned"] == sum(entry.region.size for entry in entries)
        assert cache.nbytes == sum(entry.region.size for entry in entries if entry.facts is not None)
        slots = list(dram._slots.values())
        assert dram.nbytes == sum(slot.nbytes for slot in slots) <= dram.budget
        assert all(slot.rows is None or bytes(slot.rows) == self._rows(slot.key) for slot in slots)


TierMachine.TestCase.settings = settings(
    max_examples=150, stateful_step_count=50, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestTierMachine = TierMachine.TestCase
