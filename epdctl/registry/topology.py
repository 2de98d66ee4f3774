"""What the registered roles add up to, and whether that can serve a request.

Rules of this file: pure. The topology is derived, never configured: one `prefill_decode` instance makes it
E+PD, standalone `prefill` and `decode` make it E+P+D, and the two never mix. Instances in any state count,
so that the answer to a registration does not depend on who happens to be evicted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from epdctl.domain import Role, Topology
from epdctl.errors import TopologyConflict
from epdctl.registry.snapshot import Member

_SPLIT_ROLES = frozenset({Role.PREFILL, Role.DECODE})

CHAINS: dict[Topology, tuple[Role, ...]] = {
    Topology.E_PD: (Role.ENCODE, Role.PREFILL_DECODE),
    Topology.E_P_D: (Role.ENCODE, Role.PREFILL, Role.DECODE),
}
"""Roles that a request with media passes, in order."""


def find_conflict(role: Role, present: Iterable[Role]) -> Role | None:
    """Return a role among `present` that `role` cannot stand beside, or None."""
    rivals = _SPLIT_ROLES if role is Role.PREFILL_DECODE else frozenset({Role.PREFILL_DECODE})
    if role is Role.ENCODE:
        return None
    return min((other for other in present if other in rivals), default=None)


def check_join(role: Role, present: Iterable[Role]) -> None:
    """Raise TopologyConflict when an instance of `role` may not join instances of the roles `present`."""
    rival = find_conflict(role, present)
    if rival is not None:
        raise TopologyConflict(
            f"Cannot mix prefill_decode with standalone prefill/decode: a {rival} instance is registered, "
            f"so {role} cannot join (pending, evicted and draining instances count; remove them first)",
            param="role",
        )


def derive_topology(present: Iterable[Role]) -> Topology:
    """Return what instances of the roles `present` add up to."""
    roles = frozenset(present)
    if not roles:
        return Topology.EMPTY
    for topology, chain in CHAINS.items():
        if roles.issuperset(chain):
            return topology
    return Topology.INCOMPLETE


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """Whether a request with media can be served, and why not."""

    servable: bool
    reason: str | None = None


def judge_service(members: Sequence[Member], topology: Topology, model: str | None = None) -> Service:
    """Say whether ready `members` can serve `model`, or any model at all when it is None.

    A chain holds only when its instances all serve the model, and those that exchange data fit each other.
    """
    if topology is Topology.EMPTY:
        return Service(servable=False, reason="no instance is registered")
    if topology is Topology.INCOMPLETE:
        return Service(servable=False, reason=_what_is_missing(members, "registered and ready"))
    chain = CHAINS[topology]
    missing = [role for role in chain if not any(m.role is role and m.serves(model) for m in members)]
    if missing:
        of_model = f" of model '{model}'" if model is not None else ""
        return Service(servable=False, reason=f"no ready {' and no ready '.join(missing)} instance{of_model}")
    if any(_has_chain(members, chain, name) for name in _names(members, model)):
        return Service(servable=True)
    return Service(
        servable=False,
        reason="no model has a ready instance of every role that fit each other (models, labels)",
    )


def _what_is_missing(members: Sequence[Member], word: str) -> str:
    have = {member.role for member in members}
    wants = ["encode"] if Role.ENCODE not in have else []
    if Role.PREFILL_DECODE not in have:
        split = have & _SPLIT_ROLES
        wants += sorted(_SPLIT_ROLES - split) if split else ["prefill_decode (or prefill and decode)"]
    return f"no {' and no '.join(wants)} instance is {word}"


def _names(members: Sequence[Member], model: str | None) -> set[str | None]:
    if model is not None:
        return {model}
    # None stands for a model that nobody lists: only instances that serve any model take it.
    return {None, *(name for member in members for name in member.models or ())}


def _has_chain(members: Sequence[Member], chain: tuple[Role, ...], name: str | None) -> bool:
    """Say whether an encoder and a consumer fit, and in E+P+D a decode fits that consumer too."""
    able = [[m for m in members if m.role is role and _takes(m, name)] for role in chain]
    encoders, consumers, decodes = able[0], able[1], able[2:]
    return any(
        any(encoder.fits(consumer) for encoder in encoders)
        and all(any(consumer.fits(decode) for decode in stage) for stage in decodes)
        for consumer in consumers
    )


def _takes(member: Member, name: str | None) -> bool:
    return not member.models if name is None else member.serves(name)
