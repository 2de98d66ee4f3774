"""Which instances serve a request: a complete plan, or an error that names what is missing.

Rules of this file:
- Pure. Cursors are values: a plan hands back the next ones and whoever asked commits them together with the
  plan, so a plan that fails moves nothing, and neither does asking for models.
- Only members of the roster are chosen, and those are the ready ones.
- The consumer's replica is chosen once here and named to both halves of the request.
- Two instances are paired only when their groups and KV connectors agree; one that names none fits any.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from epdctl.domain import InstanceUrl, Modality, Replica, Role
from epdctl.errors import NoInstance, UnknownModel
from epdctl.registry.policies import Policy, choose
from epdctl.registry.snapshot import Member, Roster

Loads = Mapping[InstanceUrl, int]
Members = tuple[Member, ...]
Draw = Callable[[], float]
"""A source of random numbers in [0, 1), handed in."""


class Cursors(msgspec.Struct, frozen=True, kw_only=True):
    """Where each rotation stands; `replicas` counts the turns of instances with several replicas."""

    encode: int = 0
    prefill: int = 0
    decode: int = 0
    replicas: Mapping[InstanceUrl, int] = msgspec.field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Policies:
    """How each stage's instance is chosen."""

    encode: Policy
    prefill: Policy
    decode: Policy


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemDemand:
    """One item to encode; `key` decides where its embedding is cached (consistent hashing)."""

    index: int
    modality: Modality
    key: bytes


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    """What a request needs. `affinity` is the key for prefill and decode; `avoid` failed just now."""

    model: str | None = None
    items: tuple[ItemDemand, ...] = ()
    affinity: bytes | None = None
    avoid: frozenset[InstanceUrl] = frozenset()
    batch_limit: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodeBatch:
    """Items, by index and in prompt order, that one call asks one encoder for."""

    member: Member
    items: tuple[int, ...]


class RoutePlan(msgspec.Struct, frozen=True, kw_only=True):
    """A complete plan. `prefill` is None in E+PD; `consumer` is the replica that receives embeddings."""

    batches: tuple[EncodeBatch, ...]
    prefill: Member | None
    decode: Member
    consumer: Replica


@dataclass(frozen=True, slots=True, kw_only=True)
class Able:
    """The members that can serve a model, with media or without, and that have somebody to work with.

    It depends on the roster alone, so it is worked out once for each roster, model and kind. `prefills` is
    None in E+PD; `encoders` is empty for requests without media. `has_pairs` tells that a prefill may not be
    followed by every decode.
    """

    encoders: Members
    prefills: Members | None
    decodes: Members
    has_pairs: bool


def find_able(roster: Roster, model: str | None, *, has_media: bool) -> Able:
    """Return who can serve `model`.

    Raises:
        NoInstance: a stage has no ready instance for the model, or none that fits the other stages'.
        UnknownModel: every stage has ready instances, and none lists the model.
    """
    combined = roster.by_role(Role.PREFILL_DECODE)
    is_split = not combined and bool(roster.by_role(Role.PREFILL) or roster.by_role(Role.DECODE))
    roles = (Role.PREFILL, Role.DECODE) if is_split else (Role.PREFILL_DECODE,)
    if has_media:
        roles = (Role.ENCODE, *roles)
    able = [_serving(roster.by_role(role), model) for role in roles]
    if not all(able):
        raise _missing(roster, roles, able, model)
    encoders = able[0] if has_media else ()
    if not is_split:
        return Able(
            encoders=encoders,
            prefills=None,
            decodes=_reachable(able[-1], encoders, Role.DECODE),
            has_pairs=False,
        )
    prefills = _reachable(_paired(able[-2], able[-1]), encoders, Role.PREFILL)
    has_pairs = not all(_fit(p, d) for p in prefills for d in able[-1])
    return Able(encoders=encoders, prefills=prefills, decodes=able[-1], has_pairs=has_pairs)


def plan_route(
    able: Able,
    cursors: Cursors,
    demand: Demand,
    *,
    policies: Policies,
    loads: Loads,
    draw: Draw,
) -> tuple[RoutePlan, Cursors]:
    """Return a plan for `demand` and the cursors to commit with it; raises NoInstance when nobody fits."""
    prefill, at_prefill, decodes = None, cursors.prefill, able.decodes
    if able.prefills is not None:
        prefill, at_prefill = choose(
            policies.prefill,
            _avoiding(able.prefills, demand.avoid),
            cursor=cursors.prefill,
            loads=loads,
            key=demand.affinity,
            draw=draw(),
        )
        if able.has_pairs:
            decodes = tuple(d for d in decodes if _fit(prefill, d))
    decode, at_decode = choose(
        policies.decode,
        _avoiding(decodes, demand.avoid),
        cursor=cursors.decode,
        loads=loads,
        key=demand.affinity,
        draw=draw(),
    )
    consumer = prefill or decode
    replica, replicas = _choose_replica(consumer, cursors.replicas)
    batches, at_encode = _spread(
        able.encoders, cursors.encode, demand, consumer, policies.encode, loads, draw
    )
    return (
        RoutePlan(batches=batches, prefill=prefill, decode=decode, consumer=replica),
        Cursors(encode=at_encode, prefill=at_prefill, decode=at_decode, replicas=replicas),
    )


def plan_encoders(
    able: Able,
    cursors: Cursors,
    demand: Demand,
    *,
    consumer: Member,
    policy: Policy,
    loads: Loads,
    draw: Draw,
) -> tuple[tuple[EncodeBatch, ...], Cursors]:
    """Return encoder calls for the items of `demand` alone; raises NoInstance when no encoder fits."""
    batches, at = _spread(able.encoders, cursors.encode, demand, consumer, policy, loads, draw)
    return batches, msgspec.structs.replace(cursors, encode=at)


def has_other(roster: Roster, role: Role, model: str | None, url: InstanceUrl) -> bool:
    """Say whether another ready instance of `role` than `url` serves `model`."""
    return any(m.url != url and m.serves(model) for m in roster.by_role(role))


def _spread(
    encoders: Members,
    cursor: int,
    demand: Demand,
    consumer: Member,
    policy: Policy,
    loads: Loads,
    draw: Draw,
) -> tuple[tuple[EncodeBatch, ...], int]:
    """Return the encoder calls for the items of `demand`, and the next cursor."""
    if not demand.items:
        return (), cursor
    able = _avoiding(tuple(m for m in encoders if _fit(m, consumer)), demand.avoid)
    if not able:
        raise _nobody((Role.ENCODE,), demand.model)
    load = dict(loads)
    chosen: list[tuple[ItemDemand, Member]] = []
    for item in demand.items:
        member, cursor = choose(policy, able, cursor=cursor, loads=load, key=item.key, draw=draw())
        load[member.url] = load.get(member.url, 0) + 1
        chosen.append((item, member))
    return _batches(chosen, demand.batch_limit), cursor


def _batches(chosen: Sequence[tuple[ItemDemand, Member]], limit: int) -> tuple[EncodeBatch, ...]:
    """Return one call for each encoder's images, cut at `limit` (0: none); audio and video go alone."""
    calls: list[tuple[Member, list[int]]] = []
    open_call: dict[InstanceUrl, list[int]] = {}
    for item, member in chosen:
        items = open_call.get(member.url)
        if item.modality is not Modality.IMAGE:
            calls.append((member, [item.index]))
        elif items is None or (limit and len(items) >= limit):
            open_call[member.url] = [item.index]
            calls.append((member, open_call[member.url]))
        else:
            items.append(item.index)
    return tuple(EncodeBatch(member=member, items=tuple(items)) for member, items in calls)


def _fit(one: Member, other: Member) -> bool:
    """Say whether two instances may exchange data."""
    return one.fits(other)


def _avoiding(members: Members, avoid: frozenset[InstanceUrl]) -> Members:
    """Return the members without those to avoid; all of them when there is no other."""
    return tuple(m for m in members if m.url not in avoid) or members if avoid else members


def _serving(members: Members, model: str | None) -> Members:
    return members if model is None else tuple(m for m in members if m.serves(model))


def _missing(
    roster: Roster, roles: Sequence[Role], able: Sequence[Members], model: str | None
) -> NoInstance | UnknownModel:
    """Return the error for roles of which some have no instance that serves `model`."""
    empty = [role for role in roles if not roster.by_role(role)]
    if empty:
        return _nobody(empty, None)
    if not any(able):
        known = ", ".join(roster.known_models)
        return UnknownModel(f"the model is not served here; known models: {known}", param="model")
    return _nobody([role for role, members in zip(roles, able, strict=True) if not members], model)


def _nobody(roles: Sequence[Role], model: str | None) -> NoInstance:
    names = [_stage_name(role) for role in roles]
    suffix = "" if model is None else " for this model"
    return NoInstance(names[0], f"no ready instance for {' and '.join(names)}{suffix}")


def _stage_name(role: Role) -> str:
    return Role.DECODE.value if role is Role.PREFILL_DECODE else role.value


def _paired(prefills: Members, decodes: Members) -> Members:
    """Return the prefills that have a decode to hand over to."""
    paired = tuple(p for p in prefills if any(_fit(p, d) for d in decodes))
    if not paired:
        raise NoInstance(Role.DECODE.value, "no ready decode instance fits a prefill instance (labels)")
    return paired


def _reachable(consumers: Members, encoders: Members, role: Role) -> Members:
    """Return the consumers that an encoder can push to; all of them when nothing is to be encoded."""
    if not encoders:
        return consumers
    reachable = tuple(c for c in consumers if any(_fit(e, c) for e in encoders))
    if not reachable:
        raise NoInstance(role.value, f"no ready {role.value} instance is in the group of an encoder")
    return reachable


def _choose_replica(
    member: Member, turns: Mapping[InstanceUrl, int]
) -> tuple[Replica, Mapping[InstanceUrl, int]]:
    rank = 0
    if member.dp_size > 1:
        turn = turns.get(member.url, 0)
        rank, turns = turn % member.dp_size, {**turns, member.url: turn + 1}
    address = member.ec_zmq_addrs[rank] if member.ec_zmq_addrs else None
    return Replica(url=member.url, rank=rank, ec_zmq_addr=address), turns
