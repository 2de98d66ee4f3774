"""The roster as routing sees it."""

from __future__ import annotations

import dataclasses

import pytest

from epdctl.domain import Role, Topology
from epdctl.registry.snapshot import EMPTY_ROSTER, Roster
from tests.unit.registry.build import E1, E2, PD1, member

pytestmark = pytest.mark.unit


def test_members_by_role_keep_their_order() -> None:
    """Members of a role come in the order of registration."""
    roster = Roster(
        version=1,
        topology=Topology.E_PD,
        members=(member(E2), member(PD1, Role.PREFILL_DECODE), member(E1)),
    )

    assert [m.url for m in roster.by_role(Role.ENCODE)] == [E2, E1]
    assert roster.by_role(Role.DECODE) == ()


def test_known_models_are_sorted_and_unique() -> None:
    """A model that two members list is named once."""
    roster = Roster(
        version=1,
        topology=Topology.E_PD,
        members=(member(E1, models=frozenset("ba")), member(E2, models=frozenset("cb")), member(PD1)),
    )

    assert roster.known_models == ("a", "b", "c")


@pytest.mark.parametrize(
    ("models", "model", "serves"),
    [
        (None, "m", True),
        (frozenset(), "m", True),
        (frozenset({"m"}), "m", True),
        (frozenset({"m"}), "n", False),
        (frozenset({"m"}), None, True),
    ],
)
def test_serves(models: frozenset[str] | None, model: str | None, serves: bool) -> None:
    """A member that lists no models serves any; one that lists some serves those."""
    assert member(models=models).serves(model) is serves


def test_a_roster_cannot_be_changed() -> None:
    """Whoever holds a roster can trust it."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        EMPTY_ROSTER.version = 2  # type: ignore[misc]
