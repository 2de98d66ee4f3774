"""The embedding cache in the arena."""

from __future__ import annotations

import random

import pytest

from epdctl.worker.encode.cache import EmbeddingCache, Entry, Facts
from epdctl.worker.transfer.arena import Arena, ArenaMisuse

pytestmark = pytest.mark.unit

FACTS = Facts(rows=1, width=4, dtype="float32", digest="d", metadata={})


def filled(cache: EmbeddingCache, key: str, nbytes: int = 256) -> Entry:
    """Return a ready, unpinned entry."""
    entry = cache.reserve(key, nbytes)
    assert entry is not None
    cache.publish(entry, FACTS)
    cache.unpin(entry)
    return entry


def test_least_recently_used_entry_makes_room() -> None:
    """A full cache gives up the entry that was used longest ago, and only that."""
    cache = EmbeddingCache(Arena(3 * 256))
    for key in "abc":
        filled(cache, key)
    cache.get("a")

    filled(cache, "d")

    assert [key for key in "abcd" if cache.get(key)] == ["a", "c", "d"]
    assert cache.evictions == 1


def test_pinned_entry_stays() -> None:
    """Bytes that a push reads are never given away, even if that means that there is no room."""
    cache = EmbeddingCache(Arena(2 * 256))
    read = filled(cache, "a")
    cache.pin(read)
    cache.pin(read)
    filled(cache, "b")

    assert cache.reserve("big", 512) is None
    cache.unpin(read)
    assert cache.reserve("big", 512) is None
    cache.unpin(read)

    assert cache.reserve("big", 512) is not None


def test_entry_that_is_filled_is_no_hit_and_no_victim() -> None:
    """Half-written rows are neither handed out nor evicted."""
    cache = EmbeddingCache(Arena(256))
    entry = cache.reserve("a", 256)

    assert entry is not None
    assert cache.get("a") is None
    assert cache.reserve("b", 256) is None


def test_failed_entry_gives_its_bytes_back() -> None:
    """An entry that is dropped while its writer holds it frees its bytes when the writer lets go."""
    arena = Arena(256)
    cache = EmbeddingCache(arena)
    entry = cache.reserve("a", 200)
    assert entry is not None

    cache.drop(entry)
    assert arena.bytes_by_state()["pinned"] == 256
    cache.unpin(entry)

    assert arena.bytes_by_state()["free"] == 256
    assert cache.reserve("a", 200) is not None


@pytest.mark.parametrize(("nbytes", "fits"), [(0, False), (1, True), (512, True), (513, False)])
def test_what_can_never_fit_is_known(nbytes: int, fits: bool) -> None:
    """An embedding larger than the whole cache is known before anything is evicted for it."""
    assert EmbeddingCache(Arena(512)).fits(nbytes) is fits


def test_bytes_are_those_of_live_entries() -> None:
    """After any history of use, the bytes counted are those of the entries that are there."""
    draw = random.Random(3)
    arena = Arena(64 * 256)
    cache = EmbeddingCache(arena)
    pinned: list[Entry] = []
    for step in range(2000):
        key = f"k{draw.randrange(40)}"
        entry = cache.get(key)
        if entry is not None and draw.random() < 0.5:
            cache.pin(entry)
            pinned.append(entry)
        elif entry is None and (new := cache.reserve(key, draw.randint(1, 4000))) is not None:
            if step % 5:
                cache.publish(new, FACTS)
            else:
                cache.drop(new)
            cache.unpin(new)
        while len(pinned) > 6:
            cache.unpin(pinned.pop(draw.randrange(len(pinned))))
        states = arena.bytes_by_state()
        assert states["used"] + states["pinned"] == cache.nbytes
    for entry in pinned:
        cache.unpin(entry)

    assert arena.bytes_by_state()["pinned"] == 0
    assert cache.evictions > 100


def test_unpinning_too_often_is_an_error() -> None:
    """An unpin without a pin is a bug that is said at once."""
    cache = EmbeddingCache(Arena(256))
    entry = filled(cache, "a")

    with pytest.raises((ValueError, ArenaMisuse)):
        cache.unpin(entry)
