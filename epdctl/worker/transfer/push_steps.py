"""Where a push is, what it wants done, and the policy it follows.

Rules of this file: plain data. Times are seconds, sizes bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from epdctl.domain import TransferId
from epdctl.ec.protocol import CompleteResult, Refusal, Reservation, TransferStatus
from epdctl.worker.transfer.ports import TransferOutcome

BYTES_PER_SECOND = 200e6
"""The slowest transport a write is waited for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PushPolicy:
    """How long and how often a push tries.

    `deadline_s` runs from when the bytes are there. `control_attempts`: of each kind of control exchange.
    `full_patience_s`: how long a full arena is asked again. `linger_s`: how long after a failed write the
    consumer is left to believe that bytes may still land, since they did (up to 8.6 MB out of kernel
    buffers); three times a 5 s progress timeout.
    """

    deadline_s: float = 30.0
    write_base_s: float = 5.0
    control_attempts: int = 2
    first_poll_s: float = 0.02
    poll_s: float = 0.1
    full_patience_s: float = 2.0
    full_retry_s: float = 0.05
    full_retry_max_s: float = 0.4
    refresh_age_s: float = 150.0
    linger_s: float = 15.0

    def write_deadline_s(self, nbytes: int) -> float:
        """Return how long a write of `nbytes` may take."""
        return self.write_base_s + nbytes / BYTES_PER_SECOND


class Phase(StrEnum):
    """Where a push is; `ended` says that the caller has been told, not that everything is cleaned up."""

    RESERVING = "reserving"
    WAITING_FOR_SPACE = "waiting_for_space"
    WAITING_FOR_SOURCE = "waiting_for_source"
    RENEWING = "renewing"
    WRITING = "writing"
    COMPLETING = "completing"
    FOLLOWING = "following"
    ENDED = "ended"


class Source(StrEnum):
    """Whose the bytes are."""

    ABSENT = "absent"
    HELD = "held"
    READ = "read"
    RELEASED = "released"


@dataclass(slots=True)
class Held:
    """What the consumer may be holding for us.

    `may_land`: bytes may still arrive after a failed write. `told`: the consumer knows that it failed.
    """

    transfer_id: TransferId
    reservation_id: str = ""
    may_land: bool = False
    told: bool = False


class Failure(StrEnum):
    """Why a push failed; `broken` is a bug of whoever carries it out, and decided nowhere in `push`."""

    UNAVAILABLE = "unavailable"
    GARBLED = "garbled"
    FULL = "full"
    REFUSED = "refused"
    WRITE_FAILED = "write_failed"
    CORRUPT = "corrupt"
    WRITER_GONE = "writer_gone"
    TIMEOUT = "timeout"
    BROKEN = "broken"


@dataclass(frozen=True, slots=True)
class Reserve:
    """Ask for the space."""

    transfer_id: TransferId


@dataclass(frozen=True, slots=True)
class Write:
    """Start to write the source to `destination` at `session`."""

    session: str
    destination: int


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Submit nothing more of the write."""


@dataclass(frozen=True, slots=True)
class Complete:
    """Publish the bytes."""

    transfer_id: TransferId
    reservation_id: str


@dataclass(frozen=True, slots=True)
class Poll:
    """Ask for the status."""

    transfer_id: TransferId


@dataclass(frozen=True, slots=True)
class Cancel:
    """Give the reservation up; see `ec.protocol.Cancel` for the flags."""

    transfer_id: TransferId
    reservation_id: str
    abandon: bool = False
    refresh: bool = False
    failed: bool = False
    fenced: bool = False


@dataclass(frozen=True, slots=True)
class Owe:
    """Nobody answered this cancel: it is to be asked again when somebody does."""

    cancel: Cancel


@dataclass(frozen=True, slots=True)
class ReleaseSource:
    """Nothing reads the source any more; wanted exactly once if a source was given."""


@dataclass(frozen=True, slots=True)
class Finish:
    """How the push ended, for the caller; wanted exactly once. `detail` is the consumer's own reason."""

    outcome: TransferOutcome
    failure: Failure | None = None
    detail: str = ""


Exchange = Reserve | Complete | Poll | Cancel
Action = Exchange | Write | Withdraw | Owe | ReleaseSource | Finish
Answer = Reservation | Refusal | CompleteResult | TransferStatus | bool | None
"""What an exchange is answered with: in the order of Reserve (two), Complete, Poll (or None), Cancel."""
