"""Which instances serve a request."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epdctl.domain import InstanceUrl, Modality, Role
from epdctl.errors import NoInstance, UnknownModel
from epdctl.proxy.plan import (
    Cursors,
    Demand,
    ItemDemand,
    Policies,
    RoutePlan,
    find_able,
    plan_encoders,
    plan_route,
)
from epdctl.registry.policies import Policy
from epdctl.registry.snapshot import Member, Roster
from tests.unit.proxy.build import member, roster

pytestmark = pytest.mark.unit

E0, E1, E2 = (member(f"e{n}", Role.ENCODE) for n in range(3))
P0, P1 = (member(f"p{n}", Role.PREFILL) for n in range(2))
D0, D1 = (member(f"d{n}", Role.DECODE) for n in range(2))
PD0, PD1 = (member(f"pd{n}", Role.PREFILL_DECODE) for n in range(2))
ROUND = Policies(encode=Policy.ROUND_ROBIN, prefill=Policy.ROUND_ROBIN, decode=Policy.ROUND_ROBIN)


def images(count: int) -> tuple[ItemDemand, ...]:
    """Return `count` images to encode."""
    return tuple(ItemDemand(index=n, modality=Modality.IMAGE, key=str(n).encode()) for n in range(count))


def plan(
    on: Roster,
    demand: Demand | None = None,
    cursors: Cursors | None = None,
    policies: Policies = ROUND,
    loads: Mapping[InstanceUrl, int] | None = None,
) -> tuple[RoutePlan, Cursors]:
    """Plan with defaults."""
    demand = demand or Demand()
    return plan_route(
        find_able(on, demand.model, has_media=bool(demand.items)),
        cursors or Cursors(),
        demand,
        policies=policies,
        loads=loads or {},
        draw=lambda: 0.0,
    )


def encoders_of(made: RoutePlan) -> list[tuple[InstanceUrl, tuple[int, ...]]]:
    """Return who encodes what."""
    return [(batch.member.url, batch.items) for batch in made.batches]


class TestRotation:
    """Whose turn it is."""

    def test_text_needs_no_encoder(self) -> None:
        """A text-only request is served without encoders and moves no encoder's turn."""
        made, cursors = plan(roster(PD0))

        assert (made.batches, made.prefill, made.decode) == ((), None, PD0)
        assert cursors == Cursors(decode=1)

    def test_encoders_take_turns_over_requests(self) -> None:
        """Single-image requests go round; the rotation does not restart with each request."""
        cursors, seen = Cursors(), []
        for _ in range(6):
            made, cursors = plan(roster(E0, E1, E2, PD0), Demand(items=images(1)), cursors)
            seen.append(made.batches[0].member)

        assert seen == [E0, E1, E2, E0, E1, E2]

    def test_images_of_one_encoder_share_a_call(self) -> None:
        """Items go round by item, and those of one encoder travel together."""
        made, _ = plan(roster(E0, E1, PD0), Demand(items=images(5)))

        assert encoders_of(made) == [(E0.url, (0, 2, 4)), (E1.url, (1, 3))]

    def test_calls_are_cut_at_the_limit(self) -> None:
        """ENCODER_MAX_BATCH_SIZE bounds the images of one call."""
        made, _ = plan(roster(E0, PD0), Demand(items=images(5), batch_limit=2))

        assert encoders_of(made) == [(E0.url, (0, 1)), (E0.url, (2, 3)), (E0.url, (4,))]

    def test_audio_and_video_go_alone(self) -> None:
        """Only images share a call."""
        kinds = (Modality.IMAGE, Modality.AUDIO, Modality.VIDEO, Modality.IMAGE)
        items = tuple(ItemDemand(index=n, modality=kind, key=b"") for n, kind in enumerate(kinds))
        made, _ = plan(roster(E0, PD0), Demand(items=items))

        assert encoders_of(made) == [(E0.url, (0, 3)), (E0.url, (1,)), (E0.url, (2,))]

    def test_prefill_and_decode_rotate_by_themselves(self) -> None:
        """Each stage has its own turn."""
        cursors, pairs = Cursors(), []
        for _ in range(4):
            made, cursors = plan(roster(P0, D0, D1), cursors=cursors)
            pairs.append((made.prefill, made.decode))

        assert pairs == [(P0, D0), (P0, D1), (P0, D0), (P0, D1)]


class TestReplicas:
    """Which replica receives embeddings."""

    def test_a_replica_is_named_with_its_address(self) -> None:
        """The consumer's replica goes round and carries its own EC address."""
        consumer = replace(PD0, dp_size=2, ec_zmq_addrs=("tcp://c:1", "tcp://c:2"))
        cursors, named = Cursors(), []
        for _ in range(3):
            made, cursors = plan(roster(E0, consumer), Demand(items=images(1)), cursors)
            named.append((made.consumer.rank, made.consumer.ec_zmq_addr))

        assert named == [(0, "tcp://c:1"), (1, "tcp://c:2"), (0, "tcp://c:1")]

    def test_every_replica_of_several_instances_gets_its_turn(self) -> None:
        """Two instances with two replicas each: all four are used, not only every other one."""
        on = roster(replace(PD0, dp_size=2), replace(PD1, dp_size=2))
        cursors, seen = Cursors(), set()
        for _ in range(4):
            made, cursors = plan(on, cursors=cursors)
            seen.add((made.consumer.url, made.consumer.rank))

        assert len(seen) == 4

    def test_the_prefill_is_the_consumer_of_a_split(self) -> None:
        """In E+P+D embeddings go to prefill."""
        made, _ = plan(roster(E0, replace(P0, ec_zmq_addrs=("tcp://p:1",)), D0), Demand(items=images(1)))

        assert (made.consumer.url, made.consumer.ec_zmq_addr) == (P0.url, "tcp://p:1")


class TestWhoIsMissing:
    """What a plan that cannot be made says."""

    @pytest.mark.parametrize(
        ("members", "items", "code"),
        [
            ((), 0, "no_decode_instance"),
            ((E0,), 0, "no_decode_instance"),
            ((PD0,), 1, "no_encode_instance"),
            ((E0,), 1, "no_decode_instance"),
            ((P0,), 0, "no_decode_instance"),
            ((D0,), 0, "no_prefill_instance"),
            ((P0, D0), 1, "no_encode_instance"),
        ],
    )
    def test_the_missing_role_is_named(self, members: tuple[Member, ...], items: int, code: str) -> None:
        """A stage without a ready instance is a 503 that names it."""
        with pytest.raises(NoInstance) as caught:
            plan(roster(*members), Demand(items=images(items)))

        assert caught.value.code == code
        assert caught.value.retry_after_s == 1

    def test_a_failed_plan_moves_nothing(self) -> None:
        """Hazard 45: cursors come only with a complete plan."""
        cursors = Cursors(encode=3, prefill=4, decode=5)
        with pytest.raises(NoInstance):
            plan(roster(PD0, PD1), Demand(items=images(2)), cursors)

        assert cursors == Cursors(encode=3, prefill=4, decode=5)


class TestModels:
    """Instances that serve the model."""

    A, B = frozenset({"a"}), frozenset({"b"})

    def test_requests_go_where_their_model_is(self) -> None:
        """Only instances that list the model, or list none, are chosen."""
        on = roster(replace(E0, models=self.A), E1, replace(PD0, models=self.A), replace(PD1, models=self.B))
        made, _ = plan(on, Demand(model="b", items=images(2)))

        assert made.decode.url == PD1.url
        assert encoders_of(made) == [(E1.url, (0, 1))]

    def test_an_unknown_model_is_named_with_the_known_ones(self) -> None:
        """When every stage is there and nobody lists the model, it is a 404 with what there is."""
        on = roster(replace(E0, models=self.A), replace(PD0, models=self.B))
        with pytest.raises(UnknownModel, match="a, b"):
            plan(on, Demand(model="c", items=images(1)))

    def test_half_a_chain_is_no_chain(self) -> None:
        """A prefill of one model is never followed by a decode of another."""
        on = roster(replace(P0, models=self.A), replace(D0, models=self.B))
        with pytest.raises(NoInstance) as caught:
            plan(on, Demand(model="a"))

        assert caught.value.code == "no_decode_instance"

    def test_without_a_model_any_instance_serves(self) -> None:
        """A request that names no model gets the engine's default."""
        assert plan(roster(replace(PD0, models=self.A)))[0].decode.url == PD0.url


class TestGroups:
    """Instances that may exchange data."""

    def test_only_instances_of_one_group_are_paired(self) -> None:
        """`labels.group` keeps transfers inside a group; an instance without one fits any."""
        on = roster(
            replace(E0, group="x"),
            replace(E1, group="y"),
            E2,
            replace(P0, group="y"),
            replace(D0, group="x"),
            replace(D1, group="y"),
        )
        made, _ = plan(on, Demand(items=images(2)))

        assert (made.prefill, made.decode) == (on.by_role(Role.PREFILL)[0], on.by_role(Role.DECODE)[1])
        assert [url for url, _ in encoders_of(made)] == [E1.url, E2.url]

    @pytest.mark.parametrize("field", ["group", "kv_connector"])
    def test_no_pair_is_no_plan(self, field: str) -> None:
        """A prefill and a decode that cannot exchange data are never paired."""
        on = roster(replace(P0, **{field: "x"}), replace(D0, **{field: "y"}))
        with pytest.raises(NoInstance) as caught:
            plan(on)

        assert caught.value.code == "no_decode_instance"

    def test_a_consumer_that_no_encoder_reaches_is_passed_over(self) -> None:
        """Text may go to any consumer, media only to one with an encoder in its group."""
        on = roster(replace(E0, group="x"), replace(PD0, group="y"), replace(PD1, group="x"))

        assert plan(on)[0].decode.url == PD0.url
        assert plan(on, Demand(items=images(1)))[0].decode.url == PD1.url

    def test_the_kv_connector_is_no_encoders_affair(self) -> None:
        """Encoders hand over embeddings, not KV caches."""
        on = roster(replace(E0, kv_connector="nixl"), replace(PD0, kv_connector="mooncake"))

        assert plan(on, Demand(items=images(1)))[0].decode.url == PD0.url


class TestAvoiding:
    """Instances that failed just now."""

    def test_another_instance_takes_over(self) -> None:
        """An instance that failed just now is not chosen while another exists."""
        demand = Demand(items=images(2), avoid=frozenset({E0.url, PD1.url}))
        made, _ = plan(roster(E0, E1, PD0, PD1), demand, Cursors(decode=1))

        assert made.decode == PD0
        assert encoders_of(made) == [(E1.url, (0, 1))]

    def test_the_only_instance_is_tried_again(self) -> None:
        """Without another one, the one that failed is asked again."""
        assert plan(roster(PD0), Demand(avoid=frozenset({PD0.url})))[0].decode == PD0


class TestPolicies:
    """The other policies than rotation."""

    def test_consistent_hashing_sends_an_item_to_its_encoder(self) -> None:
        """The same key meets the same encoder, so its cache is hit."""
        hashing = replace(ROUND, encode=Policy.CONSISTENT_HASHING)
        one, _ = plan(roster(E0, E1, E2, PD0), Demand(items=images(1)), policies=hashing)
        two, _ = plan(roster(E0, E1, E2, PD0), Demand(items=images(1)), Cursors(encode=7), policies=hashing)

        assert encoders_of(one) == encoders_of(two)

    def test_items_of_one_request_count_as_load(self) -> None:
        """Least in flight spreads the items of one request too."""
        least = replace(ROUND, encode=Policy.LEAST_INFLIGHT)
        made, _ = plan(
            roster(E0, E1, PD0), Demand(items=images(4)), policies=least, loads={E0.url: 2, PD0.url: 9}
        )

        assert encoders_of(made) == [(E1.url, (0, 1, 3)), (E0.url, (2,))]


def test_items_can_be_planned_again_by_themselves() -> None:
    """The items of a failed call go to another encoder; only the encoders' turn moves."""
    batches, cursors = plan_encoders(
        find_able(roster(E0, E1, PD0), None, has_media=True),
        Cursors(encode=1, decode=5),
        Demand(items=images(2)[1:], avoid=frozenset({E0.url})),
        consumer=PD0,
        policy=Policy.ROUND_ROBIN,
        loads={},
        draw=lambda: 0.0,
    )

    assert [(batch.member, batch.items) for batch in batches] == [(E1, (1,))]
    assert cursors == Cursors(encode=2, decode=5)


members = st.builds(
    lambda number, role, group, models, dp: replace(
        member(f"{role.value}-{number}", role), group=group, models=models, dp_size=dp
    ),
    st.integers(0, 3),
    st.sampled_from(list(Role)),
    st.sampled_from([None, "x", "y"]),
    st.sampled_from([None, frozenset({"a"}), frozenset({"a", "b"})]),
    st.sampled_from([1, 2]),
)
fleets = st.lists(members, max_size=8, unique_by=lambda m: m.url)
policies = st.builds(
    Policies, encode=st.sampled_from(Policy), prefill=st.sampled_from(Policy), decode=st.sampled_from(Policy)
)


@given(fleets, policies, st.sampled_from([None, "a", "b", "c"]), st.integers(0, 4), st.data())
def test_a_plan_uses_only_ready_members_that_fit(
    fleet: list[Member], chosen: Policies, model: str | None, count: int, data: Any
) -> None:
    """No plan uses an instance that is not in the roster, lacks the model, or is of another group."""
    avoid = frozenset(data.draw(st.sets(st.sampled_from([m.url for m in fleet]))) if fleet else ())
    demand = Demand(model=model, items=images(count), avoid=avoid)
    try:
        made, _ = plan(roster(*fleet), demand, policies=chosen)
    except (NoInstance, UnknownModel):
        return

    used = [batch.member for batch in made.batches] + [m for m in (made.prefill, made.decode) if m]
    assert all(one in fleet and one.serves(model) for one in used)
    assert sorted(index for batch in made.batches for index in batch.items) == list(range(count))
    consumer = made.prefill or made.decode
    pairs = [(batch.member, consumer) for batch in made.batches] + [(consumer, made.decode)]
    assert all(None in (one.group, other.group) or one.group == other.group for one, other in pairs)
    assert made.consumer.url == consumer.url
    assert 0 <= made.consumer.rank < consumer.dp_size


def test_rotation_is_fair_over_many_requests() -> None:
    """Over a whole number of rounds every encoder gets the same number of items."""
    cursors = Cursors()
    counts = dict.fromkeys((E0.url, E1.url, E2.url), 0)
    for count in itertools.islice(itertools.cycle([1, 2, 4]), 30):
        made, cursors = plan(roster(E0, E1, E2, PD0), Demand(items=images(count)), cursors)
        for url, items in encoders_of(made):
            counts[url] += len(items)

    assert max(counts.values()) - min(counts.values()) <= 1
