"""The case harness itself: it knows its whole vocabulary, and says by name what it does not know."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cases import answers_view as view
from tests.cases import product, vocabulary
from tests.cases.expect_client import CHECKS, MODIFIERS
from tests.cases.expect_process import PROCESS_CHECKS, WORKER_WORDS
from tests.cases.expect_stub import CONSUMER_CHECKS, STUB_MODIFIERS, UPSTREAM_CHECKS
from tests.cases.expect_worker import WORKER_CHECKS, WORKER_MODIFIERS
from tests.cases.http_client import Request, Result, parse_head, request_head
from tests.cases.judged import JUDGED
from tests.cases.loader import (
    DATA_FOLDER,
    OWN_FOLDER,
    PROXY_TARGETS,
    WORKER_TARGETS,
    BadCase,
    Case,
    load_case,
    load_folder,
)
from tests.cases.placeholders import Pictures, Placeholders, UnknownPlaceholder, merge, merge_items
from tests.cases.runner import run_case
from tests.cases.stalls import Stalls
from tests.cases.steps import WORKER_OPS, Steps
from tests.cases.verdict import Subject, run_checks
from tests.cases.vocabulary import unknown_words
from tests.cases.worker_pool import WorkerPool
from tests.cases.worker_steps import WorkerSteps
from tests.cases.worker_world import WorkerWorld, flat
from tests.cases.world import World
from tests.stubs.behaviour import UnknownBehaviour

pytestmark = pytest.mark.contract

README = Path(__file__).parent / "README.md"
GOOD: dict[str, Any] = {
    "id": "X1",
    "target": "proxy",
    "setup": {"instances": [{"name": "e0", "role": "encode", "register": False, "behaviour": {}}]},
    "steps": [{"op": "wait", "seconds": 0}],
    "expect": [{"canary": "connections", "equals": 0}],
}


def made_case(folder: Path, **changes: Any) -> Case:
    """Return a small case with some keys changed."""
    path = folder / "X1-made.json"
    path.write_text(json.dumps(GOOD | changes))
    return load_case(path)


class TestUnknownWords:
    """A word outside the vocabulary fails its case by name."""

    @pytest.mark.parametrize(
        ("changes", "named"),
        [
            ({"surprise": 1}, "key: surprise"),
            ({"target": "toaster"}, "target: toaster"),
            ({"config": {"warp_factor": 9}}, "config: warp_factor"),
            ({"steps": [{"op": "dance"}]}, "op: dance"),
            (
                {"steps": [{"op": "repeat", "n": 1, "step": {"op": "wait", "sceonds": 1}}]},
                "step field: sceonds",
            ),
            ({"expect": [{"step": "q", "statuss": [200]}]}, "expectation: statuss"),
            ({"setup": {"instances": [{"name": "x", "role": "oracle"}]}}, "role: oracle"),
            ({"setup": {"instances": [{"name": "x", "role": "encode", "colour": 1}]}}, "instance: colour"),
        ],
    )
    async def test_fails_the_case_by_name(self, tmp_path: Path, changes: dict[str, Any], named: str) -> None:
        """An unknown key, target, option, op, field, expectation or role is the case's failure."""
        failures = await run_case(made_case(tmp_path, **changes), tmp_path)
        assert len(failures) == 1 and named in failures[0]

    async def test_unknown_behaviour_fails_by_name(self, tmp_path: Path) -> None:
        """A stub behaviour outside the vocabulary raises, naming it."""
        setup = {"instances": [{"name": "e0", "role": "encode", "behaviour": {"chat": {"sing": 1}}}]}
        with pytest.raises(UnknownBehaviour, match=r"chat\.sing"):
            await run_case(made_case(tmp_path, setup=setup), tmp_path)

    @pytest.mark.parametrize("token", ["{{nonsense}}", "{{url:e7}}", "{{item}}", "{{img:no.png}}"])
    async def test_unknown_placeholder_fails_by_name(self, tmp_path: Path, token: str) -> None:
        """A placeholder without a value raises, naming it."""
        steps = [{"op": "http", "id": "q", "method": "GET", "path": "/health", "headers": {"X": token}}]
        with pytest.raises(UnknownPlaceholder, match=r"nonsense|url:e7|item|no\.png"):
            await run_case(made_case(tmp_path, target="config", steps=steps), tmp_path)

    async def test_op_of_another_part_fails_by_name(self, tmp_path: Path) -> None:
        """An operation of the encode worker's part is refused, not skipped."""
        with pytest.raises(BadCase, match="start_workers"):
            await run_case(
                made_case(tmp_path, target="config", steps=[{"op": "start_workers", "n": 1}]), tmp_path
            )

    def test_unknown_option_value_has_no_counterpart(self, tmp_path: Path) -> None:
        """An option value that the product lacks raises, naming it."""
        with pytest.raises(product.NoCounterpart, match="papyrus"):
            product.serve_arguments({"store": "papyrus"}, 1, tmp_path)


class TestVocabulary:
    """Every word of the vocabulary has a meaning in the code."""

    def test_every_op_is_run_or_named_as_anothers(self, tmp_path: Path) -> None:
        """Each operation is implemented here or is the worker's, whose part has all that a case uses."""
        steps = Steps(World(made_case(tmp_path), tmp_path))
        assert steps.operations | WORKER_OPS == vocabulary.OPS

    def test_every_op_of_a_worker_case_is_run(self, tmp_path: Path) -> None:
        """The worker's part runs each operation and checks each expectation that a case of a worker uses."""
        cases = [case for case in load_folder(DATA_FOLDER) if case.target in WORKER_TARGETS]
        world = WorkerWorld(made_case(tmp_path), tmp_path, WorkerPool(tmp_path))
        known = WorkerSteps(world).operations
        assert {step["op"] for case in cases for step in flat(case.steps)} - known == set()
        words = {word for case in cases for entry in case.expectations for word in entry}
        meanings = {*WORKER_CHECKS, *WORKER_MODIFIERS, *CHECKS, *MODIFIERS, *PROCESS_CHECKS, "text"}
        assert words - meanings == set()

    def test_every_expectation_is_checked(self) -> None:
        """Each expectation word is a check, a modifier of one, or listed as the encode worker's."""
        meanings = {
            *CHECKS, *MODIFIERS, *UPSTREAM_CHECKS, *STUB_MODIFIERS, *CONSUMER_CHECKS, *PROCESS_CHECKS,
            *WORKER_WORDS, *vocabulary.PAIRED,
        }  # fmt: skip
        assert vocabulary.EXPECTATION - meanings == set()

    def test_every_option_is_mapped(self, tmp_path: Path) -> None:
        """Each neutral option becomes a flag or is listed as meaningless for the proxy."""
        known = {*product.FLAGS, *product.STAGES, *product.MEANINGLESS, "store"}
        assert known == vocabulary.CONFIG

    def test_own_cases_use_known_words(self) -> None:
        """No case of the folder uses a word outside the vocabulary."""
        cases = [case for folder in (DATA_FOLDER, OWN_FOLDER) for case in load_folder(folder)]
        assert {case.id: unknown_words(case) for case in cases if unknown_words(case)} == {}


class TestAccounting:
    """Every case file runs here or is listed with a reason."""

    def test_every_case_is_accounted_for(self) -> None:
        """The index, the files and the three lists agree."""
        index = json.loads((DATA_FOLDER / "INDEX.json").read_text())
        cases = {case.id: case for case in load_folder(DATA_FOLDER)}
        assert {entry["id"] for entry in index if entry["file"]} == set(cases)
        assert {case.target for case in cases.values()} <= PROXY_TARGETS | set(WORKER_TARGETS)
        assert set(JUDGED) <= set(cases)

    def test_the_rest_is_listed_with_reasons(self) -> None:
        """The README has a row for each case of a worker, and for each one judged wrong."""
        rows = README.read_text().splitlines()
        for case in load_folder(DATA_FOLDER):
            if case.target in WORKER_TARGETS:
                assert f"| {case.id} | {case.target} | {WORKER_TARGETS[case.target]} |" in rows
            if case.id in JUDGED:
                assert f"| {case.id} | {JUDGED[case.id]} |" in rows

    def test_an_empty_folder_is_an_error(self, tmp_path: Path) -> None:
        """A folder without cases is not a green run."""
        with pytest.raises(BadCase, match="no case files"):
            load_folder(tmp_path)


class TestPlaceholders:
    """Tokens become values."""

    def filled(self, value: Any, **values: Any) -> Any:
        """Expand a value with the case folder's pictures."""
        return Placeholders(Pictures((DATA_FOLDER / "images",)), values).expand(value)

    def test_static_tokens(self) -> None:
        """Pictures, base64 and repeats are filled in anywhere in a string, and in keys."""
        assert self.filled("<{{repeat:[:3}}>") == "<[[[>"
        assert self.filled("{{img:one.gif}}").startswith("data:image/gif;base64,R0lGOD")
        assert self.filled({"{{who}}": ["{{b64:one.gif}}"]}, who="a")["a"][0].startswith("R0lGOD")

    def test_items_keep_their_type(self) -> None:
        """A string that is one item token becomes the item, and parts of items can be named."""
        assert self.filled({"merge": "{{item}}"}, item={"n": None}) == {"merge": {"n": None}}
        assert self.filled("{{item.who}}.chat", item={"who": "e0"}) == "e0.chat"

    def test_merge_deletes(self) -> None:
        """A merge replaces keys and takes out those marked for deletion."""
        assert merge({"a": 1, "b": 2}, {"a": "{{delete}}", "c": None}) == {"b": 2, "c": None}

    def test_merge_item_in_a_message(self) -> None:
        """An object with merge_item is the item with the other keys added."""
        marked = {"messages": [{"merge_item": True, "x": 1}]}
        assert merge_items(marked, {"role": "a"}) == {"messages": [{"role": "a", "x": 1}]}


class TestReadings:
    """How answers are read."""

    @pytest.mark.parametrize(
        ("path", "found"), [("a.0.b", 1), ("a.1", view.MISSING), ("a.0.c", None), ("x", view.MISSING)]
    )
    def test_paths(self, path: str, found: Any) -> None:
        """Dotted paths walk objects and lists, and miss quietly."""
        assert view.at_path({"a": [{"b": 1, "c": None}]}, path) is found

    @pytest.mark.parametrize(
        ("found", "wanted", "fits"),
        [("abc", "~b", True), (None, None, True), (view.MISSING, None, True), (1, True, False), (0, 0, True)],
    )
    def test_matching(self, found: Any, wanted: Any, fits: bool) -> None:
        """`~x` contains, null is also absent, and true is not 1."""
        assert view.matches(found, wanted) is fits

    @pytest.mark.parametrize(
        ("stream", "complete"),
        [
            (b'data: {"a": 1}\n\ndata: [DONE]\n\n', True),
            (b'data: {"a": 1}\n\n', False),
            (b'data: {"a"\n\ndata: [DONE]\n\n', False),
            (b"", False),
        ],
    )
    def test_complete_streams(self, stream: bytes, complete: bool) -> None:
        """A stream is complete when all events parse and [DONE] is last."""
        assert view.sse_is_complete(stream) is complete

    def test_metric_samples(self) -> None:
        """Labels with escaped quotes are read, and a failure is any outcome that is not good."""
        text = (
            "# HELP x y\n"
            'epdctl_requests_total{route="a\\"b",outcome="ok"} 3.0\n'
            'epdctl_requests_total{route="a",outcome="upstream_failed"} 2.0\n'
        )
        assert [labels.get("route") for _, labels, _ in product.metric_samples(text)] == ['a\\"b', "a"]
        assert product.metric_value("failure_count", text) == 2

    def test_delete_becomes_a_query(self) -> None:
        """A DELETE that names its instance in a body is translated to ours."""
        translated = product.translate_call("DELETE", "/instances", {"role": "prefill", "url": "http://h:1"})
        assert translated == ("/instances?url=http%3A%2F%2Fh%3A1", None)


class TestClient:
    """What the harness's client sends and reads."""

    def test_headers_go_out_as_given(self) -> None:
        """Given headers win, missing ones are added, and names keep their case."""
        head = request_head(Request(method="POST", path="/x", headers={"hOsT": "evil"}, body=b"{}"))
        lines = [b"POST /x HTTP/1.1", b"Content-Type: application/json", b"Content-Length: 2", b"hOsT: evil"]
        assert head == b"\r\n".join([*lines, b"", b""])

    def test_heads_are_read(self) -> None:
        """Status and headers come out of a response head."""
        assert parse_head(b"HTTP/1.1 503 X\r\nA: b\r\nA: c:d\r\n\r\n") == (503, [("A", "b"), ("A", "c:d")])


class TestStalls:
    """The harness's own pauses are no latency of the product."""

    async def test_a_blocked_loop_is_noted(self) -> None:
        """A loop held up for 50 ms shows a stall of about that length, inside and not outside of it."""
        stalls = Stalls()
        before = time.monotonic()
        async with stalls.watched():
            await asyncio.sleep(0.02)
            began = time.monotonic()
            while time.monotonic() - began < 0.05:
                pass
            await asyncio.sleep(0.02)
        # A sum of floats may be a hair more than the interval it covers.
        assert 0.03 < stalls.within(began, began + 0.05) < 0.051
        assert stalls.within(before - 1, before) == 0


class TestVerdicts:
    """How checks are run."""

    @pytest.mark.parametrize(
        ("words", "failure"),
        [
            ({"status": [200]}, "status not in [200]"),
            ({"status": [503], "sings": 1}, "'sings' has no meaning here"),
            ({"index": 0}, "nothing to check"),
        ],
    )
    def test_failures_name_what_is_wrong(self, tmp_path: Path, words: dict[str, Any], failure: str) -> None:
        """A wrong status, an unknown word and an expectation without a check all fail."""
        world = World(made_case(tmp_path), tmp_path)
        subject = Subject(world, [Result(step="q", index=0, status=503)], words)
        found = list(run_checks(subject, CHECKS, MODIFIERS))
        assert len(found) == 1 and failure in found[0]

    def test_a_right_answer_passes(self, tmp_path: Path) -> None:
        """A status in the list gives no failure."""
        world = World(made_case(tmp_path), tmp_path)
        subject: Subject[Result] = Subject(world, [Result(step="q", index=0, status=200)], {"status": [200]})
        check: Callable[..., Any] = run_checks
        assert list(check(subject, CHECKS, MODIFIERS)) == []
