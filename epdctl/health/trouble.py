"""Is it them, or is it us?

Rules of this file: pure; `now` is handed in. When many instances on several hosts fail at once and nobody
succeeds, our own network is the likelier culprit. Evictions are then held for one window, once, until
somebody succeeds again: a fleet that is really gone is evicted one window late.
"""

from __future__ import annotations

from dataclasses import dataclass

OWN_TROUBLE_INSTANCES = 3
OWN_TROUBLE_HOSTS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class _Failure:
    host: str
    at: float


class OwnTrouble:
    """What was seen lately of everybody together.

    `window_s` is how long nobody may have succeeded, and how long evictions are then held. `result_s` is the
    longest time in which every ready instance has had a result, however slow its probes: failures count
    that long, or jitter of a few milliseconds would leave out those whose turn comes next.
    """

    def __init__(self, window_s: float, result_s: float) -> None:
        self._window_s = window_s
        self._result_s = result_s
        self._failures: dict[str, _Failure] = {}
        self._last_success: float | None = None
        self._held_until: float | None = None

    def note_success(self, now: float) -> None:
        """Somebody answered: our network works."""
        self._last_success = now
        self._held_until = None

    def note_failure(self, instance: str, host: str, now: float) -> None:
        """A ready instance on `host` failed."""
        self._failures[instance] = _Failure(host=host, at=now)

    def forget(self, instance: str) -> None:
        """The instance has left."""
        self._failures.pop(instance, None)

    def begin_hold(self, now: float) -> bool:
        """Begin to hold evictions if we are the suspect; True when a hold begins with this call."""
        if self._held_until is not None or not self._suspects_us(now):
            return False
        self._held_until = now + self._window_s
        return True

    def holds(self, now: float) -> bool:
        """Say whether evictions are held."""
        return self._held_until is not None and now < self._held_until

    def _suspects_us(self, now: float) -> bool:
        if self._last_success is not None and self._last_success >= now - self._window_s:
            return False
        recent = [failure for failure in self._failures.values() if failure.at >= now - self._result_s]
        hosts = {failure.host for failure in recent}
        return len(recent) >= OWN_TROUBLE_INSTANCES and len(hosts) >= OWN_TROUBLE_HOSTS
