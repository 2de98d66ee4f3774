"""Every check of an expectation: what passes, and what fails it."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.cases.expect_client import check_exactly_one, check_step
from tests.cases.expect_process import PROCESS_CHECKS
from tests.cases.expect_stub import check_consumer, check_file_server, check_upstream
from tests.cases.expect_worker import WORKER_CHECKS
from tests.cases.expectations import check_one
from tests.cases.http_client import Result
from tests.cases.loader import load_case
from tests.cases.world import World
from tests.stubs.consumer import ControlCall, StubConsumer
from tests.stubs.instance import Call, StubInstance

pytestmark = pytest.mark.contract

CASE = {"id": "X1", "target": "proxy", "steps": [], "expect": []}
DONE = (
    b'data: {"choices":[{"delta":{"content":"hi"}}]}\n\n'
    b'data: {"choices":[],"usage":{"n":1}}\n\n'
    b"data: [DONE]\n\n"
)
CHAT = "/v1/chat/completions"
LISTING = {"decode": {"live": ["http://127.0.0.1:1"], "evicted": []}, "encode": {"evicted": ["x"]}}


@pytest.fixture
def world(tmp_path: Path) -> World:
    """Return a world in which nothing runs: a decode stub `d0`, an encoder `e0`, a consumer `c0`."""
    path = tmp_path / "X1-made.json"
    path.write_text(json.dumps(CASE))
    made = World(load_case(path), tmp_path)
    made.stubs = {"d0": StubInstance("decode", port=1), "e0": StubInstance("encode", port=2)}
    made.consumers = {"c0": StubConsumer(port=3)}
    return made


def answer(body: Any = b"", **fields: Any) -> Result:
    """Return a whole answer of a step `q`, 200 unless said otherwise, that took 100 ms."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    given: dict[str, Any] = {"status": 200, "complete": True, "started": 10.0, "ended": 10.1}
    given["first_byte_at"] = 10.05
    return Result(**{"step": "q", "index": 0, "body": data, **given, **fields})


def call(body: Any = None, **fields: Any) -> Call:
    """Return a recorded call of a generation route."""
    data = body if isinstance(body, bytes) else json.dumps(body if body is not None else {}).encode()
    given: dict[str, Any] = {"method": "POST", "path": CHAT, "target": CHAT, "headers": (), "connection": 1}
    return Call(**{**given, "at": 10.0, "body": data, **fields})


def image(uuid: str, kind: str = "image_url") -> dict[str, Any]:
    """Return a chat body with one media part."""
    holder = {"url": "data:,x"} if kind == "image_url" else {"image_grid_thw": [1, 8, 4]}
    part = {"type": kind, kind: holder, "uuid": uuid}
    return {"messages": [{"role": "user", "content": [part]}]}


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


async def judged(world: World, words: dict[str, Any]) -> list[str]:
    """Return the failures of an expectation on the process."""
    check = next(PROCESS_CHECKS[word] for word in PROCESS_CHECKS if word in words)
    return [failure async for failure in check(world, words)]


class TestProcessChecks:
    """Expectations that look at recorded outputs."""

    @pytest.fixture(autouse=True)
    def _no_patience(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("tests.cases.expect_process.PATIENCE_S", 0.0)

    @pytest.mark.parametrize(
        ("words", "failures"),
        [
            ({"instance": "d0", "state": "live"}, 0),
            ({"instance": "d0", "state": "evicted"}, 1),
            ({"instance": "e0", "state": "live"}, 1),
            ({"all_state": "live"}, 1),
            ({"count": {"d0": 1}}, 0),
            ({"count": {"e0": 1}}, 1),
        ],
    )
    async def test_listings(self, world: World, words: dict[str, Any], failures: int) -> None:
        """States are read from a listing that a step fetched."""
        world.records.results["l"] = [answer(LISTING)]
        assert len(await judged(world, {"step": "l", **words})) == failures

    @pytest.mark.parametrize(
        ("words", "failures"),
        [
            ({"log": "absent", "text": "Traceback"}, 0),
            ({"log": "absent", "text": "evicted"}, 1),
            ({"log": "contains", "text": "evicted"}, 0),
            ({"log": "contains", "text": "nothing"}, 1),
            ({"log": "count", "text": "EVICT", "instance": "d0", "max": 1}, 0),
            ({"log": "count", "text": "evict", "max": 1}, 1),
            ({"log": "json_line", "where": {"request_id": "r"}, "has": ["status"]}, 0),
            ({"log": "json_line", "where": {"request_id": "r"}, "has": ["missing"]}, 1),
            ({"log": "lines_printable", "value": True}, 1),
        ],
    )
    async def test_logs(
        self, world: World, monkeypatch: pytest.MonkeyPatch, words: dict[str, Any], failures: int
    ) -> None:
        """Lines are searched, counted for an instance, and read as JSON."""
        text = 'evicted http://127.0.0.1:1\nevicted x\x1b\n{"request_id": "r", "status": 200}\n'
        monkeypatch.setattr(World, "logs", text)
        assert len(await judged(world, words)) == failures

    async def test_series_growth(self, world: World) -> None:
        """New series between two scrapes are counted."""
        world.records.results |= {"a": [answer(b"x 1\n")], "b": [answer(b'x 1\ny{a="1"} 2\n')]}
        words = {"from": "a", "to": "b"}
        assert await judged(world, {**words, "series_growth_max": 1}) == []
        assert len(await judged(world, {**words, "series_growth_max": 0})) == 1

    async def test_sums_scans_and_canary(self, world: World, tmp_path: Path) -> None:
        """Each count, exit, process or file that is not as wanted is one failure."""
        world.stubs["d0"].calls = [call(ended_at=time.monotonic()), call()]
        world.records.scan_hits, world.canary.connections = 1, 1
        wrong: list[dict[str, Any]] = [
            {"sum_calls": ["d0", "e0"], "max": 1},
            {"scan_hits": 0},
            {"canary": "connections", "equals": 0},
            {"path_absent": str(tmp_path)},
            {"no_orphan_upstream_connection_after_s": 0},
            {"process": "alive"},
            {"exit_nonzero_within_s": 1},
            {"proxy_exit_within_s": 1},
            {"pairing": "by moonlight"},
        ]
        assert [len(await judged(world, words)) for words in wrong] == [1] * len(wrong)

    async def test_pairing_by_group(self, world: World) -> None:
        """Stubs of two groups may not serve one request."""
        instances = [{"name": n, "role": "decode", "labels": {"group": n}} for n in ("d0", "e0", "x0")]
        world.case.raw["setup"] = {"instances": instances}  # type: ignore[index]
        world.stubs["d0"].calls = [call(headers=(("x-request-id", "r:0:ab"),))]
        assert await judged(world, {"pairing": "same group"}) == []
        world.stubs["e0"].calls = [call(headers=(("x-request-id", "r"),))]
        assert len(await judged(world, {"pairing": "same group"})) == 1

    async def test_foreign_words_are_named(self, world: World) -> None:
        """An expectation of the encode worker's part fails by name."""
        assert await check_one(world, {"started": 3}) == ["['started'] belong to the encode worker's part"]


@dataclass
class Started:
    """A worker as the pool records it."""

    healthy: bool
    ended_after_s: float | None = None
    code: int | None = None
    stderr: str = ""

    @property
    def process(self) -> Any:
        """Its process."""
        return SimpleNamespace(
            exit_code=self.code, stderr=self.stderr, log_tail=lambda length: "", name="worker"
        )


def pushed(**reply: Any) -> Result:
    """Return a push that took 100 ms."""
    return answer(reply={"push": "ok", "sessions": ["a:1", "a:2"], **reply})


class TestWorkerChecks:
    """Expectations that only a worker's case has."""

    @pytest.mark.parametrize(
        ("group", "failures"),
        [
            ([Started(True), Started(False, 1.0, 1, "port 5999")], 0),
            ([Started(True), Started(True)], 1),
            ([Started(True), Started(False, 6.0, 1, "port 5999")], 1),
            ([Started(True), Started(False, 1.0, 0, "port 5999")], 1),
            ([Started(True), Started(False, 1.0, 1, "no reason")], 1),
            ([Started(False, 1.0, 1, "5999"), Started(False, 1.0, 1, "5999")], 1),
        ],
    )
    async def test_starts(self, world: World, group: list[Started], failures: int) -> None:
        """As many come up as should, and the others end in time, with a code and the reason."""
        world.records.groups = [group]
        words = {"started": 1, "others_exit_nonzero_within_s": 5, "stderr_contains": "5999"}
        assert len([failure async for failure in WORKER_CHECKS["started"](world, words)]) == failures

    @pytest.mark.parametrize(
        ("control", "failures"),
        [({"x": (0, 0.5)}, 0), ({"x": (1, 0.5)}, 1), ({"x": (0, 1.5)}, 1), ({}, 1)],
    )
    async def test_control_messages(
        self, world: World, control: dict[str, tuple[int, float]], failures: int
    ) -> None:
        """Nothing is lost, nothing stalls, and something was sent."""
        world.records.control = control
        words = {"lost": 0, "max_stall_s": 1}
        assert len([failure async for failure in WORKER_CHECKS["lost"](world, words)]) == failures

    @pytest.mark.parametrize(
        ("pushes", "failures"),
        [
            ([pushed()], 0),
            ([pushed(push="wrong bytes")], 1),
            ([pushed(sessions=["a:1", "a:1"])], 1),
            ([answer(reply=pushed().reply, ended=20.0)], 1),
        ],
    )
    async def test_pushes(self, world: World, pushes: list[Result], failures: int) -> None:
        """Each push went as it should, in time, between two segments."""
        world.records.results["push"] = pushes
        words = {"each_push": "ok", "max_s": 4}
        assert len([failure async for failure in WORKER_CHECKS["each_push"](world, words)]) == failures

    @pytest.mark.parametrize(("code", "failures"), [(0, 0), (143, 0), (1, 1), (None, 1)])
    async def test_exits(self, world: World, code: int | None, failures: int) -> None:
        """A process that was told to stop ends in time with a clean code."""
        world.process = Started(True, code=code).process
        world.records.stop_signalled_at = time.monotonic()
        words = {"exit_within_s": 0.01}
        assert len([failure async for failure in WORKER_CHECKS["exit_within_s"](world, words)]) == failures
