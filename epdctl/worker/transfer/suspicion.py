"""Whether a consumer that did not answer lately is asked again now.

    suspicion = Suspicion()
    suspicion.silent(now)       # it let a question go unanswered until the end
    suspicion.is_held(now)      # whether nothing may be asked now
    suspicion.ask(now)          # the same, and notes that it is asked if it may be
    suspicion.heard()           # an answer

While a consumer is suspect one item a second is let through to it, to find out; all others fail at once.
Rules of this file: no clock, no I/O. Times are seconds of one monotonic clock.
"""

from __future__ import annotations

PROBE_EVERY_S = 1.0
FORGET_AFTER_S = 5.0
"""So long after its last silence a consumer is asked like any other: a burst is not failed for old news."""


class Suspicion:
    """What one consumer's silence says about asking it now."""

    def __init__(self) -> None:
        self._silent_at: float | None = None
        self._probe_at = 0.0

    def silent(self, now: float) -> None:
        """The consumer did not answer in time."""
        if self._silent_at is None:
            self._probe_at = now + PROBE_EVERY_S
        self._silent_at = now

    def heard(self) -> None:
        """The consumer answered: it is not suspect any more."""
        self._silent_at = None

    def is_suspect(self, now: float) -> bool:
        """Return whether its last silence is recent, with no answer since."""
        return self._silent_at is not None and now < self._silent_at + FORGET_AFTER_S

    def is_held(self, now: float) -> bool:
        """Return whether it is suspect and the next probe is not due."""
        return self.is_suspect(now) and now < self._probe_at

    def ask(self, now: float) -> bool:
        """Return whether it may be asked now; while it is suspect that takes the probe of this second."""
        if self.is_held(now):
            return False
        if self.is_suspect(now):
            self._probe_at = now + PROBE_EVERY_S
        else:
            self._silent_at = None
        return True
