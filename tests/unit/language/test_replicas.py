"""Which replica serves a request."""

from __future__ import annotations

import pytest

from epdctl.errors import InvalidRequest
from epdctl.worker.language.replicas import choose_replica, parse_rank

pytestmark = pytest.mark.unit


def test_a_named_rank_is_obeyed() -> None:
    """The header's rank is the replica; without a header none is named."""
    assert (parse_rank("2", 4), parse_rank(None, 4)) == (2, None)


@pytest.mark.parametrize("value", ["4", "-1", "x", "", "1.0", "٣"])
def test_a_wrong_rank_is_refused(value: str) -> None:
    """A rank that does not exist is a 400: its embeddings would be elsewhere."""
    with pytest.raises(InvalidRequest, match="from 0 to 3"):
        parse_rank(value, 4)


@pytest.mark.parametrize(
    ("ready", "loads", "turn", "expected"),
    [
        ([True, True, True], [0, 0, 0], 0, 0),
        ([True, True, True], [0, 0, 0], 2, 2),
        ([True, True, True], [1, 1, 0], 0, 2),
        ([False, True, True], [0, 3, 2], 0, 2),
        ([False, False], [1, 0], 0, 1),
    ],
)
def test_the_least_loaded_ready_replica_is_chosen(
    ready: list[bool], loads: list[int], turn: int, expected: int
) -> None:
    """Fewest requests wins, equals take turns, and one that is not ready is taken only when none is."""
    assert choose_replica(ready, loads, turn) == expected
