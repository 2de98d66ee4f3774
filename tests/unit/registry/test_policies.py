"""How one of several ready instances is chosen."""

from __future__ import annotations

from collections import Counter
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epdctl.domain import InstanceUrl
from epdctl.registry.policies import BOUNDED_LOAD_FACTOR, Policy, choose
from epdctl.registry.snapshot import Member
from tests.unit.registry.build import member

pytestmark = pytest.mark.unit


def fleet(count: int) -> list[Member]:
    """Return `count` members."""
    return [member(InstanceUrl(f"http://e{n}:8001")) for n in range(count)]


def pick(policy: str, members: list[Member], **inputs: object) -> tuple[Member, int]:
    """Choose with `inputs` laid over plain ones."""
    given: dict[str, object] = {"cursor": 0, "loads": {}, "key": None, "draw": 0.0}
    return choose(policy, members, **(given | inputs))  # type: ignore[arg-type]


class TestRoundRobin:
    """`round_robin`."""

    def test_takes_turns(self) -> None:
        """Each candidate comes once before the first comes again."""
        members, cursor, seen = fleet(3), 0, []
        for _ in range(6):
            chosen, cursor = pick("round_robin", members, cursor=cursor)
            seen.append(chosen.url)

        assert seen == [m.url for m in members] * 2

    def test_a_join_does_not_restart_the_round(self) -> None:
        """A new candidate does not send the next request to the first one again."""
        _, cursor = pick("round_robin", fleet(2), cursor=0)

        chosen, _ = pick("round_robin", fleet(3), cursor=cursor)

        assert chosen.url == "http://e1:8001"


class TestLeastInflight:
    """`least_inflight`."""

    def test_takes_the_least_loaded(self) -> None:
        """The candidate with the fewest calls in flight is chosen."""
        members = fleet(3)
        loads = {members[0].url: 2, members[1].url: 1, members[2].url: 3}

        assert pick("least_inflight", members, loads=loads)[0] is members[1]

    def test_equals_take_turns(self) -> None:
        """Idle candidates share single requests instead of all going to the first."""
        members, cursor, seen = fleet(3), 0, Counter[str]()
        for _ in range(9):
            chosen, cursor = pick("least_inflight", members, cursor=cursor)
            seen[chosen.url] += 1

        assert set(seen.values()) == {3}


class TestPowerOfTwo:
    """`power_of_two`."""

    def test_every_pair_comes_up(self) -> None:
        """All draws together compare every ordered pair of different candidates, equally often."""
        members = fleet(4)
        loads = {m.url: -index for index, m in enumerate(members)}
        draws = [(n + 0.5) / 12 for n in range(12)]

        chosen = Counter(pick("power_of_two", members, loads=loads, draw=d)[0].url for d in draws)

        assert chosen == {members[3].url: 6, members[2].url: 4, members[1].url: 2}

    @given(count=st.integers(1, 9), draw=st.floats(0, 1, exclude_max=True))
    def test_any_draw_is_good(self, count: int, draw: float) -> None:
        """No draw leads outside the candidates."""
        members = fleet(count)

        assert pick("power_of_two", members, draw=draw)[0] in members


class TestConsistentHashing:
    """`consistent_hashing`."""

    def test_same_key_same_instance(self) -> None:
        """A key keeps its instance whatever the order of the candidates is."""
        members = fleet(5)

        there = pick("consistent_hashing", members, key=b"picture")[0]
        back = pick("consistent_hashing", members[::-1], key=b"picture")[0]

        assert there is back

    def test_a_leaving_instance_moves_only_its_own_keys(self) -> None:
        """Keys of the others stay where their encoder's cache has them."""
        members = fleet(5)
        keys = [str(n).encode() for n in range(500)]
        before = {key: pick("consistent_hashing", members, key=key)[0] for key in keys}

        moved = [k for k in keys if pick("consistent_hashing", members[1:], key=k)[0] is not before[k]]

        assert moved
        assert all(before[key] is members[0] for key in moved)

    def test_keys_spread(self) -> None:
        """No instance gets more than twice its share of many keys."""
        members = fleet(4)
        shares = Counter(pick("consistent_hashing", members, key=str(n).encode())[0].url for n in range(1000))

        assert max(shares.values()) < 2 * 1000 / 4
        assert len(shares) == 4

    @given(st.lists(st.integers(0, 50), min_size=1, max_size=8), st.binary(max_size=16))
    def test_load_is_bounded(self, loads: list[int], key: bytes) -> None:
        """A chosen instance is below the bound: a hot key spills over instead of drowning its encoder."""
        members = fleet(len(loads))
        by_url = {m.url: load for m, load in zip(members, loads, strict=True)}

        chosen, _ = pick("consistent_hashing", members, loads=by_url, key=key)

        assert by_url[chosen.url] < ceil(BOUNDED_LOAD_FACTOR * (sum(loads) + 1) / len(loads))

    def test_without_a_key_it_takes_turns(self) -> None:
        """Nothing to hash falls back to round robin."""
        members = fleet(2)

        assert pick("consistent_hashing", members, cursor=1) == (members[1], 2)


@given(
    policy=st.sampled_from([p.value for p in Policy]),
    count=st.integers(1, 6),
    cursor=st.integers(0, 1 << 40),
    draw=st.floats(0, 1, exclude_max=True),
    key=st.none() | st.binary(max_size=8),
)
def test_choice_is_a_candidate_and_cursors_never_go_back(
    policy: str, count: int, cursor: int, draw: float, key: bytes | None
) -> None:
    """Every policy chooses a candidate, and the next cursor is the same or one more."""
    members = fleet(count)

    chosen, after = pick(policy, members, cursor=cursor, draw=draw, key=key)

    assert chosen in members
    assert after - cursor in (0, 1)


def test_no_candidates_is_a_fault_of_the_caller() -> None:
    """Choosing among nobody raises."""
    with pytest.raises(ValueError, match="candidate"):
        pick("round_robin", [])


def test_an_unknown_policy_is_refused() -> None:
    """A misspelt policy is not taken for round robin."""
    with pytest.raises(ValueError, match="robin_round"):
        pick("robin_round", fleet(1))
