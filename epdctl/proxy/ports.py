"""What the proxy asks of the registry, and nothing more.

Rules of this file: protocols only. The registry side implements `RoutingPort`; the proxy never holds the
registry itself, so a change of its inside cannot reach a request's path.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from epdctl.domain import InstanceUrl, Observation

if TYPE_CHECKING:
    from epdctl.registry.snapshot import Member, Roster


class RoutingPort(Protocol):
    """The routing view: who may get work, who has how much, and what traffic has to say about them.

    All calls are synchronous, take microseconds and never wait: a probe that hangs cannot hold a request up.
    """

    def roster(self) -> Roster:
        """Return the present roster; the same object until the registry changes."""
        ...

    def in_flight(self, url: InstanceUrl) -> int:
        """Return how many leases are out on `url`; 0 for an unknown one."""
        ...

    def acquire(self, member: Member) -> None:
        """Take a lease on `member`: in flight + 1."""
        ...

    def release(self, member: Member) -> None:
        """Give one lease back; called exactly once for each `acquire`, also on cancel."""
        ...

    def observe(self, member: Member, observation: Observation) -> None:
        """Report evidence from traffic about `member`; dropped when its generation is old."""
        ...
