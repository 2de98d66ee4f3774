"""Every check of what stubs were asked: what passes, and what fails it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cases.expect_stub import check_consumer, check_file_server, check_upstream
from tests.cases.made_records import CHAT, answer, call, image
from tests.cases.world import World
from tests.stubs.consumer import ControlCall
from tests.stubs.instance import Call

pytestmark = pytest.mark.contract

STUB_TABLE: list[tuple[dict[str, Any], list[Call], list[Call]]] = [
    ({"calls": 1}, [call()], []),
    ({"calls_at_least": 1}, [call(), call()], []),
    ({"max_calls": 1}, [call()], [call(), call()]),
    ({"calls_by_step": {"q": 1}}, [call(at=10.05)], [call(at=11.0)]),
    ({"no_calls_after_s": 5}, [call(at=4.0)], [call(at=6.0)]),
    ({"body_path": {"n": 1}}, [call({"n": 1})], [call({"n": 1}), call({"n": 2})]),
    ({"body_path": {"n": 1}, "call": 0}, [call({"n": 1}), call({"n": 2})], [call({"n": 2})]),
    ({"each_body_path": {"n": None}}, [call({})], [call({"n": 0})]),
    ({"if_called": {"n": 1}}, [], [call({"n": 2})]),
    ({"absent": ["n"]}, [call({})], [call({"n": 1})]),
    ({"has": ["n"]}, [call({"n": 1})], [call({})]),
    ({"body_absent_or": {"n": [0, 1]}}, [call({"n": 1})], [call({"n": 2})]),
    ({"body_contains": "abc"}, [call(b"xabcx")], [call(b"x")]),
    ({"body_not_contains": ["abc"]}, [call(b"x")], [call(b"xabcx")]),
    ({"body_equals_client_except": ["n"]}, [call({"m": 1, "n": 2})], [call({"m": 2})]),
    ({"paths": [CHAT, "/health"]}, [call(), call(path="/v1/models")], [call(path="/evil")]),
    ({"header": {"A": "~b"}}, [call(headers=(("a", "abc"),))], [call()]),
    (
        {"each_header": {"A": ["1", None]}},
        [call(), call(headers=(("a", "1"),))],
        [call(headers=(("a", "2"),))],
    ),
    ({"header_not": {"Host": "evil"}}, [call()], [call(headers=(("host", "evil"),))]),
    ({"header_absent": ["A"]}, [call()], [call(headers=(("a", ""),))]),
    ({"header_max_len": 2}, [call(headers=(("a", "ab"),))], [call(headers=(("a", "abc"),))]),
    ({"distinct_header": {"A": 2}}, [call(), call(headers=(("a", "1"),))], [call()]),
    ({"distinct_mm_uuid_over_calls": 2}, [call(image("a")), call(image("b"))], [call(image("a"))]),
    (
        {"mm_uuid_relation": "equal"},
        [call(image("a")), call(image("a"))],
        [call(image("a")), call(image("b"))],
    ),
    (
        {"mm_uuid_relation": "distinct"},
        [call(image("a")), call(image("b"))],
        [call(image("a")), call(image("a"))],
    ),
    ({"mm_parts": 1}, [call(image("a"))], [call()]),
    ({"mm_order": ["x.png"]}, [call(image("known", "image_embeds"))], [call(image("other", "image_embeds"))]),
    ({"no_raw_image": True}, [call(image("a", "image_embeds"))], [call(image("a"))]),
    ({"grid_hw": "tall"}, [call(image("a", "image_embeds"))], [call()]),
    ({"client_closed_within_s": 1}, [call(client_left_at=10.5)], [call(client_left_at=12.0)]),
    ({"client_closed_within_s": 1}, [call(client_left_at=10.5)], [call()]),
]


@pytest.mark.parametrize(("words", "good", "bad"), STUB_TABLE, ids=lambda value: str(value)[:40])
def test_stub_checks(world: World, words: dict[str, Any], good: list[Call], bad: list[Call]) -> None:
    """A check on a stub passes right calls and fails wrong ones."""
    world.records.results["q"] = [answer(request_json={"m": 1})]
    world.pictures.names_by_url["data:,x"] = "x.png"
    world.stubs["e0"].calls = [call(image("known"))]
    world.stubs["d0"].calls = good
    assert list(check_upstream(world, {"upstream": "d0", **words})) == []
    world.stubs["d0"].calls = bad
    assert len(list(check_upstream(world, {"upstream": "d0", **words}))) == 1


class TestOtherStubs:
    """Expectations on all stubs, on consumers and on the file server."""

    def test_star_means_every_stub(self, world: World) -> None:
        """A star looks at the calls of all stubs, on all paths."""
        world.stubs["e0"].calls = [call(b"secret", path="/health")]
        assert len(list(check_upstream(world, {"upstream": "*", "body_not_contains": "secret"}))) == 1

    def test_consumer(self, world: World) -> None:
        """Control calls are counted by op, and each reserve is looked at."""
        reserve = ControlCall(frames=(), op="reserve", body={"op": "reserve", "nbytes": 32}, at=0)
        world.consumers["c0"].calls = [reserve]
        assert list(check_consumer(world, {"consumer": "c0", "each_reserve": {"nbytes": 32}})) == []
        assert len(list(check_consumer(world, {"consumer": "c0", "calls": {"cancel": 1}}))) == 1

    def test_file_server(self, world: World) -> None:
        """Fetches of a path are counted."""
        world.files.requests["/pic.png"] = 2
        assert list(check_file_server(world, {"fileserver": "/pic.png", "calls": 2})) == []
        assert len(list(check_file_server(world, {"fileserver": "/pic.png", "max_calls": 1}))) == 1
