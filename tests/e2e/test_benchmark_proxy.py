"""The benchmark's own programs: they build without warnings, and agree with each other."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.proxy.__main__ import measure
from benchmarks.proxy.figures import Result
from benchmarks.proxy.lab import HERE, Lab, Peer
from benchmarks.proxy.workloads import BACKGROUND_CONCURRENCY, Mode, Workload

pytestmark = pytest.mark.e2e


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    """Return a laboratory whose processes end with the test."""
    made = Lab(tmp_path / "lab")
    yield made
    made.close()


def run_direct(lab: Lab, workload: Workload) -> Result:
    """Return a short run without any proxy."""
    return measure(lab, [Peer(name="direct")], [workload], rounds=1, scale=0.2)[0]


@pytest.mark.parametrize("program", ["mock", "load"])
def test_builds_without_warnings(program: str, tmp_path: Path) -> None:
    """The C programs compile with all warnings as errors."""
    command = ["cc", "-O2", "-Wall", "-Wextra", "-Werror", "-Wno-format-truncation"]
    done = subprocess.run(
        [*command, "-o", str(tmp_path / program), str(HERE / f"{program}.c")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_requests_arrive_whole(lab: Lab) -> None:
    """What the load generator sends is what the mock counts: no errors, 100 KB a request."""
    workload = Workload(name="w", mode=Mode.REQUESTS, body="image-100k", concurrency=4, seconds=1)
    found = run_direct(lab, workload).rounds["direct"][0]
    assert found.errors == 0 and found.per_s > 100
    assert found.received_kb["decode"] == pytest.approx(100.2, abs=0.2)


def test_streams_keep_their_pace(lab: Lab) -> None:
    """Twenty streams of a chunk each 10 ms give two thousand stamped chunks a second."""
    workload = Workload(name="w", mode=Mode.STREAMS, body="stream", concurrency=20, seconds=8)
    found = run_direct(lab, workload).rounds["direct"][0]
    assert found.errors == 0 and found.per_s == pytest.approx(2000, rel=0.2)
    assert 0 < found.p50_ms < 20


def test_streams_beside_images_count_images(lab: Lab) -> None:
    """The mixed workload counts the 8 MB requests and times the chunks beside them."""
    workload = Workload(name="w", mode=Mode.MIXED, body="stream", concurrency=2, seconds=5)
    found = run_direct(lab, workload).rounds["direct"][0]
    assert found.errors == 0 and found.per_s >= BACKGROUND_CONCURRENCY
    assert found.received_kb["decode"] > 8000
