"""Which instances serve a request: a complete plan, or an error that names what is missing.

Rules of this file:
- Pure. Cursors are values: a plan hands back the next ones and whoever asked commits them together with the
  plan, so a plan that fails moves nothing, and neither does asking for models.
- Only members of the roster are chosen, and those are the ready ones.
- The consumer's replica is chosen once here and named to both halves of the request.
- Two instances are paired only when their groups and KV connectors agree; one that names none fits any.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from epdctl.domain import InstanceUrl, Modality, Replica, Role
from epdctl.errors import NoInstance, UnknownModel
from epdctl.registry.policies import Policy, choose
from epdctl.registry.snapshot import Member, Roster

Loads = Mapping[InstanceUrl, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursors:
    """Where each rotation stands; `replicas` counts the turns of instances with several replicas."""

    encode: int = 0
    prefill: int = 0
    decode: int = 0
    replicas: Mapping[InstanceUrl, int] = field(default_factory=dict)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutePlan:
    """A complete plan. `prefill` is None in E+PD; `consumer` is the replica that receives embeddings."""

    batches: tuple[EncodeBatch, ...]
    prefill: Member | None
    decode: Member
    consumer: Replica


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidates:
    encode: tuple[Member, ...]
    prefill: tuple[Member, ...]
    decode: tuple[Member, ...]


def plan_route(
    roster: Roster,
    cursors: Cursors,
    demand: Demand,
    *,
    policies: Policies,
    loads: Loads,
    draws: Iterator[float],
) -> tuple[RoutePlan, Cursors]:
    """Return a plan for `demand` and the cursors to commit with it.

    Raises:
        NoInstance: a stage has no ready instance for the model, or none that fits the other stages'.
        UnknownModel: every stage has ready instances, and none lists the model.
    """
    is_split = not roster.by_role(Role.PREFILL_DECODE) and bool(
        roster.by_role(Role.PREFILL) or roster.by_role(Role.DECODE)
    )
    found = _candidates(roster, demand, is_split)
    if is_split:
        pairable = tuple(p for p in found.prefill if any(_fit(p, d) for d in found.decode))
        prefill, cursors = _choose_prefill(pairable, found, cursors, demand, policies, loads, draws)
        fitting = tuple(d for d in found.decode if _fit(prefill, d))
    else:
        prefill, fitting = None, _reachable(found.decode, found.encode, bool(demand.items), Role.DECODE)
    decode, at = choose(
        policies.decode,
        _avoiding(fitting, demand.avoid),
        cursor=cursors.decode,
        loads=loads,
        key=demand.affinity,
        draw=next(draws),
    )
    cursors = replace(cursors, decode=at)
    consumer, cursors = _choose_replica(prefill or decode, cursors)
    batches, cursors = plan_encoders(
        roster,
        cursors,
        demand,
        consumer=prefill or decode,
        policy=policies.encode,
        loads=loads,
        draws=draws,
    )
    return RoutePlan(batches=batches, prefill=prefill, decode=decode, consumer=consumer), cursors


def plan_encoders(
    roster: Roster,
    cursors: Cursors,
    demand: Demand,
    *,
    consumer: Member,
    policy: Policy,
    loads: Loads,
    draws: Iterator[float],
) -> tuple[tuple[EncodeBatch, ...], Cursors]:
    """Return the encoder calls for the items of `demand`; raises NoInstance when no encoder fits."""
    if not demand.items:
        return (), cursors
    able = tuple(m for m in roster.by_role(Role.ENCODE) if m.serves(demand.model) and _fit(m, consumer))
    if not able:
        raise _nobody((Role.ENCODE,), demand.model)
    able = _avoiding(able, demand.avoid)
    load, at = dict(loads), cursors.encode
    chosen: list[tuple[ItemDemand, Member]] = []
    for item in demand.items:
        member, at = choose(policy, able, cursor=at, loads=load, key=item.key, draw=next(draws))
        load[member.url] = load.get(member.url, 0) + 1
        chosen.append((item, member))
    return _batches(chosen, demand.batch_limit), replace(cursors, encode=at)


def has_other(roster: Roster, role: Role, model: str | None, url: InstanceUrl) -> bool:
    """Say whether another ready instance of `role` than `url` serves `model`."""
    return any(m.url != url and m.serves(model) for m in roster.by_role(role))


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
    groups_agree = one.group is None or other.group is None or one.group == other.group
    kinds_agree = (
        one.kv_connector is None or other.kv_connector is None or one.kv_connector == other.kv_connector
    )
    return groups_agree and (kinds_agree or Role.ENCODE in (one.role, other.role))


def _avoiding(members: tuple[Member, ...], avoid: frozenset[InstanceUrl]) -> tuple[Member, ...]:
    """Return the members without those to avoid; all of them when there is no other."""
    return tuple(m for m in members if m.url not in avoid) or members if avoid else members


def _candidates(roster: Roster, demand: Demand, is_split: bool) -> _Candidates:
    roles = (Role.PREFILL, Role.DECODE) if is_split else (Role.PREFILL_DECODE,)
    needed = (Role.ENCODE, *roles) if demand.items else roles
    empty = tuple(role for role in needed if not roster.by_role(role))
    if empty:
        raise _nobody(empty, None)
    able = {role: tuple(m for m in roster.by_role(role) if m.serves(demand.model)) for role in needed}
    if not any(able.values()):
        known = ", ".join(roster.known_models)
        raise UnknownModel(f"the model is not served here; known models: {known}", param="model")
    unable = tuple(role for role in needed if not able[role])
    if unable:
        raise _nobody(unable, demand.model)
    return _Candidates(
        encode=able.get(Role.ENCODE, ()),
        prefill=able.get(Role.PREFILL, ()),
        decode=able[roles[-1]],
    )


def _nobody(roles: Sequence[Role], model: str | None) -> NoInstance:
    names = [_stage_name(role) for role in roles]
    suffix = "" if model is None else " for this model"
    return NoInstance(names[0], f"no ready instance for {' and '.join(names)}{suffix}")


def _stage_name(role: Role) -> str:
    return Role.DECODE.value if role is Role.PREFILL_DECODE else role.value


def _reachable(
    consumers: tuple[Member, ...], encoders: tuple[Member, ...], has_items: bool, role: Role
) -> tuple[Member, ...]:
    """Return the consumers that an encoder can push to; raise NoInstance when items need one and none is."""
    if not has_items:
        return consumers
    reachable = tuple(c for c in consumers if any(_fit(e, c) for e in encoders))
    if not reachable:
        raise NoInstance(role.value, f"no ready {role.value} instance is in the group of an encoder")
    return reachable


def _choose_prefill(
    pairable: tuple[Member, ...],
    found: _Candidates,
    cursors: Cursors,
    demand: Demand,
    policies: Policies,
    loads: Loads,
    draws: Iterator[float],
) -> tuple[Member, Cursors]:
    if not pairable:
        raise NoInstance(Role.DECODE.value, "no ready decode instance is in the group of a prefill instance")
    reachable = _reachable(pairable, found.encode, bool(demand.items), Role.PREFILL)
    member, at = choose(
        policies.prefill,
        _avoiding(reachable, demand.avoid),
        cursor=cursors.prefill,
        loads=loads,
        key=demand.affinity,
        draw=next(draws),
    )
    return member, replace(cursors, prefill=at)


def _choose_replica(member: Member, cursors: Cursors) -> tuple[Replica, Cursors]:
    rank = 0
    if member.dp_size > 1:
        turn = cursors.replicas.get(member.url, 0)
        rank = turn % member.dp_size
        cursors = replace(cursors, replicas={**cursors.replicas, member.url: turn + 1})
    address = member.ec_zmq_addrs[rank] if member.ec_zmq_addrs else None
    return Replica(url=member.url, rank=rank, ec_zmq_addr=address), cursors
