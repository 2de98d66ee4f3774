"""Keeps the items of a consumer that does not answer out of the way of all others, and ends them in time.

    standby = Standby(parking, silence, events, policy)
    standby.new_gate()                  # for one batch: which items may run
    standby.refusal(consumer)           # why nothing more is taken for a consumer now, or None
    standby.holds(call_id, ask, nbytes) # a cache hit has to wait: its consumer has enough of the arena
    standby.is_held(consumers)          # whether pixels for these consumers would only be parked
    standby.settled(consumer)           # it answered, or a delivery to it is over
    standby.changed(key)                # a call joined or left the item's flight
    standby.parked()                    # the gate parked something

Rules of this file: who is parked is decided in `parking`, who is suspect in the sender. What follows from an
answer is done in the next turn of the loop, once for all answers of this one. What waits here has an end,
whatever its call is answered for: it fails when it has waited aside for `timeout_s` in all, and where an item
fails with its delivery, also `timeout_s` after the first question that its consumer has left unanswered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Protocol

from epdctl.errors import EpdError
from epdctl.worker.encode.messages import Ask
from epdctl.worker.encode.parking import BatchGate, Parking, Patience
from epdctl.worker.transfer.sender import silence

_CHECK_S = 0.25


class Silence(Protocol):
    """What is known of consumers that failed to answer."""

    def is_suspect(self, consumer_zmq: str) -> bool:
        """Whether it lately failed to answer, and has not answered since."""
        ...

    def is_held(self, consumer_zmq: str) -> bool:
        """Whether it is not to be asked now for that reason."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StandbyEvents:
    """`consumers_of` a key's calls (None: no delivery); `unpark` keys; `fail` what waits for a consumer;
    `ask_again` a cache hit that was held; `admit`: pixels may be asked for again; `waiting`: the calls of the
    parked keys given, and those whose pixels are not asked for because of them; `is_waiting`: whether a call
    is neither over nor being delivered; `give_up` calls that have waited for too long."""

    consumers_of: Callable[[str], Collection[str | None]]
    unpark: Callable[[Iterable[str]], None]
    fail: Callable[[str, EpdError], None]
    ask_again: Callable[[str, Ask], None]
    admit: Callable[[], None]
    waiting: Callable[[Iterable[str]], Collection[str]]
    is_waiting: Callable[[str], bool]
    give_up: Callable[[Collection[str], EpdError], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class StandbyPolicy:
    """`fails`: whether an item fails with its delivery; otherwise its call only wants it encoded."""

    timeout_s: float
    fails: bool


class Standby:
    """See the module."""

    def __init__(
        self, parking: Parking, silence: Silence, events: StandbyEvents, policy: StandbyPolicy
    ) -> None:
        self._parking = parking
        self._silence = silence
        self._events = events
        self._policy = policy
        self._patience = Patience(policy.timeout_s)
        self._hits: dict[str, Ask] = {}
        self._settled: dict[str, None] = {}
        self._timer: asyncio.TimerHandle | None = None

    def new_gate(self) -> Callable[[str, int], bool]:
        """Return what says of one batch's items (key, bytes) whether they may run, and parks the others."""
        gate = BatchGate(self._parking, self._silence.is_suspect)
        return lambda key, nbytes: gate.takes(key, self._events.consumers_of(key), nbytes)

    def refusal(self, consumer: str | None) -> EpdError | None:
        """Return why an item for `consumer` fails at once, or None."""
        if consumer is None or not self._policy.fails or not self._silence.is_held(consumer):
            return None
        return silence()

    def holds(self, call_id: str, ask: Ask, consumer: str | None, nbytes: int) -> bool:
        """Return whether a cache hit has to wait; it is kept until it is asked for again, or is over."""
        if consumer is None:
            return False
        suspect = self._silence.is_suspect(consumer)
        if not self._parking.is_over(consumer, ask.key, nbytes, suspect=suspect):
            return False
        self._hits[call_id] = ask
        self._patience.note([call_id], asyncio.get_running_loop().time())
        self._check_suspects([consumer])
        self._watch()
        return True

    def left(self, call_id: str) -> None:
        """The call is over: a hit that was held for it is not."""
        self._hits.pop(call_id, None)

    def is_held(self, consumers: Collection[str | None]) -> bool:
        """Return whether an item for `consumers` would only be parked, as others of theirs are already."""
        return all(name is not None and self._parking.has_parked(name) for name in consumers)

    def changed(self, key: str) -> None:
        """Other calls than before wait for `key`: whether it may run is asked again."""
        if self._parking.release_key(key):
            self._events.unpark([key])

    def parked(self) -> None:
        """See to it that what was parked just now has an end."""
        self._patience.note(self._waiting(), asyncio.get_running_loop().time())
        self._check_suspects(self._parking.consumers())
        self._watch()
        asyncio.get_running_loop().call_soon(self._events.admit)

    def settled(self, consumer: str) -> None:
        """`consumer` answered, or failed to: what waits for that goes on, or fails, in the next turn."""
        if not self._settled:
            asyncio.get_running_loop().call_soon(self._go_on)
        self._settled[consumer] = None

    def close(self) -> None:
        """Watch nothing any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check_suspects(self, consumers: Iterable[str]) -> None:
        for consumer in consumers:
            if self._policy.fails and self._silence.is_suspect(consumer):
                self.settled(consumer)

    def _go_on(self) -> None:
        consumers, self._settled = list(self._settled), {}
        for consumer in consumers:
            if self._policy.fails and self._silence.is_suspect(consumer):
                self._events.fail(consumer, silence())
            self._events.unpark(self._parking.release(consumer))
            for call_id in [name for name, ask in self._hits.items() if ask.consumer_zmq == consumer]:
                self._events.ask_again(call_id, self._hits.pop(call_id))
        self._events.admit()

    def _waiting(self) -> list[str]:
        """Return the calls that wait aside now."""
        return [*self._hits, *self._events.waiting(self._parking.keys())]

    def _watch(self) -> None:
        if self._timer is None:
            loop = asyncio.get_running_loop()
            left_s = self._patience.next_end() - loop.time()
            self._timer = loop.call_later(left_s if 0 < left_s < _CHECK_S else _CHECK_S, self._check)

    def _end_overdue(self, now: float) -> None:
        waiting = self._waiting()
        self._patience.note(waiting, now)
        overdue = self._patience.overdue(waiting, now)
        if overdue:
            self._events.give_up(overdue, silence())
            self._events.admit()
        self._patience.keep(self._events.is_waiting)

    def _check(self) -> None:
        self._timer = None
        now = asyncio.get_running_loop().time()
        held = (ask.consumer_zmq for ask in self._hits.values() if ask.consumer_zmq is not None)
        for consumer in {*self._parking.consumers(), *held}:
            since = self._parking.silent_since(consumer)
            if since is None:
                self.settled(consumer)
            elif self._policy.fails and now - since >= self._policy.timeout_s:
                self._events.fail(consumer, silence())
        self._end_overdue(now)
        if len(self._parking) or self._hits or len(self._patience):
            self._watch()
