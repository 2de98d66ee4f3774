"""The proxy benchmark: bodies, ratios, targets and tables."""

from __future__ import annotations

import json

import pytest

from benchmarks.proxy.__main__ import chosen, parse_arguments, peers_of
from benchmarks.proxy.figures import Judgement, Result, Round, judge, table, target_table
from benchmarks.proxy.workloads import TARGETS, Mode, Target, Workload, bodies, workloads

pytestmark = pytest.mark.unit

TEXT = Workload(name="text-c64", mode=Mode.REQUESTS, body="text", concurrency=64, seconds=1)


def rounds(*per_s: float, p50_ms: float = 1.0, cpu_ms: float = 1.0) -> list[Round]:
    """Return rounds that differ in their rate."""
    return [Round(per_s=value, p50_ms=p50_ms, p99_ms=2.0, cpu_ms=cpu_ms) for value in per_s]


def result(**peers: list[Round]) -> Result:
    """Return a result of the text workload."""
    return Result(workload=TEXT, rounds=peers)


class TestRatios:
    """A ratio compares rounds that ran next to each other."""

    def test_is_the_median_of_paired_rounds(self) -> None:
        """Pairs are divided first and the median taken then, so that a slow spell hits both sides."""
        found = result(direct=rounds(9, 9, 9), epdctl=rounds(10, 100, 30), reference=rounds(5, 10, 30))
        assert found.ratio("epdctl", "per_s") == 2.0

    def test_added_time_is_what_the_proxy_adds(self) -> None:
        """Added latency is the peer's minus that without a proxy in the same round."""
        found = result(
            direct=rounds(1, p50_ms=0.1), epdctl=rounds(1, p50_ms=0.3), reference=rounds(1, p50_ms=1.1)
        )
        assert found.figure("epdctl", "added_p50_ms") == pytest.approx(0.2)
        assert found.ratio("epdctl", "added_p50_ms") == pytest.approx(0.2)

    def test_no_reference_no_ratio(self) -> None:
        """Without the reference proxy there is nothing to divide by."""
        assert result(direct=rounds(1), epdctl=rounds(1)).ratio("epdctl", "per_s") is None


class TestTargets:
    """Targets say what is missed, and by how much it may be."""

    @pytest.mark.parametrize(
        ("at_least", "ratio", "slack", "missed"),
        [
            (False, 0.5, 1.0, False),
            (False, 0.6, 1.0, True),
            (False, 0.6, 1.5, False),
            (True, 3.0, 1.0, False),
            (True, 0.4, 1.0, True),
            (True, 0.4, 1.5, False),
        ],
    )
    def test_missed_beyond_slack(self, at_least: bool, ratio: float, slack: float, missed: bool) -> None:
        """Upper and lower bounds both give way by the slack, and no further."""
        target = Target(workload="x", figure="per_s", must=0.5, stretch=0.1, at_least=at_least)
        assert Judgement(target=target, ratio=ratio, value=1.0).is_missed(slack) is missed

    def test_each_target_names_a_workload_and_a_figure(self) -> None:
        """No target refers to a workload or figure that does not exist."""
        names = {workload.name for workload in workloads()}
        known = {"per_s", "p50_ms", "p99_ms", "cpu_ms", "rss_mb"}
        assert {target.workload for target in TARGETS} <= names
        assert {target.figure.removeprefix("added_") for target in TARGETS} <= known

    def test_failed_peer_reaches_nothing(self) -> None:
        """A peer with errors has no ratio, and its row says why."""
        broken = [Round(per_s=1, p50_ms=1, p99_ms=1, errors=3, last_error="502 bad")]
        found = result(direct=rounds(1), epdctl=broken, reference=rounds(1))
        assert {j.ratio for j in judge([found], "epdctl")} == {None}
        assert "failed: 3 errors, 502 bad" in table(found)

    def test_table_tells_missed_from_met(self) -> None:
        """The table marks a missed target and one that was not run."""
        found = result(direct=rounds(1), epdctl=rounds(9, cpu_ms=0.9), reference=rounds(1, cpu_ms=1.0))
        text = target_table(judge([found], "epdctl"))
        assert "| text-c64 | cpu_ms | 0.90 | 0.90 | <= 0.4 | <= 0.15 | **missed** |" in text
        assert "| text-c64 | per_s | 9.00 | 9.00 | >= 2.5 | >= 7 | met, and stretch |" in text
        assert text.count("not run") == len(TARGETS) - 2


class TestWork:
    """What is sent, and to whom."""

    def test_bodies_are_json_of_the_size_they_name(self) -> None:
        """Every body parses, and the image bodies carry as many bytes as they say."""
        sizes = {name: len(body) for name, body in bodies() if json.loads(body)}
        assert 8_000_000 < sizes["image-8m"] < 8_001_000
        assert {w.body for w in workloads()} <= set(sizes)

    def test_bodies_are_the_same_each_time(self) -> None:
        """Two runs send the same bytes."""
        assert dict(bodies())["image-100k"] == dict(bodies())["image-100k"]

    def test_reference_and_others_join_by_option(self) -> None:
        """The reference takes the static flags; another peer has only the topologies it names."""
        options = parse_arguments(["--reference", "x.py", "--peer", "other=run {port} {decode}"])
        peers = {peer.name: peer for peer in peers_of(options)}
        assert list(peers) == ["direct", "epdctl", "reference", "other"]
        assert "--prefill-servers-urls {prefill}" in str(peers["reference"].command_epd)
        assert peers["other"].command_epd is None

    def test_workloads_are_chosen_by_beginning(self) -> None:
        """A list of beginnings selects workloads; nothing selects all."""
        assert [w.name for w in chosen("streams-2,text-c1")] == ["text-c1", "streams-20", "streams-200"]
        assert len(chosen("")) == len(workloads())
