"""When something that failed is tried again.

    breaker = Breaker(first_s=0.5, most_s=30)
    breaker.failed(now)       # true: it was up until now
    breaker.succeeded()       # true: it was down until now
    breaker.retry_at          # while it is down: the time of the next try

Rules of this file: no clock, no I/O; times are seconds of the caller's clock.
"""

from __future__ import annotations


class Breaker:
    """Starts down, to be tried at once. Each failed try doubles the pause, from `first_s` to `most_s`."""

    def __init__(self, *, first_s: float, most_s: float) -> None:
        self._first_s = first_s
        self._most_s = most_s
        self._tries = 0
        self.is_up = False
        self.retry_at = 0.0

    def failed(self, now: float) -> bool:
        """Take it down, or count one more failed try; return whether it was up."""
        was_up, self.is_up = self.is_up, False
        self._tries = 1 if was_up else self._tries + 1
        self.retry_at = now + min(self._most_s, self._first_s * 2 ** min(self._tries - 1, 16))
        return was_up

    def succeeded(self) -> bool:
        """It works; return whether it was down."""
        was_up, self.is_up = self.is_up, True
        self._tries = 0
        return not was_up
