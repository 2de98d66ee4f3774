"""What the engine's own decisions cost for each item, with a hundred and with ten thousand items pending.

Rules of this file: the product's classes, in the order in which the engine calls them, without tower,
sockets and threads. The two sizes take turns, and the garbage collector is out of the way.
"""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from epdctl.worker.encode.cache import EmbeddingCache, Facts
from epdctl.worker.encode.flights import AskForPixels, Flights
from epdctl.worker.encode.scheduler import BatchLimits, Scheduler
from epdctl.worker.transfer.arena import Arena

LIMITS = BatchLimits(max_tokens=8192, max_items=16)
SMALL, LARGE = 100, 10_000
ROW_BYTES = 4096
FACTS = Facts(rows=1, width=1, dtype="bfloat16", digest="", metadata={})
MUST = 2.0
Step = Callable[[], int]


def _sizes() -> Iterator[tuple[int, str]]:
    """Give rows and forward groups of items, from small pictures to some over the budget of a batch."""
    rows = itertools.cycle((64, 256, 1024, 576, 4096, 144, 2304, 64, 9000))
    groups = itertools.cycle(("a", "a", "a", "b", "a"))
    return zip(rows, groups, strict=False)


def scheduler_step(pending: int) -> Step:
    """Return what takes one batch out of a full queue and fills it up again; it gives the items handled."""
    scheduler, numbers, rows = Scheduler(LIMITS), itertools.count(), _sizes()

    def add(count: int) -> None:
        for _ in range(count):
            scheduler.add(f"key-{next(numbers)}", *next(rows))

    def step() -> int:
        taken = len(scheduler.next_batch())
        add(taken)
        return taken

    add(pending)
    return step


def whole_step(pending: int) -> Step:
    """The same with single flight, cache and arena, which is full and evicts: an item's whole way."""
    scheduler, flights, rows = Scheduler(LIMITS), Flights(pending), _sizes()
    cache = EmbeddingCache(Arena(pending * 1024 * ROW_BYTES))
    numbers = itertools.count()
    rows_of: dict[str, int] = {}

    def add(count: int) -> None:
        for _ in range(count):
            number = next(numbers)
            key = f"key-{number}"
            cache.get(key)
            flights.ask(f"call-{number}", key)
            for action in flights.admit(room=True):
                if isinstance(action, AskForPixels) and (asked := flights.arrived(action.call_id)):
                    rows_of[asked], group = next(rows)
                    scheduler.add(asked, rows_of[asked], group)

    def step() -> int:
        keys = scheduler.next_batch()
        for key in keys:
            flights.run(key)
            entry = cache.reserve(key, rows_of.pop(key) * ROW_BYTES)
            flights.land(key)
            if entry is not None:
                cache.publish(entry, FACTS)
                cache.unpin(entry)
        add(len(keys))
        return len(keys)

    add(pending)
    return step


@contextmanager
def _without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _microseconds(step: Step, items: int) -> float:
    done, began = 0, time.process_time()
    while done < items:
        done += step()
    return (time.process_time() - began) / done * 1e6


def scheduling(rounds: int = 7, items: int = 4000, large: int = LARGE) -> dict[str, Any]:
    """Return microseconds an item at both sizes, and their median ratio, for each of the two steps."""
    found = {}
    for name, make in (("scheduler", scheduler_step), ("whole way", whole_step)):
        few, many = make(SMALL), make(large)
        pairs = []
        with _without_collector():
            for number in range(rounds):
                order = (few, many) if number % 2 else (many, few)
                first, second = (_microseconds(step, items) for step in order)
                pairs.append((first, second) if number % 2 else (second, first))
        found[name] = {
            "few_us": statistics.median(pair[0] for pair in pairs),
            "many_us": statistics.median(pair[1] for pair in pairs),
            "ratio": statistics.median(pair[1] / pair[0] for pair in pairs),
        }
    return {"few": SMALL, "many": large, "steps": found}
