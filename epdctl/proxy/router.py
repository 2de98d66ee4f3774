"""Plans routes at the pace of requests: holds the cursors and hands the registry's view to `plan`.

Rules of this file: cursors change only with a complete plan; nothing here waits.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace

from epdctl.domain import InstanceUrl, Role
from epdctl.proxy.plan import (
    Cursors,
    Demand,
    EncodeBatch,
    Policies,
    RoutePlan,
    has_other,
    plan_encoders,
    plan_route,
)
from epdctl.proxy.ports import RoutingPort
from epdctl.registry.policies import Policy
from epdctl.registry.snapshot import Member, Roster

_NO_LOADS: Mapping[InstanceUrl, int] = {}


class Router:
    """Chooses instances for one proxy process."""

    def __init__(self, routing: RoutingPort, policies: Policies) -> None:
        self._routing = routing
        self._policies = policies
        self._cursors = Cursors()
        self._seen_version = -1
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
        plan, cursors = plan_route(
            roster,
            self._cursors,
            demand,
            policies=self._policies,
            loads=self._loads(roster),
            draw=random.random,
        )
        self._commit(roster, cursors)
        return plan

    def reroute_items(self, demand: Demand, consumer: Member) -> tuple[EncodeBatch, ...]:
        """Return encoder calls for the items of `demand` alone, for the same consumer; raises NoInstance."""
        roster = self._routing.roster()
        batches, cursors = plan_encoders(
            roster,
            self._cursors,
            demand,
            consumer=consumer,
            policy=self._policies.encode,
            loads=self._loads(roster),
            draw=random.random,
        )
        self._commit(roster, cursors)
        return batches

    def has_other(self, role: Role, model: str | None, url: InstanceUrl) -> bool:
        """Say whether another ready instance of `role` could take over from `url`."""
        return has_other(self._routing.roster(), role, model, url)

    def _loads(self, roster: Roster) -> Mapping[InstanceUrl, int]:
        if not self._needs_loads:
            return _NO_LOADS
        return {member.url: self._routing.in_flight(member.url) for member in roster.members}

    def _commit(self, roster: Roster, cursors: Cursors) -> None:
        if roster.version != self._seen_version and cursors.replicas:
            # Turns of instances that have left would pile up otherwise.
            present = {member.url for member in roster.members}
            kept = {url: turn for url, turn in cursors.replicas.items() if url in present}
            cursors = replace(cursors, replicas=kept)
        self._seen_version = roster.version
        self._cursors = cursors
