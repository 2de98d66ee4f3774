"""Which items wait aside since their consumer answers no reservation: the arena stays free for the others.

    parking = Parking(arena_bytes)
    parking.charge(call_id, consumer, key, nbytes, now)     # a delivery that asks its consumer for space
    parking.settle(call_id)                                 # answered, or over: the consumer, or None
    gate = BatchGate(parking, suspects)
    gate.takes(key, consumers, nbytes)                      # false: parked, no consumer may have more
    parking.release(consumer)                               # the keys that were parked for it
    parking.release_key(key)
    patience = Patience(timeout_s)
    patience.note(calls, now)                               # they wait aside now, or again
    patience.overdue(calls, now)                            # those of them that have waited for too long

A consumer may have a quarter of the arena in deliveries that it has not answered yet, and always one item; a
suspect one has one item and no more. An item that several consumers wait for is parked when none of them may
have it. Bytes that several calls of one consumer wait for count once.

Rules of this file: no clock, no I/O. Sizes are bytes, times seconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

SHARE = 0.25


@dataclass(slots=True)
class _Unanswered:
    """One embedding on its way to one consumer."""

    nbytes: int
    since: float
    calls: set[str] = field(default_factory=set)


class Parking:
    """What each consumer has not answered, and the keys that are parked."""

    def __init__(self, arena_bytes: int, *, share: float = SHARE) -> None:
        self._limit = int(arena_bytes * share)
        self._charged: dict[str, tuple[str, str]] = {}
        self._open: dict[str, dict[str, _Unanswered]] = {}
        self._parked: dict[str, frozenset[str]] = {}
        self._waiting_for: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._parked)

    def charge(self, call_id: str, consumer: str, key: str, nbytes: int, now: float) -> None:
        """`consumer` is asked for the space of `key` on behalf of a call."""
        self._charged[call_id] = (consumer, key)
        entries = self._open.setdefault(consumer, {})
        entries.setdefault(key, _Unanswered(nbytes, now)).calls.add(call_id)

    def settle(self, call_id: str) -> str | None:
        """The call's delivery was answered, or is over: return its consumer, None if that was known."""
        consumer, key = self._charged.pop(call_id, (None, ""))
        if consumer is None:
            return None
        entries = self._open[consumer]
        entries[key].calls.discard(call_id)
        if not entries[key].calls:
            del entries[key]
        if not entries:
            del self._open[consumer]
        return consumer

    def is_over(self, consumer: str, key: str, nbytes: int, *, added: int = 0, suspect: bool = False) -> bool:
        """Return whether `key` is too much for `consumer`, which has `added` beside what is charged."""
        entries = self._open.get(consumer, {})
        if key in entries and not suspect:
            return False
        taken = added + sum(entry.nbytes for entry in entries.values())
        return taken > 0 and (suspect or taken + nbytes > self._limit)

    def silent_since(self, consumer: str) -> float | None:
        """Return when the oldest question was asked that `consumer` has not answered, or None."""
        return next((entry.since for entry in self._open.get(consumer, {}).values()), None)

    def park(self, key: str, consumers: Collection[str]) -> None:
        """Let `key` wait until one of `consumers` answers or fails."""
        self._parked[key] = frozenset(consumers)
        self._waiting_for.update(self._parked[key])

    def has_parked(self, consumer: str) -> bool:
        """Return whether something is parked for `consumer`."""
        return self._waiting_for[consumer] > 0

    def keys(self) -> list[str]:
        """Return the keys that are parked."""
        return list(self._parked)

    def consumers(self) -> list[str]:
        """Return the consumers that something is parked for."""
        return [consumer for consumer, count in self._waiting_for.items() if count > 0]

    def release(self, consumer: str) -> list[str]:
        """Return the keys that were parked for `consumer`; they are parked no more."""
        if not self.has_parked(consumer):
            return []
        keys = [key for key, consumers in self._parked.items() if consumer in consumers]
        return [key for key in keys if self.release_key(key)]

    def release_key(self, key: str) -> bool:
        """`key` is parked no more; false when it was not."""
        consumers = self._parked.pop(key, None)
        if consumers is None:
            return False
        self._waiting_for.subtract(consumers)
        for consumer in consumers:
            if self._waiting_for[consumer] <= 0:
                del self._waiting_for[consumer]
        return True


class BatchGate:
    """Decides about the items of one batch, whose own bytes count as well."""

    def __init__(self, parking: Parking, suspects: Callable[[str], bool]) -> None:
        self._parking = parking
        self._suspects = suspects
        self._added: Counter[str] = Counter()

    def takes(self, key: str, consumers: Collection[str | None], nbytes: int) -> bool:
        """Return whether `key` may run now, else park it; None among `consumers` waits for no delivery."""
        named = [consumer for consumer in consumers if consumer is not None]
        if len(named) == len(consumers) and named and all(self._is_over(name, key, nbytes) for name in named):
            self._parking.park(key, named)
            return False
        for name in set(named):
            self._added[name] += nbytes
        return True

    def _is_over(self, consumer: str, key: str, nbytes: int) -> bool:
        added, suspect = self._added[consumer], self._suspects(consumer)
        return self._parking.is_over(consumer, key, nbytes, added=added, suspect=suspect)


class Patience:
    """Since when each call has waited aside; being let go on and parked again does not make it wait anew."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._since: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._since)

    def note(self, calls: Iterable[str], now: float) -> None:
        """`calls` wait aside now."""
        for call_id in calls:
            self._since.setdefault(call_id, now)

    def overdue(self, calls: Iterable[str], now: float) -> list[str]:
        """Return those of `calls`, all waiting aside now, whose time is over."""
        return [call_id for call_id in calls if now >= self._since.get(call_id, now) + self._timeout_s]

    def next_end(self) -> float:
        """Return when the time of the first call will be over; infinity when none waits."""
        return min(self._since.values(), default=float("inf")) + self._timeout_s

    def keep(self, is_open: Callable[[str], bool]) -> None:
        """Forget the calls that are over, or on their way to their consumer."""
        self._since = {call_id: since for call_id, since in self._since.items() if is_open(call_id)}
