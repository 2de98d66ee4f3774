"""Who takes part in a modelled exchange: producers, a consumer with its memory, and what goes wrong.

`exchange` lets them meet. Numbers are seconds of virtual time.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from epdctl.domain import MmHash, TransferId
from epdctl.worker.transfer.arena import Arena, Region
from epdctl.worker.transfer.items import Item
from epdctl.worker.transfer.notices import LeasePolicy
from epdctl.worker.transfer.push import Push
from epdctl.worker.transfer.push_steps import Finish, PushPolicy
from epdctl.worker.transfer.reservation import Reservations

LEASES = LeasePolicy(lease_s=30, pending_s=60, quarantine_s=15, tombstone_s=30, max_tombstones=200)
PUSHES = PushPolicy(refresh_age_s=15, linger_s=15, deadline_s=20)
CONTROL_TIMEOUT_S = 2.0
LATEST_LANDING_S = 12.0
BASE = 1 << 40


class Violation(AssertionError):
    """The protocol's promises were broken."""


@dataclass(frozen=True, slots=True)
class Faults:
    """Probabilities of what goes wrong."""

    lost: float = 0.1
    doubled: float = 0.05
    late: float = 0.03
    write_fails: float = 0.15
    corrupt: float = 0.03
    proxy_cancels: float = 0.1
    aborts: float = 0.1
    consumer_restarts: int = 1
    producer_restarts: int = 1
    source_delays: tuple[float, ...] = (0.0, 0.5, 3.0, 18.0, 0.0, 0.5, 3.0, 18.0, 110.0)


@dataclass(eq=False)
class Producer:
    """One push and what its caller saw."""

    push: Push
    mm_hash: MmHash
    nbytes: int
    alive: bool = True
    finishes: list[Finish] = field(default_factory=list)
    source_given: bool = False
    reading: bool = False
    releases: int = 0
    written_bytes: int = 0
    ids: set[TransferId] = field(default_factory=set)
    began_in: str = ""
    disturbed: bool = False
    """Whether a message of this push was lost, late or doubled, or a third party meddled with it."""
    ends_by: float = float("inf")
    finished_at: float = 0.0


class WatchedArena(Arena):
    """An arena whose freed regions belong to nobody."""

    def __init__(self, nbytes: int) -> None:
        super().__init__(nbytes)
        self.owners: dict[int, str] = {}

    def free(self, region: Region) -> None:
        """Free it, and forget whose it was."""
        self.owners.pop(BASE + region.offset, None)
        super().free(region)


class Consumer:
    """One incarnation of a consumer, with its memory: what was last written at each offset."""

    def __init__(self, incarnation: int, arena_bytes: int) -> None:
        self.session = f"consumer:{incarnation}"
        self.arena = WatchedArena(arena_bytes)
        self.reservations = Reservations(self.arena, session=self.session, base_address=BASE, policy=LEASES)
        self.memory: dict[int, str] = {}
        self.readings: dict[int, tuple[Item, str]] = {}
