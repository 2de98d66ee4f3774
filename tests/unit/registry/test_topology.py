"""What roles add up to, and whether that serves."""

from __future__ import annotations

import pytest

from epdctl.domain import Role, Topology
from epdctl.errors import TopologyConflict
from epdctl.registry.topology import check_join, derive_topology, judge_service
from tests.unit.registry.build import D1, E1, E2, P1, PD1, PD2, member

pytestmark = pytest.mark.unit

E, P, D, PD = Role.ENCODE, Role.PREFILL, Role.DECODE, Role.PREFILL_DECODE


@pytest.mark.parametrize(
    ("role", "present", "fits"),
    [
        (E, [], True),
        (E, [PD], True),
        (E, [P, D], True),
        (P, [E, D], True),
        (D, [E, P, P], True),
        (PD, [E, PD], True),
        (PD, [P], False),
        (PD, [D], False),
        (PD, [E, P, D], False),
        (P, [PD], False),
        (D, [E, PD], False),
    ],
)
def test_who_may_join(role: Role, present: list[Role], fits: bool) -> None:
    """prefill_decode never stands beside prefill or decode; everything else may join."""
    if fits:
        check_join(role, present)
        return
    with pytest.raises(TopologyConflict, match="Cannot mix prefill_decode") as raised:
        check_join(role, present)
    assert str(role) in raised.value.message


@pytest.mark.parametrize(
    ("present", "topology"),
    [
        ([], Topology.EMPTY),
        ([E], Topology.INCOMPLETE),
        ([PD], Topology.INCOMPLETE),
        ([E, P], Topology.INCOMPLETE),
        ([P, D], Topology.INCOMPLETE),
        ([E, E, PD], Topology.E_PD),
        ([D, P, E], Topology.E_P_D),
    ],
)
def test_what_roles_add_up_to(present: list[Role], topology: Topology) -> None:
    """The topology follows from the roles alone."""
    assert derive_topology(present) is topology


class TestService:
    """Whether requests can be served."""

    def test_empty(self) -> None:
        """An empty registry serves nothing and says so."""
        service = judge_service([], Topology.EMPTY)

        assert (service.servable, service.reason) == (False, "no instance is registered")

    @pytest.mark.parametrize(
        ("members", "missing"),
        [
            ([member(E1)], "prefill_decode (or prefill and decode)"),
            ([member(PD1, PD)], "no encode"),
            ([member(E1), member(P1, P)], "no decode"),
            ([member(E1), member(D1, D)], "no prefill"),
        ],
    )
    def test_incomplete_names_what_is_missing(self, members: list[object], missing: str) -> None:
        """An incomplete set names the role that has to come."""
        service = judge_service(members, Topology.INCOMPLETE)  # type: ignore[arg-type]

        assert not service.servable
        assert missing in str(service.reason)

    def test_registered_but_not_ready(self) -> None:
        """A complete topology without a ready encoder is not servable."""
        service = judge_service([member(PD1, PD)], Topology.E_PD)

        assert (service.servable, service.reason) == (False, "no ready encode instance")

    def test_servable(self) -> None:
        """A ready instance of each role serves."""
        assert judge_service([member(E1), member(PD1, PD)], Topology.E_PD).servable
        assert judge_service([member(E1), member(P1, P), member(D1, D)], Topology.E_P_D).servable

    def test_models_must_meet(self) -> None:
        """Prefill and decode that serve different models make no chain."""
        a, b = frozenset({"a"}), frozenset({"b"})
        members = [member(E1, models=a), member(P1, P, models=a), member(D1, D, models=b)]

        assert not judge_service(members, Topology.E_P_D).servable
        assert "of model 'a'" in str(judge_service(members, Topology.E_P_D, "a").reason)

    def test_an_instance_without_models_serves_any(self) -> None:
        """An encoder that lists nothing joins the chain of every model."""
        members = [member(E1), member(PD1, PD, models=frozenset({"a"}))]

        assert judge_service(members, Topology.E_PD, "a").servable
        assert not judge_service(members, Topology.E_PD, "z").servable

    def test_groups_are_not_crossed(self) -> None:
        """Instances of different transfer groups make no chain."""
        apart = [member(E1, group="a"), member(PD1, PD, group="b")]

        assert not judge_service(apart, Topology.E_PD).servable
        assert judge_service([*apart, member(PD2, PD, group="a")], Topology.E_PD).servable

    def test_an_instance_without_a_group_fits_any(self) -> None:
        """An unlabelled encoder pairs with a labelled consumer."""
        assert judge_service([member(E2), member(PD1, PD, group="a")], Topology.E_PD).servable

    def test_the_whole_chain_must_fit(self) -> None:
        """An encoder that fits one prefill and a decode that fits another make no chain."""
        members = [
            member(E1, group="a"),
            member(P1, P, group="a"),
            member(PD1, P, group="b"),
            member(D1, D, group="b"),
        ]

        assert not judge_service(members, Topology.E_P_D).servable
        assert judge_service([*members, member(PD2, D, group="a")], Topology.E_P_D).servable

    def test_kv_connectors_must_agree(self) -> None:
        """Prefill and decode with different KV connectors make no chain; an encoder's does not matter."""
        members = [
            member(E1, kv_connector="mooncake"),
            member(P1, P, kv_connector="nixl"),
            member(D1, D, kv_connector="mooncake"),
        ]

        assert not judge_service(members, Topology.E_P_D).servable
        assert judge_service([*members, member(PD2, D, kv_connector="nixl")], Topology.E_P_D).servable
