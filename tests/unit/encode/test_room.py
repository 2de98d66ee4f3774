"""How long there has been no room, for which size."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epdctl.worker.encode.room import RoomWait, no_room

pytestmark = pytest.mark.unit

ARENA = 100
FOREVER = float("inf")


def test_waiting_begins_when_there_is_no_room() -> None:
    """The time an item may wait begins with its want, or with the want of room if that came later."""
    room = RoomWait(ARENA, 8.0)
    room.look(10, 50.0)

    assert room.ends_at(20, 10.0) == 58.0
    assert room.ends_at(20, 53.0) == 61.0


def test_what_there_is_room_for_does_not_wait() -> None:
    """A small item behind a large one has no end, as long as it would find room."""
    room = RoomWait(ARENA, 8.0)
    room.look(10, 50.0)

    assert room.ends_at(10, 0.0) == FOREVER


def test_a_small_item_has_waited_since_nothing_was_free_at_all() -> None:
    """Each size has a beginning of its own, though only the large item before it was tried."""
    room = RoomWait(ARENA, 8.0)
    room.look(10, 50.0)
    room.look(0, 52.0)
    room.look(4, 54.0)

    assert [room.ends_at(size, 0.0) for size in (20, 5, 3)] == [58.0, 60.0, FOREVER]


def test_room_for_it_ends_the_waiting_and_begins_it_anew() -> None:
    """Once there was room for an item, what was before does not count any more; for larger ones it does."""
    room = RoomWait(ARENA, 8.0)
    room.look(0, 50.0)
    room.look(10, 55.0)
    room.look(0, 56.0)

    assert [room.ends_at(size, 0.0) for size in (5, 20)] == [64.0, 58.0]


def test_an_empty_arena_is_not_watched() -> None:
    """With room for everything nothing is remembered."""
    room = RoomWait(ARENA, 8.0)
    room.look(0, 50.0)
    assert room.is_watching
    room.look(ARENA, 51.0)

    assert not room.is_watching
    assert room.ends_at(ARENA, 0.0) == FOREVER


@given(st.lists(st.integers(0, ARENA), min_size=1, max_size=20), st.integers(1, ARENA))
def test_it_is_the_time_of_the_first_look_after_the_last_room(reaches: list[int], size: int) -> None:
    """Whatever was seen: a size is missed since the first look after the last that had room for it."""
    room = RoomWait(ARENA, 0.0)
    for now, reach in enumerate(reaches):
        room.look(reach, float(now))
    last = max((now for now, reach in enumerate(reaches) if reach >= size), default=-1)
    is_missed = last < len(reaches) - 1

    assert room.ends_at(size, 0.0) == (last + 1 if is_missed else FOREVER)


def test_the_failure_names_what_is_full_and_what_helps() -> None:
    """429, to be tried again, with both settings."""
    error = no_room()

    assert (error.http_status, error.retry_after_s) == (429, 1)
    assert "--cache-bytes" in error.message and "--transfer-timeout" in error.message
