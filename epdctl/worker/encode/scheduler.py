"""Which items the next tower forward takes: first come first served, under a token and an item budget.

    scheduler = Scheduler(BatchLimits(max_tokens=8192, max_items=16))
    scheduler.add(key, tokens, group)
    scheduler.next_batch()      # keys in order of arrival, () when nothing waits
    scheduler.next_batch(takes) # what `takes(key, tokens)` refuses leaves the queue, and counts as never seen
    scheduler.put_back(items)   # a batch that could not run (no memory): in front again, same order
    scheduler.remove(key)       # nobody wants it any more

The oldest item is in every batch, alone if it is over the budget by itself; so an item waits for at most as
many batches as there were items before it. A batch holds one forward group, that of its oldest item. What
does not fit, by size or by group, is looked past, at most `look_past` items deep and at most `max_skips`
times for an item: after that nothing younger goes before it.

Rules of this file: no clock, no I/O; the same arrivals give the same batches; the cost of a batch does not
grow with the number of waiting items.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """Budgets of one forward in embedding rows and items; how far packing looks past what is too big."""

    max_tokens: int
    max_items: int
    look_past: int = 32
    max_skips: int = 4


@dataclass(slots=True)
class _Waiting:
    tokens: int
    group: str
    skips: int = 0


class Scheduler:
    """The queue of items that are ready for the tower."""

    def __init__(self, limits: BatchLimits) -> None:
        self._limits = limits
        self._waiting: OrderedDict[str, _Waiting] = OrderedDict()
        self._tokens = 0

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def waiting_tokens(self) -> int:
        """Embedding rows of all waiting items."""
        return self._tokens

    def add(self, key: str, tokens: int, group: str = "") -> None:
        """Append an item of `tokens` rows in a forward group; a key that waits already keeps its place."""
        if key not in self._waiting:
            self._waiting[key] = _Waiting(tokens, group)
            self._tokens += tokens

    def remove(self, key: str) -> bool:
        """Forget an item; false when it is not waiting."""
        item = self._waiting.pop(key, None)
        if item is None:
            return False
        self._tokens -= item.tokens
        return True

    def put_back(self, items: Iterable[tuple[str, int, str]]) -> None:
        """Put items (key, tokens, group) of a batch back to the front, in the order given."""
        for key, tokens, group in reversed(list(items)):
            self.add(key, tokens, group)
            self._waiting.move_to_end(key, last=False)

    def next_batch(self, takes: Callable[[str, int], bool] | None = None) -> tuple[str, ...]:
        """Take the items of the next forward out of the queue, and with them those that `takes` refuses."""
        chosen: list[str] = []
        refused: list[str] = []
        passed: list[_Waiting] = []
        left = self._limits.max_tokens
        group = ""
        for key, item in self._waiting.items():
            if not chosen or (item.tokens <= left and item.group == group):
                if takes is not None and not takes(key, item.tokens):
                    refused.append(key)
                    continue
                group = group if chosen else item.group
                chosen.append(key)
                left -= item.tokens
            elif item.skips >= self._limits.max_skips:
                break
            else:
                passed.append(item)
            if len(chosen) >= self._limits.max_items or len(passed) > self._limits.look_past or left <= 0:
                break
        self._count_skips(chosen, passed)
        for key in (*chosen, *refused):
            self.remove(key)
        return tuple(chosen)

    def _count_skips(self, chosen: list[str], passed: list[_Waiting]) -> None:
        """Count a skip only where a younger item went before an older one."""
        youngest = chosen[-1] if chosen else None
        for item in passed:
            if youngest is not None and self._is_before(item, youngest):
                item.skips += 1

    def _is_before(self, item: _Waiting, key: str) -> bool:
        # Both are among the first few dozen of the queue, so this is a short walk.
        for other, waiting in self._waiting.items():
            if waiting is item:
                return True
            if other == key:
                return False
        return False
