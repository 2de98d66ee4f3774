"""What a cache hit costs: latency, and the proof that it takes no tower time and no copy.

Rules of this file: the proof is by counting. No forward is counted, no arena byte changes hands, and the
engine's processor time for a hit does not grow with the embedding; a copy of the large one would take longer
than all of it.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.encode.checkpoint import data_url, picture
from benchmarks.encode.world import Worker, cpu_of, worker

_FORWARDS = "epdctl_encode_seconds_count"
_CACHE_FLAGS = ("--cache-bytes", str(256 * 2**20))


def _arena(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if name.startswith("epdctl_arena_bytes")}


async def _hits(one: Worker, session: aiohttp.ClientSession, side: int, hits: int) -> dict[str, Any]:
    urls = [data_url(picture(10**6 + side, side))]
    miss = await one.encode(session, urls)
    await one.encode(session, urls)
    before, cpu = await one.metrics(session), (cpu_of(one.pid), cpu_of(one.engine_pid))
    seconds = [await one.encode(session, urls) for _ in range(hits)]
    spent = cpu_of(one.pid) - cpu[0], cpu_of(one.engine_pid) - cpu[1]
    after = await one.metrics(session)
    cached = after['epdctl_cache_bytes{tier="l1"}']
    return {
        "side": side,
        "miss_ms": miss * 1e3,
        "hit_p50_ms": statistics.median(seconds) * 1e3,
        "hit_p99_ms": sorted(seconds)[int(hits * 0.99)] * 1e3,
        "front_cpu_ms": spent[0] / hits * 1e3,
        "engine_cpu_ms": spent[1] / hits * 1e3,
        "forwards": after.get(_FORWARDS, 0.0) - before.get(_FORWARDS, 0.0),
        "arena_unchanged": _arena(after) == _arena(before),
        "cached_bytes": cached,
    }


def copy_ms(nbytes: int) -> float:
    """Return the milliseconds that one copy of `nbytes` in memory takes here."""
    source, target = bytes(nbytes), ctypes.create_string_buffer(nbytes)
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        ctypes.memmove(target, source, nbytes)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds) * 1e3


async def hits_on(
    one: Worker, session: aiohttp.ClientSession, sides: tuple[int, int], hits: int
) -> dict[str, Any]:
    """Return the figures of a small and a large picture, and what a copy of the large embedding costs."""
    small, large = [await _hits(one, session, side, hits) for side in sides]
    embedding = int(large["cached_bytes"] - small["cached_bytes"])
    return {"small": small, "large": large, "large_bytes": embedding, "large_copy_ms": copy_ms(embedding)}


async def cache_hits(folder: Path, sides: tuple[int, int], hits: int, device: str = "cpu") -> dict[str, Any]:
    """Measure hits on a worker of the checkpoint in `folder`."""
    async with (
        worker(folder, "--dtype", "float32", "--device", device, *_CACHE_FLAGS) as one,
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as session,
    ):
        return await hits_on(one, session, sides, hits)
