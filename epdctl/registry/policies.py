"""How one of several ready instances is chosen.

Rules of this file:
- Pure: cursors, loads and random draws are handed in, the next cursor is handed back. Whoever asked commits
  it together with a complete plan, so a plan that fails moves nothing.
- Cursors only grow and are taken modulo the number of candidates, so an instance that joins or leaves does
  not restart the round at the first one.
- Hashing is the same in every process and release: several proxies send an item to the same encoder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from math import ceil
from typing import Literal

from blake3 import blake3

from epdctl.domain import InstanceUrl
from epdctl.registry.snapshot import Member

BOUNDED_LOAD_FACTOR = 1.25
"""A consistent-hashing target may hold this many times the mean load before its keys spill over."""


PolicyName = Literal["round_robin", "least_inflight", "power_of_two", "consistent_hashing"]
"""Values of `Policy`, as `--encode-policy` and its like take them."""


class Policy(StrEnum):
    """The policies."""

    ROUND_ROBIN = "round_robin"
    LEAST_INFLIGHT = "least_inflight"
    POWER_OF_TWO = "power_of_two"
    CONSISTENT_HASHING = "consistent_hashing"


def choose(
    policy: str,
    candidates: Sequence[Member],
    *,
    cursor: int,
    loads: Mapping[InstanceUrl, int],
    key: bytes | None,
    draw: float,
) -> tuple[Member, int]:
    """Return the chosen candidate and the cursor to use next.

    Args:
        policy: a `Policy` value.
        candidates: at least one member, in a stable order.
        cursor: a number that grows by one with each choice by rotation.
        loads: calls in flight by URL; a missing URL has none.
        key: what `consistent_hashing` hashes; None falls back to `round_robin`.
        draw: a uniform random number in [0, 1), used by `power_of_two`.

    Raises:
        ValueError: no candidates, or no such policy.
    """
    if not candidates:
        raise ValueError("choose needs at least one candidate")
    match Policy(policy):
        case Policy.LEAST_INFLIGHT:
            return _least_inflight(candidates, cursor, loads), cursor + 1
        case Policy.POWER_OF_TWO:
            return _power_of_two(candidates, loads, draw), cursor
        case Policy.CONSISTENT_HASHING if key is not None:
            return _consistent_hashing(candidates, loads, key), cursor
        case _:
            return candidates[cursor % len(candidates)], cursor + 1


def _least_inflight(candidates: Sequence[Member], cursor: int, loads: Mapping[InstanceUrl, int]) -> Member:
    """Return the least loaded candidate; equals take turns by the cursor."""
    start = cursor % len(candidates)
    rotated = [*candidates[start:], *candidates[:start]]
    return min(rotated, key=lambda member: loads.get(member.url, 0))


def _power_of_two(candidates: Sequence[Member], loads: Mapping[InstanceUrl, int], draw: float) -> Member:
    """Return the less loaded of two different candidates that `draw` names."""
    count = len(candidates)
    if count == 1:
        return candidates[0]
    first, second = divmod(int(draw * count * (count - 1)), count - 1)
    second += second >= first
    return min(candidates[first], candidates[second], key=lambda member: loads.get(member.url, 0))


def _consistent_hashing(candidates: Sequence[Member], loads: Mapping[InstanceUrl, int], key: bytes) -> Member:
    """Return the candidate with the highest score for `key` among those below the bounded load.

    Highest random weight instead of a ring: it needs no state, and a leaving instance moves only its keys.
    """
    total = sum(loads.get(member.url, 0) for member in candidates)
    capacity = ceil(BOUNDED_LOAD_FACTOR * (total + 1) / len(candidates))
    free = [member for member in candidates if loads.get(member.url, 0) < capacity]
    return max(free, key=lambda member: _score(key, member.url))


def _score(key: bytes, url: str) -> bytes:
    # The key's length keeps ("ab", "c") and ("a", "bc") apart.
    return blake3(len(key).to_bytes(8, "big") + key + url.encode()).digest(length=8)
