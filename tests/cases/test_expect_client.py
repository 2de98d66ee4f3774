"""Every check of an answer: what passes, what fails it, and which answers it is about."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cases.expect_client import check_exactly_one, check_step
from tests.cases.expectations import check_one
from tests.cases.http_client import Result
from tests.cases.made_records import DONE, answer, call
from tests.cases.world import World

pytestmark = pytest.mark.contract


def encoded(height: int, width: int, rows: int) -> Result:
    """Return an encode worker's answer about one picture that has `rows` rows."""
    entry = {"metadata": {"image_grid_thw": [1, height, width]}}
    return answer({"ec_transfer_params": {"h": entry}}, reply={"rows": rows})


REFUSED = {"ok": False, "error": "why"}
CLIENT_TABLE: list[tuple[dict[str, Any], Result, Result]] = [
    ({"grid_hw": "tall"}, encoded(4, 2, 2), encoded(2, 4, 2)),
    ({"if_200": "rows==prod(grid)//merge**2"}, encoded(4, 4, 4), encoded(4, 4, 5)),
    ({"if_200": "rows>=1"}, encoded(2, 2, 1), encoded(2, 2, 0)),
    ({"reply": {"ok": False}}, answer(reply=[REFUSED]), answer(reply=[REFUSED, {"ok": True}])),
    ({"reply": {"ok": False}}, answer(reply=[REFUSED]), answer(reply=[{"ok": False}])),
    ({"reply": {"ok": False}}, answer(reply=[REFUSED]), answer(reply=[None])),
    (
        {"reply": {"ok": False}, "timeout_s": 2},
        answer(reply=[REFUSED]),
        answer(reply=[REFUSED], started=10.0, ended=13.0),
    ),
    ({"push": "ok"}, answer(reply={"push": "ok"}), answer(reply={"push": "error"})),
    ({"status": [200]}, answer(), answer(status=503)),
    (
        {"status": [503], "or": "refused"},
        answer(status=None, failure="refused"),
        answer(status=None, failure="reset"),
    ),
    ({"never_status": [500]}, answer(), answer(status=500)),
    ({"never_status": [500]}, answer(), answer(status=None, failure="reset")),
    ({"last_status": [200], "last_n": 1}, answer(), answer(status=502)),
    ({"code": "overloaded"}, answer({"error": {"code": "overloaded"}}), answer({"error": {"code": "x"}})),
    ({"header": {"X-A": "~b"}}, answer(headers=[("x-a", "abc")]), answer(headers=[("x-a", "z")])),
    (
        {"header": {"Content-Type": "text/event-stream"}},
        answer(headers=[("Content-Type", "text/event-stream; charset=utf-8")]),
        answer(headers=[("Content-Type", "text/plain")]),
    ),
    ({"header_not": {"X-A": "1"}}, answer(headers=[("X-A", "2")]), answer(headers=[("X-A", "1")])),
    ({"header_absent": ["X-A"]}, answer(), answer(headers=[("x-a", "1")])),
    ({"header_max_len": 3}, answer(headers=[("X", "abc")]), answer(headers=[("X", "abcd")])),
    ({"json_path": {"a.0": 1}}, answer({"a": [1]}), answer({"a": [2]})),
    ({"json_path": "a", "equals": None}, answer({}), answer({"a": 1})),
    ({"json_path": "a", "one_of": [1, 2]}, answer({"a": 2}), answer({"a": 3})),
    ({"json_has": ["a.b"]}, answer({"a": {"b": None}}), answer({"a": {}})),
    ({"json_absent": ["a"]}, answer({}), answer({"a": None})),
    ({"json_parses": True}, answer({}), answer(b"{")),
    ({"one_of": ["error_event"]}, answer(b'data: {"error":{}}\n\n'), answer(DONE)),
    ({"one_of": ["transfer_aborted"]}, answer(b"x", complete=False, failure="reset"), answer(DONE)),
    ({"text": "hi"}, answer(DONE), answer(b"")),
    ({"text_contains": "h"}, answer({"choices": [{"message": {"content": "hi"}}]}), answer(b"")),
    ({"body_contains": ["a", "b"]}, answer(b"ab"), answer(b"a")),
    ({"body_not_contains": "a"}, answer(b"b"), answer(b"a")),
    ({"body_absent_or": {"n": [1]}}, answer({}), answer({"n": 2})),
    ({"error_contains": "no"}, answer({"error": {"message": "no way"}}), answer({"error": {"message": "x"}})),
    ({"ids": ["a", "b"]}, answer({"data": [{"id": "b"}, {"id": "a"}]}), answer({"data": [{"id": "a"}]})),
    ({"usage_chunks": 1}, answer(DONE), answer(b"data: [DONE]\n\n")),
    (
        {"usage_cached_in": [None, 16]},
        answer({"usage": {"prompt_tokens_details": {"cached_tokens": 16}}}),
        answer({"usage": {"prompt_tokens_details": {"cached_tokens": 8}}}),
    ),
    ({"ec_items": 1}, answer({"ec_transfer_params": {"h": {}}}), answer({"ec_transfer_params": None})),
    ({"sse": "complete"}, answer(DONE), answer(DONE[:-3])),
    ({"sse_absent": "[DONE]"}, answer(b"data: x\n\n"), answer(DONE)),
    ({"first_byte_ms_max": 60}, answer(), answer(first_byte_at=10.09)),
    ({"max_latency_ms": 150}, answer(), answer(ended=10.3)),
    ({"max_s": 0.15}, answer(), answer(ended=10.3)),
    ({"client_closed_within_s": 0.2}, answer(), answer(ended=11.0)),
    ({"min_gap_ms": 200}, answer(pieces=[(1.0, 5), (1.3, 5)]), answer(pieces=[(1.0, 5), (1.1, 5)])),
    ({"min_gap_ms": 200}, answer(pieces=[(1.0, 5), (1.3, 5)]), answer(pieces=[(1.3, 10)])),
    ({"if_200": {"json_has": ["a"]}}, answer({}, status=404), answer({})),
    ({"status": [200], "unless": "status 404 relayed"}, answer(), answer(status=500)),
]


@pytest.mark.parametrize(("words", "good", "bad"), CLIENT_TABLE, ids=lambda value: str(value)[:40])
def test_client_checks(world: World, words: dict[str, Any], good: Result, bad: Result) -> None:
    """A check on an answer passes a right one and fails a wrong one."""
    world.records.results["q"] = [good]
    assert list(check_step(world, {"step": "q", **words})) == []
    world.records.results["q"] = [bad]
    assert len(list(check_step(world, {"step": "q", **words}))) == 1


class TestSelection:
    """Which results an expectation is about."""

    def selected(self, world: World, words: dict[str, Any]) -> int:
        """Return how many of three results (200, 400, 500; item = number) fail `status [200]`."""
        world.records.results["q"] = [
            answer(index=i, status=status, item={"n": i}) for i, status in enumerate((200, 400, 500))
        ]
        return len(list(check_step(world, {"step": "q", "status": [200], **words})))

    @pytest.mark.parametrize(
        ("words", "failures"),
        [
            ({}, 2),
            ({"index": 0}, 0),
            ({"index": 2}, 1),
            ({"first_n": 1}, 0),
            ({"last_n": 2}, 2),
            ({"except": [{"n": 2}]}, 1),
            ({"unless": "status 500 relayed"}, 1),
        ],
    )
    def test_modifiers_select(self, world: World, words: dict[str, Any], failures: int) -> None:
        """Index, first, last, except and unless narrow the results."""
        assert self.selected(world, words) == failures

    def test_a_step_without_results_fails(self, world: World) -> None:
        """An expectation on a step that never ran is not met."""
        assert list(check_step(world, {"step": "nobody", "status": [200]})) == [
            "step 'nobody' has no results"
        ]

    def test_exactly_one(self, world: World) -> None:
        """Exactly one of two steps may meet the rest of the expectation."""
        world.records.results |= {"a": [answer(DONE)], "b": [answer(b"")]}
        words = {"exactly_one_of": ["a", "b"], "sse": "complete"}
        assert list(check_exactly_one(world, words)) == []
        world.records.results["b"] = [answer(DONE)]
        assert len(list(check_exactly_one(world, words))) == 1

    async def test_an_alternative_saves(self, world: World) -> None:
        """Under `or` another expectation on the same step may hold instead."""
        world.records.results["q"] = [answer(status=502)]
        assert await check_one(world, {"step": "q", "status": [200], "or": {"status": [502]}}) == []
        assert await check_one(world, {"step": "q", "status": [200], "or": [{"status": [503]}]}) != []

    def test_variants(self, world: World) -> None:
        """The status is the upstream's own, or a translation that the case allows."""
        world.records.variants = [{"status": 429}]
        world.records.results["q"] = [answer(status=503)]
        assert len(list(check_step(world, {"step": "q", "status_equals_variant": True}))) == 1
        words = {"step": "q", "status_equals_variant": True, "alt_status": {"429": [503]}}
        assert list(check_step(world, words)) == []

    def test_comparisons_with_other_answers(self, world: World) -> None:
        """Answers are compared without their id and time."""
        first, same = answer({"id": "1", "a": 1}), answer({"id": "2", "a": 1}, index=1)
        world.records.results |= {"q": [first, same], "other": [answer({"a": 2})]}
        assert list(check_step(world, {"step": "q", "equals_baseline": True})) == []
        assert len(list(check_step(world, {"step": "q", "same_as": "other"}))) == 2

    def test_bytes_of_the_upstream(self, world: World) -> None:
        """The client's bytes are those that a decode stub sent, and come soon after."""
        world.stubs["d0"].calls = [call(sent=DONE, at=10.01, first_sent_at=10.02)]
        world.records.results["q"] = [answer(DONE, pieces=[(10.05, 9)])]
        assert list(check_step(world, {"step": "q", "bytes_equal_upstream": True})) == []
        assert list(check_step(world, {"step": "q", "first_byte_after_upstream_ms_max": 40})) == []
        assert len(list(check_step(world, {"step": "q", "first_byte_after_upstream_ms_max": 20}))) == 1
        world.records.results["q"] = [answer(DONE + b"x")]
        assert len(list(check_step(world, {"step": "q", "bytes_equal_upstream": True}))) == 1
