"""How many bytes of fetched media one process holds together: a count, kept while they arrive.

    budget = MediaBudget(limit_bytes=2**30)
    with budget.share() as share:       # of one request
        share.take(len(chunk))          # before the chunk is kept; refuses, never waits
        share.give(len(content))        # an item is done with; the rest goes back at the end

Rules of this file: no I/O and no waiting. Requests that waited for one another's bytes could wait for ever,
so one that finds no room is refused. Files and data URLs are read on threads: one lock around the numbers;
a read that is under way when its request ends is finished uncounted, one item for each thread at most.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from epdctl.errors import MediaUnavailable, Overloaded, ShuttingDown

FLAG = "--media-memory-bytes"


class MediaBudget:
    """The bytes that all requests of a process may hold; `held` is what they hold now."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.held = 0
        self.lock = threading.Lock()

    @contextmanager
    def share(self) -> Iterator[MediaShare]:
        """Give one request's share, and take back at the end what it still holds."""
        share = MediaShare(self)
        try:
            yield share
        finally:
            share.close()


class MediaShare:
    """What one request holds of a budget."""

    def __init__(self, budget: MediaBudget) -> None:
        self.held = 0
        self._budget = budget
        self._is_closed = False

    def take(self, nbytes: int) -> None:
        """Count `nbytes` more.

        Raises:
            MediaUnavailable: the request alone holds more than the budget, so trying again is of no use.
            Overloaded: it finds no room because of others.
            ShuttingDown: the request has ended; what is read for it now is for nobody.
        """
        budget = self._budget
        with budget.lock:
            if self._is_closed:
                raise ShuttingDown("the request has ended")
            if self.held + nbytes > budget.limit_bytes:
                text = f"the media of the request are larger together than {budget.limit_bytes} bytes"
                raise MediaUnavailable(f"{text} ({FLAG})")
            if budget.held + nbytes > budget.limit_bytes:
                text = f"the media of other requests fill the memory for them ({FLAG})"
                raise Overloaded(text, retry_after_s=1)
            self.held += nbytes
            budget.held += nbytes

    def give(self, nbytes: int) -> None:
        """Count `nbytes` as let go of, at most what is held."""
        with self._budget.lock:
            self._give(nbytes)

    def close(self) -> None:
        """Count all as let go of, and take no more."""
        with self._budget.lock:
            self._is_closed = True
            self._give(self.held)

    def _give(self, nbytes: int) -> None:
        given = min(nbytes, self.held)
        self.held -= given
        self._budget.held -= given
