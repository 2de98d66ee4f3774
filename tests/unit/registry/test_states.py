"""The table of an instance's life."""

from __future__ import annotations

import pytest

from epdctl.domain import InstanceState as S
from epdctl.registry.states import REMOVED, TRANSITIONS, Trigger, applies, next_state

pytestmark = pytest.mark.unit

EXPECTED = {
    S.PENDING: {"up": S.READY, "drain": S.DRAINING, "expire": REMOVED, "remove": REMOVED},
    S.READY: {"down": S.EVICTED, "drain": S.DRAINING, "remove": REMOVED},
    S.EVICTED: {"up": S.READY, "drain": S.DRAINING, "expire": REMOVED, "remove": REMOVED},
    S.DRAINING: {"idle": REMOVED, "deadline": REMOVED, "remove": REMOVED},
}


@pytest.mark.parametrize("state", list(S))
@pytest.mark.parametrize("trigger", list(Trigger))
def test_every_pair_is_decided(state: S, trigger: Trigger) -> None:
    """Each pair of state and trigger leads where the page says, or nowhere at all."""
    row = EXPECTED[state]

    assert applies(state, trigger) is (trigger.value in row)
    if trigger.value in row:
        assert next_state(state, trigger) == row[trigger.value]


def test_a_missing_pair_is_an_error() -> None:
    """Asking where a pair leads that is not in the table raises instead of guessing."""
    with pytest.raises(KeyError):
        next_state(S.DRAINING, Trigger.UP)


def test_every_state_can_be_left_by_removal() -> None:
    """An operator can remove an instance whatever it is doing."""
    assert all(TRANSITIONS[state, Trigger.REMOVE] is REMOVED for state in S)
