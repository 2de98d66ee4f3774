"""Plans routes at the pace of requests: holds the cursors and hands the registry's view to `plan`.

Rules of this file: cursors change only with a complete plan; nothing here waits.
"""

from __future__ import annotations

import random
from collections.abc import Mapping

import msgspec

from epdctl.domain import InstanceUrl, Role
from epdctl.proxy.plan import (
    Able,
    Cursors,
    Demand,
    EncodeBatch,
    Policies,
    RoutePlan,
    find_able,
    has_other,
    plan_encoders,
    plan_route,
)
from epdctl.proxy.ports import RoutingPort
from epdctl.registry.policies import Policy
from epdctl.registry.snapshot import Member, Roster

_NO_LOADS: Mapping[InstanceUrl, int] = {}
_MAX_KINDS = 256


class Router:
    """Chooses instances for one proxy process."""

    def __init__(self, routing: RoutingPort, policies: Policies) -> None:
        self._routing = routing
        self._policies = policies
        self._cursors = Cursors()
        self._roster: Roster | None = None
        self._able_by_kind: dict[tuple[str | None, bool], Able] = {}
        self._needs_loads = any(
            policy is not Policy.ROUND_ROBIN
            for policy in (policies.encode, policies.prefill, policies.decode)
        )

    @property
    def cursors(self) -> Cursors:
        """Where the rotations stand."""
        return self._cursors

    def roster(self) -> Roster:
        """Return the present roster."""
        return self._routing.roster()

    def route(self, demand: Demand) -> RoutePlan:
        """Return a complete plan for `demand`; raises NoInstance or UnknownModel and moves nothing then."""
        roster = self._routing.roster()
        plan, self._cursors = plan_route(
            self._able(roster, demand),
            self._cursors,
            demand,
            policies=self._policies,
            loads=self._loads(roster),
            draw=random.random,
        )
        return plan

    def reroute_items(self, demand: Demand, consumer: Member) -> tuple[EncodeBatch, ...]:
        """Return encoder calls for the items of `demand` alone, for the same consumer; raises NoInstance."""
        roster = self._routing.roster()
        batches, self._cursors = plan_encoders(
            self._able(roster, demand),
            self._cursors,
            demand,
            consumer=consumer,
            policy=self._policies.encode,
            loads=self._loads(roster),
            draw=random.random,
        )
        return batches

    def has_other(self, role: Role, model: str | None, url: InstanceUrl) -> bool:
        """Say whether another ready instance of `role` could take over from `url`."""
        return has_other(self._routing.roster(), role, model, url)

    def _loads(self, roster: Roster) -> Mapping[InstanceUrl, int]:
        if not self._needs_loads:
            return _NO_LOADS
        return {member.url: self._routing.in_flight(member.url) for member in roster.members}

    def _able(self, roster: Roster, demand: Demand) -> Able:
        """Return who can serve `demand`, worked out once for each roster."""
        if roster is not self._roster:
            self._roster = roster
            self._able_by_kind.clear()
            self._forget_replicas(roster)
        kind = (demand.model, bool(demand.items))
        able = self._able_by_kind.get(kind)
        if able is None:
            able = find_able(roster, demand.model, has_media=bool(demand.items))
            if len(self._able_by_kind) < _MAX_KINDS:
                self._able_by_kind[kind] = able
        return able

    def _forget_replicas(self, roster: Roster) -> None:
        """Drop the turns of instances that have left, which would pile up otherwise."""
        if self._cursors.replicas:
            present = {member.url for member in roster.members}
            kept = {url: turn for url, turn in self._cursors.replicas.items() if url in present}
            self._cursors = msgspec.structs.replace(self._cursors, replicas=kept)
