"""Every check of a process, the proxy's or a worker's: what passes, and what fails it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.cases.expect_process import PROCESS_CHECKS
from tests.cases.expect_worker import WORKER_CHECKS
from tests.cases.expectations import check_one
from tests.cases.http_client import Result
from tests.cases.made_records import answer, call
from tests.cases.world import World

pytestmark = pytest.mark.contract

LISTING = {"decode": {"live": ["http://127.0.0.1:1"], "evicted": []}, "encode": {"evicted": ["x"]}}


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
