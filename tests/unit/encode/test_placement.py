"""Placement of items on data-parallel engines: affinity, bounded load, engines that are down."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epdctl.worker.encode.placement import LOAD_FACTOR, SPARE_ITEMS, Placement, score

pytestmark = pytest.mark.unit

ALL = [True] * 4
KEYS = [f"key-{number}" for number in range(200)]


def home(key: str, serving: list[bool], avoid: int | None = None) -> int | None:
    """Return where an idle worker puts `key`."""
    return Placement(len(serving)).place(key, serving, avoid=avoid)


def test_a_key_has_one_home_and_homes_are_spread() -> None:
    """An idle worker always gives a key to the same engine, and every engine is home to its share."""
    homes = [home(key, ALL) for key in KEYS]

    assert homes == [home(key, ALL) for key in KEYS]
    assert all(30 <= homes.count(engine) <= 70 for engine in range(4))


def test_an_engine_that_is_down_moves_its_own_keys_only_and_gets_them_back() -> None:
    """Without engine 2 its keys go to all the others, no other key moves, and all come home after it."""
    before = [home(key, ALL) for key in KEYS]
    without = [home(key, [True, True, False, True]) for key in KEYS]

    assert {new for old, new in zip(before, without, strict=True) if old == 2} == {0, 1, 3}
    assert all(old == new for old, new in zip(before, without, strict=True) if old != 2)
    assert [home(key, ALL) for key in KEYS] == before


def test_keys_do_not_depend_on_how_many_engines_there_were_before() -> None:
    """A fifth engine takes keys from the four and moves none between them."""
    moved = [(home(key, ALL), home(key, [True] * 5)) for key in KEYS]

    assert all(new in (old, 4) for old, new in moved)
    assert 20 <= sum(new == 4 for _, new in moved) <= 60


def test_the_engine_that_failed_is_avoided() -> None:
    """A second try goes to the next engine in the key's order, and to nobody when there is no other."""
    first = home("k", ALL)
    second = home("k", ALL, avoid=first)

    assert second not in (None, first)
    assert second == max((e for e in range(4) if e != first), key=lambda e: score("k", e))
    assert home("k", [True], avoid=0) is None
    assert home("k", [False, False]) is None


def test_equal_keys_under_way_stay_together_whatever_the_load() -> None:
    """Identical items join the flight of the first one, far beyond the engine's share of the load."""
    placement = Placement(4)
    engines = {placement.place("same", ALL) for _ in range(50)}

    assert len(engines) == 1
    (engine,) = engines
    assert engine is not None
    for _ in range(50):
        placement.leave("same", engine)
    assert placement.loads == [0, 0, 0, 0]


def test_equal_keys_meet_again_on_the_engine_that_took_over() -> None:
    """When the engine of a key fails, all of its items go to the same other engine."""
    placement = Placement(4)
    lost = placement.place("same", ALL)
    assert placement.place("same", ALL) == lost

    serving = [engine != lost for engine in range(4)]
    assert placement.place("same", serving, avoid=lost) == placement.place("same", serving, avoid=lost)


def test_a_stuck_engine_is_given_no_more_than_its_share() -> None:
    """An engine that finishes nothing stops getting items while the others take all that come."""
    placement = Placement(2)
    for number in range(1000):
        engine = placement.place(f"k{number}", [True, True])
        if engine == 1:
            placement.leave(f"k{number}", 1)

    assert placement.loads == [SPARE_ITEMS, 0]


@given(st.lists(st.tuples(st.integers(0, 30), st.booleans()), max_size=200), st.integers(1, 5))
def test_load_is_bounded_and_counted_exactly(steps: list[tuple[int, bool]], engines: int) -> None:
    """No engine gets a new key beyond its share, and when all items have left nothing is remembered."""
    placement = Placement(engines)
    here: list[tuple[str, int]] = []
    for number, leaves in steps:
        if leaves and here:
            placement.leave(*here.pop(number % len(here)))
            continue
        key = f"k{number}"
        is_new = all(key != other for other, _ in here)
        engine = placement.place(key, [True] * engines)
        assert engine is not None
        here.append((key, engine))
        most = max(SPARE_ITEMS, LOAD_FACTOR * len(here) / engines + 1)
        assert not is_new or placement.loads[engine] <= most
    for key, engine in here:
        placement.leave(key, engine)
    assert placement.loads == [0] * engines
    assert not placement._held
