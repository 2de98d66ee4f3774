"""Single flight: items with the same key that are under way run once, whoever asked for them.

A call asks for a key. While lower tiers of the cache are looked through for it (`looking`), nobody is asked
for anything. Then the first call of a key owns its flight: it is asked for the pixels, once there is room
for more of them. Calls that come later wait. When the owner's pixels are there the flight is queued for the
tower; when the tower is done every call of the flight gets the embedding.

    (looking) -> wanted  -> asked -> queued -> (running) -> over
                    ^________|  the owner failed or left: the next call becomes owner and is asked

Rules of this file: no I/O, no clock; each method returns what the driver has to do. A failure of one call's
own picture fails that call alone; only the tower's failure on the item itself fails all calls of a flight.
A flight that nobody waits for is over, unless the tower runs it already, or a tier is looked through: then
its result is still cached.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum


class Phase(StrEnum):
    """Where a flight is."""

    LOOKING = "looking"
    WANTED = "wanted"
    ASKED = "asked"
    QUEUED = "queued"
    RUNNING = "running"


@dataclass(frozen=True, slots=True, kw_only=True)
class AskForPixels:
    """Tell the call's front to decode its picture and send the pixels."""

    call_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Forget:
    """Nobody wants the key any more: take it out of the queue and let go of its pixels."""

    key: str


Action = AskForPixels | Forget


@dataclass(slots=True)
class _Flight:
    key: str
    calls: OrderedDict[str, None] = field(default_factory=OrderedDict)
    owner: str | None = None
    phase: Phase = Phase.WANTED
    since: float = 0.0


class Flights:
    """All keys under way. At most `max_asked` pictures are being decoded for us at a time."""

    def __init__(self, max_asked: int) -> None:
        self._max_asked = max_asked
        self._flights: dict[str, _Flight] = {}
        self._key_of: dict[str, str] = {}
        self._wanted: deque[str] = deque()
        self._asked = 0

    def __len__(self) -> int:
        return len(self._flights)

    @property
    def calls(self) -> int:
        """How many calls wait for an embedding."""
        return len(self._key_of)

    def ask(self, call_id: str, key: str, now: float = 0.0) -> bool:
        """Let `call_id` wait for `key`, from `now` (s) on; true when the key is under way already."""
        joined = key in self._flights
        flight = self._flights.setdefault(key, _Flight(key, since=now))
        flight.calls[call_id] = None
        self._key_of[call_id] = key
        if not joined:
            self._wanted.append(key)
        return joined

    def look(self, key: str) -> None:
        """Lower tiers are looked through for `key`, just asked for, until `missed` or `land`."""
        self._flights[key].phase = Phase.LOOKING

    def missed(self, key: str) -> None:
        """No tier has `key`: its pixels are wanted now, unless nobody waits any more."""
        flight = self._flights[key]
        flight.phase = Phase.WANTED
        if flight.calls:
            self._wanted.append(key)
        else:
            del self._flights[key]

    def waiting(self, key: str) -> tuple[str, ...]:
        """Return the calls that wait for `key`."""
        flight = self._flights.get(key)
        return () if flight is None else tuple(flight.calls)

    def wanted(self) -> list[str]:
        """Return the keys whose pixels nobody was asked for yet."""
        return [key for key, flight in self._flights.items() if flight.phase is Phase.WANTED]

    def since(self, key: str) -> float:
        """Return when `key`, which is under way, was first asked for."""
        return self._flights[key].since

    def key_of(self, call_id: str) -> str | None:
        """Return the key that `call_id` waits for, or None."""
        return self._key_of.get(call_id)

    def is_running(self, call_id: str) -> bool:
        """Return whether the tower runs what `call_id` waits for."""
        key = self._key_of.get(call_id)
        return key is not None and self._flights[key].phase is Phase.RUNNING

    def admit(
        self, *, room: bool, held: Callable[[Iterable[str]], bool] = lambda calls: False
    ) -> list[Action]:
        """Return the calls to ask for pixels now; none while there is no `room` for more pixels.

        A flight whose calls are `held` keeps its place, and is looked past.
        """
        actions: list[Action] = []
        passed: list[str] = []
        while room and self._asked < self._max_asked and self._wanted:
            flight = self._flights.get(self._wanted.popleft())
            if flight is None or flight.phase is not Phase.WANTED:
                continue
            if held(flight.calls):
                passed.append(flight.key)
                continue
            flight.phase = Phase.ASKED
            flight.owner = next(iter(flight.calls))
            self._asked += 1
            actions.append(AskForPixels(call_id=flight.owner))
        self._wanted.extendleft(reversed(passed))
        return actions

    def arrived(self, call_id: str) -> str | None:
        """The pixels of `call_id` are there: return the key to queue, or None when they are not wanted."""
        flight = self._owned(call_id)
        if flight is None or flight.phase is not Phase.ASKED:
            return None
        self._asked -= 1
        flight.phase = Phase.QUEUED
        return flight.key

    def run(self, key: str) -> tuple[str, ...]:
        """The tower runs `key` now: return the calls that wait for it."""
        flight = self._flights[key]
        flight.phase = Phase.RUNNING
        return tuple(flight.calls)

    def land(self, key: str) -> tuple[str, ...]:
        """The flight of `key` is over, well or not: return the calls that waited for it."""
        flight = self._flights.pop(key, None)
        if flight is None:
            return ()
        for call_id in flight.calls:
            self._key_of.pop(call_id, None)
        return tuple(flight.calls)

    def leave(self, call_id: str) -> list[Action]:
        """`call_id` waits no longer (its front left, or its picture is no good); return what follows."""
        key = self._key_of.pop(call_id, None)
        if key is None:
            return []
        flight = self._flights[key]
        flight.calls.pop(call_id, None)
        if flight.phase is Phase.ASKED and flight.owner == call_id:
            self._asked -= 1
            self._hand_on(flight)
        if flight.calls or flight.phase in (Phase.RUNNING, Phase.LOOKING):
            return []
        del self._flights[key]
        return [Forget(key=key)] if flight.phase is Phase.QUEUED else []

    def _hand_on(self, flight: _Flight) -> None:
        """Let the next call of the flight be asked for its pixels, before anything younger."""
        flight.owner, flight.phase = None, Phase.WANTED
        if flight.calls:
            self._wanted.appendleft(flight.key)

    def _owned(self, call_id: str) -> _Flight | None:
        key = self._key_of.get(call_id)
        flight = self._flights.get(key) if key is not None else None
        return flight if flight is not None and flight.owner == call_id else None
