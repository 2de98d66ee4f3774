"""What routing sees: an immutable picture of the instances that may get traffic.

Rules of this file:
- A `Roster` never changes; the registry builds a new one when its records change, and hands out the same one
  until then, so taking it costs nothing on a request's path.
- Only `ready` instances are members. The topology is that of everything registered, whatever its state, so
  that it does not flap when an instance is evicted; ask `by_role` for what can serve now.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from epdctl.domain import InstanceUrl, Role, Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One ready instance.

    `models` None or empty means the instance reported none, so it serves any. `group` is `labels.group`,
    `kv_connector` is `labels.kv_connector`: see `fits`.
    """

    url: InstanceUrl
    role: Role
    generation: int
    dp_size: int = 1
    ec_zmq_addrs: tuple[str, ...] = ()
    models: frozenset[str] | None = None
    group: str | None = None
    kv_connector: str | None = None
    kv_bootstrap_addr: str | None = None

    def serves(self, model: str | None) -> bool:
        """Say whether the member serves `model`; None asks for any model."""
        return model is None or not self.models or model in self.models

    def fits(self, other: Member) -> bool:
        """Say whether the two may exchange data: neither group nor KV connector differ.

        A member that names none fits any. KV connectors say nothing about an encoder.
        """
        if self.group is not None and other.group is not None and self.group != other.group:
            return False
        if self.kv_connector is None or other.kv_connector is None or Role.ENCODE in (self.role, other.role):
            return True
        return self.kv_connector == other.kv_connector


@dataclass(frozen=True, slots=True, kw_only=True)
class Roster:
    """All members at one moment, in the order of registration; `version` grows with each change."""

    version: int
    topology: Topology
    members: tuple[Member, ...] = ()
    known_models: tuple[str, ...] = field(init=False)
    _members_by_role: Mapping[Role, tuple[Member, ...]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        grouped = {role: tuple(m for m in self.members if m.role is role) for role in Role}
        object.__setattr__(self, "_members_by_role", grouped)
        object.__setattr__(self, "known_models", _known_models(self.members))

    def by_role(self, role: Role) -> tuple[Member, ...]:
        """Return the members of `role`, in the order of registration."""
        return self._members_by_role[role]


def _known_models(members: Iterable[Member]) -> tuple[str, ...]:
    """Return the names that members list, sorted, each once."""
    return tuple(sorted({name for member in members for name in member.models or ()}))


EMPTY_ROSTER = Roster(version=0, topology=Topology.EMPTY)
