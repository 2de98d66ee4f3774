"""How long what is to be written into the arena has found no room there.

    room = RoomWait(arena_bytes, timeout_s)
    room.look(reach, now)           # the largest item that finds room now; wanted again while `is_watching`
    room.ends_at(nbytes, since)     # when an item of `nbytes`, wanted since then, has waited for too long
    no_room()                       # what its call is told

An item waits for room only while there is none for it: not while the tower runs others, nor while those
before it get theirs. For how long there was none is known for every size, whichever item was tried.

Rules of this file: no clock, no I/O. Sizes are bytes, times seconds.
"""

from __future__ import annotations

from epdctl.errors import Overloaded


class RoomWait:
    """Since when there is no room, by size."""

    def __init__(self, arena_bytes: int, timeout_s: float) -> None:
        self._arena_bytes = arena_bytes
        self._timeout_s = timeout_s
        self._most_since: list[tuple[int, float]] = []
        """The largest reach that was seen since a time; the later, the smaller."""

    @property
    def is_watching(self) -> bool:
        """Whether there was no room for something, as far as is known."""
        return bool(self._most_since)

    def look(self, reach: int, now: float) -> None:
        """An item of `reach` finds room now, and none that is larger."""
        if reach >= self._arena_bytes:
            self._most_since = []
            return
        raised = [since for most, since in self._most_since if most <= reach]
        larger = [(most, since) for most, since in self._most_since if most > reach]
        self._most_since = [*larger, (reach, min(raised, default=now))]

    def ends_at(self, nbytes: int, since: float) -> float:
        """Return when an item of `nbytes`, wanted since `since`, has had no room for too long."""
        missed = min((begun for most, begun in self._most_since if most < nbytes), default=float("inf"))
        return max(since, missed) + self._timeout_s


def no_room() -> Overloaded:
    """Return the failure of an item that has waited for arena space for too long."""
    text = (
        "the memory that embeddings are sent from had no room for this one in time, for all those that are on"
    )
    cure = "their way to consumers: raise --cache-bytes, or wait longer for them (--transfer-timeout)"
    return Overloaded(f"{text} {cure}", retry_after_s=1)
