"""Stop strings in text that arrives in pieces.

Rules of this file: text that may still turn out to be the beginning of a stop string is held back, nothing
else is; so no part of a stop string is ever given out, and no other text waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """`text` that may go out, and the stop string found behind it, if any."""

    text: str
    stop: str | None = None


class StopMatcher:
    """Watches one choice's text for its stop strings."""

    def __init__(self, stops: Sequence[str], *, keep: bool = False) -> None:
        """With `keep` a stop string that was found stays at the end of the text."""
        self._stops = tuple(stops)
        self._keep = keep
        self._held = ""

    def push(self, text: str) -> Cut:
        """Take more text; after a cut with a stop nothing more is to be pushed."""
        pending = self._held + text
        found = _first_stop(pending, self._stops)
        if found is not None:
            start, stop = found
            self._held = ""
            return Cut(text=pending[: start + len(stop) if self._keep else start], stop=stop)
        free = len(pending) - _held_length(pending, self._stops)
        self._held = pending[free:]
        return Cut(text=pending[:free])

    def flush(self) -> str:
        """Return what was held back: the text has ended, so it was no stop string."""
        held, self._held = self._held, ""
        return held


def _first_stop(text: str, stops: Sequence[str]) -> tuple[int, str] | None:
    """Return where the stop string that is complete first starts, and which one it is.

    Two that end at the same place: the one that starts first, so that none of it remains.
    """
    found = [(text.find(stop), stop) for stop in stops]
    hits = [(start + len(stop), start, stop) for start, stop in found if start >= 0]
    return min(hits)[1:] if hits else None


def _held_length(text: str, stops: Sequence[str]) -> int:
    """Return the length of the longest end of `text` that begins a stop string."""
    longest = max((len(stop) for stop in stops), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        tail = text[-length:]
        if any(stop.startswith(tail) for stop in stops):
            return length
    return 0
