"""The nouns of epdctl, one definition each.

Rules of this file: plain frozen data and enums; no I/O, no clock, no imports from the rest of the package.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NewType

InstanceUrl = NewType("InstanceUrl", str)
"""A normalised instance URL: the identity of an instance."""

TransferId = NewType("TransferId", str)
"""One delivery of one feature to one consumer; 32 hex digits, minted per attempt."""

MmHash = NewType("MmHash", str)
"""What an engine calls a processed feature; opaque to everybody else."""


class Role(StrEnum):
    """What an instance does."""

    ENCODE = "encode"
    PREFILL = "prefill"
    DECODE = "decode"
    PREFILL_DECODE = "prefill_decode"


class Stage(StrEnum):
    """A step of one request; `prefill_decode` instances serve the decode stage and consume embeddings."""

    ENCODE = "encode"
    PREFILL = "prefill"
    DECODE = "decode"


class Topology(StrEnum):
    """What the registered roles add up to; derived, never configured."""

    EMPTY = "empty"
    INCOMPLETE = "incomplete"
    E_PD = "e_pd"
    E_P_D = "e_p_d"


class InstanceState(StrEnum):
    """Where an instance is in its life.

    - `pending`: not routable, probed at once; leaves by the first healthy probe, TTL or removal.
    - `ready`: routable, probed; leaves by eviction, drain or removal.
    - `evicted`: not routable, probed with back-off; leaves by readmission, TTL, drain or removal.
    - `draining`: takes no new work, not probed; leaves when nothing is in flight, at its deadline, or by
      removal.
    """

    PENDING = "pending"
    READY = "ready"
    EVICTED = "evicted"
    DRAINING = "draining"


class ProbeOutcome(StrEnum):
    """What one probe says; `inconclusive` is our own trouble and counts for nothing."""

    HEALTHY = "healthy"
    UNHEALTHY = "unhealthy"
    INCONCLUSIVE = "inconclusive"


class Observation(StrEnum):
    """Evidence from traffic: refused or reset before the first byte, or an answer of any status below 500."""

    UNREACHABLE = "unreachable"
    RESPONDED = "responded"


class Modality(StrEnum):
    """The kind of a media item."""

    IMAGE = "image"
    AUDIO = "audio"
    VIDEO = "video"


EC_CONSUMER_ROLES = frozenset({Role.PREFILL, Role.PREFILL_DECODE})
"""Roles that receive embeddings, so the only ones that may carry EC control addresses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceSpec:
    """What a launcher says about an instance: everything but its state.

    `ec_zmq_addrs` holds one EC control address (`tcp://host:port`) per DP replica, or is empty.
    `models` is None while unknown; an instance that lists no model serves any.
    """

    url: InstanceUrl
    role: Role
    dp_size: int = 1
    ec_zmq_addrs: tuple[str, ...] = ()
    model: str | None = None
    labels: tuple[tuple[str, str], ...] = ()
    kv_bootstrap_addr: str | None = None
    static: bool = False

    def label(self, name: str) -> str | None:
        """Return the value of label `name`, or None."""
        return dict(self.labels).get(name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """One DP rank of an EC consumer, with its EC control address when embeddings are pushed."""

    url: InstanceUrl
    rank: int
    ec_zmq_addr: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemFailure:
    """Why one media item could not be encoded; travels from engine to front."""

    index: int
    code: str
    message: str = field(default="")
