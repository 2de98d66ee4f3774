"""The benchmarks of the encode worker and of its transfer run, and judge what they measured."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from typing import Any

import pytest

from benchmarks.encode import tables
from benchmarks.encode.__main__ import parse_arguments
from benchmarks.encode.checkpoint import TINY, TINY_WIDTH
from benchmarks.encode.hits import hits_on
from benchmarks.encode.scheduling import scheduling
from benchmarks.encode.throughput import Load, Seeds, in_turns, open_world, summary
from benchmarks.transfer.__main__ import judged, measure
from benchmarks.transfer.__main__ import table as transfer_table
from benchmarks.transfer.items import Case
from epdctl.worker.transfer.environment import mooncake_environment

pytestmark = [pytest.mark.e2e, pytest.mark.worker]

LOAD = Load(images=4, side=112, batch=2, rounds=1)


async def test_worker_and_bare_tower_take_turns() -> None:
    """One worker gives figures of throughput, with every picture delivered to a consumer, and of hits, which
    are counted without a forward."""
    async with open_world(TINY, width=TINY_WIDTH, arena_bytes=8 * 2**20) as world:
        rounds = await in_turns(world, LOAD, Seeds())
        metrics = await world.worker.metrics(world.session)
        hits = await hits_on(world.worker, world.session, (112, 168), hits=3)

    assert metrics['epdctl_ec_transfers_total{outcome="delivered",side="producer"}'] == 2 * LOAD.images
    figures = summary(rounds, LOAD.images)
    assert all(figures[name] > 0 for name in ("bare_per_s", "worker_per_s", "ratio", "tower_ms"))
    assert hits["large_bytes"] > 0
    assert [hits[name]["forwards"] for name in ("small", "large")] == [0, 0]
    assert all(hits[name]["arena_unchanged"] for name in ("small", "large"))
    text = tables.render("throughput", {"tiny": figures}) + tables.render("hits", hits)
    assert "| tiny |" in text and "| 112 x 112 |" in text


async def test_pushes_and_raw_writes_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each way moves every item of a case to every consumer, and has a figure for each round."""
    for name, value in mooncake_environment(os.environ, protocol="tcp").items():
        monkeypatch.setenv(name, value)
    case = Case(nbytes=2 * 2**20, items=3, consumers=2)
    async with asyncio.timeout(60):
        result = judged(case, await measure(case, rounds=1))

    assert set(result["rounds"]) == {"sync", "submit", "submit-1MB", "pushed", "verified"}
    assert all(len(values) == 1 and values[0] > 0 for values in result["rounds"].values())
    assert result["met"] is None, "the target is for one consumer"
    assert "| 2 MB x 3 to 2 |" in transfer_table([result])


def test_scheduling_is_measured_at_both_sizes() -> None:
    """Both steps handle items with few and many pending."""
    found = scheduling(rounds=1, items=200, large=300)

    assert set(found["steps"]) == {"scheduler", "whole way"}
    assert all(step["few_us"] > 0 and step["many_us"] > 0 for step in found["steps"].values())
    assert "| whole way |" in tables.render("scheduler", found)


def results(*, ratio: float, x_tower: float, forwards: int, steps: float) -> Mapping[str, Any]:
    """Return figures of a run, as far as targets look at them."""
    hit = {"forwards": forwards, "engine_cpu_ms": 0.2, "arena_unchanged": True}
    step = {"few_us": 1.0, "many_us": steps, "ratio": steps}
    return {
        "throughput": {"large": {"ratio": ratio}},
        "hits": {"small": hit, "large": hit, "large_bytes": 1, "large_copy_ms": 1.0},
        "startup": {"x_tower": x_tower},
        "scheduler": {"steps": {"scheduler": step}},
    }


def test_targets_are_judged() -> None:
    """What reaches the targets is met, what misses them is said to."""
    good = tables.judge(results(ratio=0.96, x_tower=1.4, forwards=0, steps=1.9))
    bad = tables.judge(results(ratio=0.94, x_tower=1.6, forwards=1, steps=2.1))

    assert all(verdict.met for verdict in good)
    missed = [verdict.figure for verdict in bad if not verdict.met]
    assert len(missed) == len(bad) - 1
    assert tables.targets(bad).count("MISSED") == len(missed)


def test_parts_are_named() -> None:
    """The command runs every part by default, and one by its short name."""
    assert parse_arguments([]).parts.split(",") == ["throughput", "hits", "startup", "memory", "scheduler"]
    assert parse_arguments(["--scheduler"]).scheduler
