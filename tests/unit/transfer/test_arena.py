"""Claims about the arena."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from epdctl.worker.transfer.arena import ALIGNMENT, Arena, ArenaMisuse, Region

pytestmark = pytest.mark.unit


def region(arena: Arena, nbytes: int) -> Region:
    """Return a region that must be there."""
    allocated = arena.allocate(nbytes)
    assert allocated is not None
    return allocated


class TestAllocation:
    """Where regions are placed."""

    def test_regions_are_aligned_and_rounded_up(self) -> None:
        """A region starts at a multiple of 256 and takes a multiple of 256."""
        arena = Arena(4096)

        first, second = region(arena, 1), region(arena, 257)

        assert [(r.offset, r.size) for r in (first, second)] == [(0, 256), (256, 512)]

    def test_the_smallest_sufficient_gap_is_used(self) -> None:
        """A small item does not break up the gap that a large one needs."""
        arena = Arena(256 * 10)
        regions = [region(arena, 256) for _ in range(10)]
        for index in (0, 1, 2, 5):
            arena.free(regions[index])

        assert region(arena, 10).offset == 256 * 5

    def test_no_room_is_none_and_changes_nothing(self) -> None:
        """An allocation that does not fit leaves the arena as it was."""
        arena = Arena(1024)
        region(arena, 512)
        before = arena.bytes_by_state()

        assert arena.allocate(768) is None
        assert before == arena.bytes_by_state()

    def test_freed_neighbours_become_one_gap(self) -> None:
        """Regions freed in any order leave one gap as large as all of them."""
        for order in ((0, 1, 2), (2, 1, 0), (0, 2, 1), (1, 0, 2)):
            arena = Arena(768)
            regions = [region(arena, 256) for _ in range(3)]
            for index in order:
                arena.free(regions[index])

            assert arena.largest_gap == 768

    @pytest.mark.parametrize("nbytes", [0, -1])
    def test_sizes_below_one_are_refused(self, nbytes: int) -> None:
        """Nothing can be allocated with zero or negative size."""
        arena = Arena(1024)

        with pytest.raises(ValueError, match="at least one byte"):
            arena.allocate(nbytes)

    def test_an_arena_has_room_for_one_region_at_least(self) -> None:
        """An arena that could hold nothing is refused when it is made."""
        with pytest.raises(ValueError, match="at least 256"):
            Arena(ALIGNMENT - 1)


class TestMisuse:
    """What is refused."""

    def test_a_region_is_freed_once(self) -> None:
        """Freeing a region twice is an error."""
        arena = Arena(1024)
        taken = region(arena, 10)
        arena.free(taken)

        with pytest.raises(ArenaMisuse):
            arena.free(taken)

    def test_a_stale_region_does_not_free_its_successor(self) -> None:
        """A region whose place was given away again cannot free it there."""
        arena = Arena(256)
        stale = region(arena, 10)
        arena.free(stale)
        region(arena, 10)

        with pytest.raises(ArenaMisuse):
            arena.free(stale)
        assert arena.bytes_by_state()["used"] == 256

    def test_a_pinned_region_is_not_freed(self) -> None:
        """Bytes that somebody reads or writes stay allocated until the last pin is gone."""
        arena = Arena(256)
        taken = region(arena, 10)
        arena.pin(taken)
        arena.pin(taken)
        arena.unpin(taken)

        with pytest.raises(ArenaMisuse):
            arena.free(taken)
        arena.unpin(taken)
        arena.free(taken)
        assert arena.bytes_by_state()["free"] == 256

    def test_unpinning_what_is_not_pinned_is_an_error(self) -> None:
        """Pins are counted exactly."""
        arena = Arena(256)

        with pytest.raises(ArenaMisuse):
            arena.unpin(region(arena, 10))

    def test_a_quarantined_region_is_neither_pinned_nor_reused(self) -> None:
        """A region in quarantine belongs to nobody until it is freed."""
        arena = Arena(256)
        taken = region(arena, 10)
        arena.quarantine(taken)

        with pytest.raises(ArenaMisuse):
            arena.pin(taken)
        assert arena.allocate(1) is None
        arena.free(taken)
        assert arena.allocate(1) is not None


def test_bytes_always_add_up_and_regions_never_overlap() -> None:
    """Over 20,000 random steps no byte is given out twice, none is lost, and all states add up."""
    chance = random.Random(7)
    arena = Arena(1 << 18)
    live: list[Region] = []
    pinned: list[Region] = []
    for _ in range(20_000):
        step = chance.random()
        if step < 0.45:
            taken = arena.allocate(chance.randint(1, 9000))
            if taken is not None:
                live.append(taken)
        elif step < 0.55 and live:
            pinned.append(chance.choice(live))
            arena.pin(pinned[-1])
        elif step < 0.65 and pinned:
            arena.unpin(pinned.pop(chance.randrange(len(pinned))))
        elif live:
            victim = chance.choice(live)
            if not arena.pins(victim):
                live.remove(victim)
                arena.free(victim)
        assert arena.nbytes == sum(arena.bytes_by_state().values())
    spans = sorted((taken.offset, taken.offset + taken.size) for taken in live)

    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    assert sum(taken.size for taken in live) == arena.nbytes - arena.bytes_by_state()["free"]


def test_room_can_be_made_only_where_nobody_reads_or_writes() -> None:
    """What could be allocated once all that is unpinned is freed ends at pinned regions, and at those that a
    late write may still hit."""
    arena = Arena(8 * ALIGNMENT)
    regions = [arena.allocate(ALIGNMENT) for _ in range(8)]
    reaches = [arena.largest_reach()]
    for number, change in ((2, arena.pin), (5, arena.quarantine), (2, arena.unpin), (5, arena.free)):
        region = regions[number]
        assert region is not None
        change(region)
        reaches.append(arena.largest_reach())

    assert [reach // ALIGNMENT for reach in reaches] == [8, 5, 2, 5, 8]
