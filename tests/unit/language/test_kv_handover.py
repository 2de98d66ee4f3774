"""Decisions of the KV hand-over: leases, addresses, tickets, messages."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import msgspec
import pytest

from epdctl.domain import Role
from epdctl.errors import InvalidRequest, KvUndelivered
from epdctl.worker.language.content import MediaRules
from epdctl.worker.language.handover import one_token, plan_kv
from epdctl.worker.language.kv_holds import Holds, InUse, NotHeld
from epdctl.worker.language.kv_layout import Extent, copy_pieces
from epdctl.worker.language.kv_messages import (
    BadKvMessage,
    Fetch,
    Fetched,
    KvShape,
    KvTicket,
    Refusal,
    RefusalCode,
    Release,
    encode_reply,
    encode_request,
    parse_fetched,
    parse_request,
    parse_ticket,
    prompt_digest,
)
from epdctl.worker.language.request import parse_chat
from tests.unit.language.small_spec import SPEC

pytestmark = pytest.mark.unit

SHAPE = KvShape(layers=2, kv_heads=3, head_dim=4, dtype="float32")


def ticket(ids: list[int]) -> KvTicket:
    """Return the ticket of a prompt."""
    return KvTicket(
        remote_engine_id="e",
        remote_request_id="r",
        remote_host="h",
        remote_port=5,
        remote_num_tokens=len(ids),
        lease_s=60,
        kv_shape=SHAPE,
        prompt_digest=prompt_digest(ids),
    )


class TestHolds:
    """Leases."""

    def test_what_is_held_can_be_taken_once(self) -> None:
        """A fetch gets the region, a second one is told that it is in use, after the end nothing is there."""
        holds: Holds[str] = Holds(10)
        holds.hold("a", "region", 7, now=0)

        assert holds.take("a", now=1) == ("region", 7)
        with pytest.raises(InUse):
            holds.take("a", now=1)
        assert (holds.settle("a"), len(holds)) == ("region", 0)
        with pytest.raises(NotHeld):
            holds.take("a", now=1)

    def test_a_lease_ends(self) -> None:
        """A decode that never comes frees the memory; one that comes too late gets nothing."""
        holds: Holds[str] = Holds(10)
        holds.hold("a", "region", 7, now=0)

        assert holds.expire(now=9.9) == []
        with pytest.raises(NotHeld):
            holds.take("a", now=10)
        assert (holds.expire(now=10), len(holds)) == (["region"], 0)

    def test_a_write_outlives_its_lease(self) -> None:
        """What is being read by a write is not given back by time or by a release."""
        holds: Holds[str] = Holds(10)
        holds.hold("a", "region", 7, now=0)
        holds.take("a", now=1)

        assert (holds.expire(now=100), holds.release("a"), holds.settle("a")) == ([], None, "region")

    def test_a_release_ends_a_lease_early(self) -> None:
        """KV that nobody wants goes at once, once."""
        holds: Holds[str] = Holds(10)
        holds.hold("a", "region", 7, now=0)

        assert (holds.release("a"), holds.release("a"), len(holds)) == ("region", None, 0)

    def test_regions_leave_exactly_once(self) -> None:
        """Over 20,000 random events every region comes back once."""
        draw = random.Random(4)
        holds: Holds[int] = Holds(5)
        held: set[int] = set()
        writing: set[int] = set()
        back: list[int] = []
        for now in range(20_000):
            name = draw.randint(0, now)
            match draw.randint(0, 4):
                case 0:
                    holds.hold(str(now), now, 1, now)
                    held.add(now)
                case 1:
                    with contextlib.suppress(NotHeld, InUse):
                        writing.add(holds.take(str(name), now)[0])
                case 2 if writing:
                    back.append(holds.settle(str(writing.pop())))
                case 3:
                    back += [r for r in [holds.release(str(name))] if r is not None]
                case _:
                    back += holds.expire(now)
        back += [holds.settle(str(region)) for region in writing]
        back += holds.expire(10**9)

        assert sorted(back) == sorted(held)
        assert len(holds) == 0


class TestLayout:
    """Addresses of a copy."""

    def test_each_part_is_one_run(self) -> None:
        """Keys and values of each layer are a run of bytes in both regions, whatever their capacities."""
        pieces = copy_pieces(
            SPEC, Extent(address=1000, capacity=5), Extent(address=90_000, capacity=9), tokens=4
        )
        row = 3 * 4 * 4

        assert [p.source for p in pieces] == [1000 + i * 5 * row for i in range(4)]
        assert [p.destination for p in pieces] == [90_000 + i * 9 * row for i in range(4)]
        assert {p.nbytes for p in pieces} == {4 * row}

    @pytest.mark.parametrize(("source", "target"), [(3, 9), (9, 3)])
    def test_what_does_not_fit_is_refused(self, source: int, target: int) -> None:
        """No byte is read or written outside of the two regions."""
        with pytest.raises(ValueError, match="do not fit"):
            copy_pieces(
                SPEC, Extent(address=1, capacity=source), Extent(address=1, capacity=target), tokens=4
            )


class TestPlan:
    """What kv_transfer_params mean."""

    def test_prefill_holds_when_asked(self) -> None:
        """A prefill worker keeps the KV exactly when a remote decode is announced."""
        asked = plan_kv(Role.PREFILL, {"do_remote_decode": True}, [1], has_images=False)
        plain = plan_kv(Role.PREFILL, None, [1], has_images=False)

        assert (asked.hold, plain.hold) == (True, False)

    def test_decode_takes_a_ticket(self) -> None:
        """A decode worker fetches what the ticket names."""
        params = msgspec.to_builtins(ticket([1, 2, 3]))

        assert plan_kv(Role.DECODE, params, [1, 2, 3], has_images=True).ticket == ticket([1, 2, 3])

    @pytest.mark.parametrize("ids", [[1, 2], [1, 2, 4]])
    def test_kv_of_another_prompt_is_not_taken(self, ids: list[int]) -> None:
        """A prefill that computed other tokens is an undelivered KV, never a wrong answer."""
        params = msgspec.to_builtins(ticket([1, 2, 3]))
        with pytest.raises(KvUndelivered, match="another prompt"):
            plan_kv(Role.DECODE, params, ids, has_images=False)

    @pytest.mark.parametrize(
        "params",
        [
            {"do_remote_prefill": True},
            {"do_remote_prefill": True, "remote_host": "h", "remote_port": "x"},
            {"do_remote_prefill": True, "remote_block_ids": [[1]], "remote_engine_id": "vllm"},
        ],
    )
    def test_foreign_parameters_are_named(self, params: dict[str, Any]) -> None:
        """Parameters of another connector are a 400 that names them."""
        with pytest.raises(InvalidRequest) as refused:
            plan_kv(Role.DECODE, params, [1], has_images=False)

        assert refused.value.param == "kv_transfer_params"

    def test_decode_computes_a_text_by_itself(self) -> None:
        """Without parameters a text is computed here, and a prompt with images is refused."""
        assert plan_kv(Role.DECODE, None, [1], has_images=False).ticket is None
        with pytest.raises(InvalidRequest, match="no embeddings"):
            plan_kv(Role.DECODE, None, [1], has_images=True)

    def test_prefill_decode_ignores_them(self) -> None:
        """A worker that does both neither holds nor fetches."""
        plan = plan_kv(Role.PREFILL_DECODE, {"do_remote_decode": True}, [1], has_images=False)

        assert (plan.hold, plan.ticket) == (False, None)

    def test_prefill_is_one_choice_of_one_token(self) -> None:
        """Whatever the request wants of decode, prefill chooses one token."""
        body = {"messages": [{"role": "user", "content": "x"}], "n": 4, "min_tokens": 5, "stop": "a"}
        rules = one_token(parse_chat(body, MediaRules(merge=2)).tokens)

        assert (rules.n, rules.max_tokens, rules.min_tokens, rules.stops) == (1, 1, 0, ())


class TestMessages:
    """Frames of the KV socket."""

    @pytest.mark.parametrize(
        "request_",
        [Fetch(kv_id="a", session="h:1", address=2**40, capacity=9), Release(kv_id="a")],
    )
    def test_requests_survive_the_wire(self, request_: Fetch | Release) -> None:
        """What is encoded is what is parsed."""
        assert parse_request(encode_request(request_)) == request_

    @pytest.mark.parametrize(
        "answer", [Fetched(digest="d", nbytes=5), Refusal(error="gone", code=RefusalCode.UNKNOWN)]
    )
    def test_answers_survive_the_wire(self, answer: Fetched | Refusal) -> None:
        """What is encoded is what is parsed."""
        assert parse_fetched(encode_reply(answer)) == answer

    @pytest.mark.parametrize(
        "frame",
        [
            b"",
            b"\xff",
            b"[]",
            b'{"op": "nope"}',
            b'{"op": "fetch"}',
            b'{"op": "fetch", "kv_id": "", "session": "s", "address": 1, "capacity": 1}',
            b'{"op": "fetch", "kv_id": "a", "session": "s", "address": -1, "capacity": 1}',
            b'{"op": "fetch", "kv_id": "a", "session": "s", "address": 1, "capacity": 0}',
            b'{"op": "fetch", "kv_id": "a", "session": "s", "address": 1.5, "capacity": 1}',
        ],
    )
    def test_foreign_frames_are_refused(self, frame: bytes) -> None:
        """Whatever else arrives is a BadKvMessage."""
        with pytest.raises(BadKvMessage):
            parse_request(frame)

    @pytest.mark.parametrize("frame", [b"", b"{}", b'{"ok": true}', b'{"ok": true, "result": {"digest": 5}}'])
    def test_foreign_answers_are_refused(self, frame: bytes) -> None:
        """An answer that is none is a BadKvMessage."""
        with pytest.raises(BadKvMessage):
            parse_fetched(frame)

    def test_a_ticket_survives_json(self) -> None:
        """kv_transfer_params travel through a proxy as JSON, with fields that others may have added."""
        params = msgspec.json.decode(msgspec.json.encode(ticket([5]))) | {"extra": 1}

        assert parse_ticket(params) == ticket([5])
