"""The policy and the notices of a consumer's reservations.

Rules of this file: plain data. Times are seconds, sizes bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from epdctl.domain import MmHash, TransferId
from epdctl.worker.transfer.ports import TensorSpec, TransferOutcome
from epdctl.worker.transfer.tombstones import End


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasePolicy:
    """How long things are kept, in seconds, and how many of them.

    `pending_s`: how long a region waits for a writer that was cancelled or whose lease ran out. A producer
    may begin to write up to 150 s after it reserved (vLLM's and ours refresh older reservations) and need a
    minute. `quarantine_s`: how long a region rests after its writer was given up, since bytes in kernel
    buffers may still land (three times a 5 s progress timeout).
    """

    lease_s: float = 300.0
    pending_s: float = 240.0
    quarantine_s: float = 15.0
    tombstone_s: float = 300.0
    max_tombstones: int = 65_536
    max_reservations: int = 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class BecameReady:
    """A reservation's item is available; said again whenever a reserve finds it so."""

    transfer_id: TransferId
    mm_hash: MmHash
    reservation_id: str
    nbytes: int
    spec: TensorSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class GaveUp:
    """A transfer will not arrive by this id any more; whoever waits should look again."""

    transfer_id: TransferId
    mm_hash: MmHash | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """How a reservation ended, said once for each; `nbytes` are those that its writer wrote."""

    outcome: TransferOutcome
    nbytes: int
    seconds: float


Notice = BecameReady | GaveUp | Counted


@dataclass(frozen=True, slots=True)
class Lost:
    """Why a transfer will not arrive."""

    end: End
