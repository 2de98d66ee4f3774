"""How long a worker takes to `/health` 200, and what memory it holds, against a load by transformers alone.

Rules of this file: the two take turns; each is a new process, timed from the command.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.encode.checkpoint import TINY
from benchmarks.encode.world import line_process, memory_of, worker

MEMORY_CACHE_BYTES = 16 * 2**20


async def _bare(kind: str, folder: Path) -> float:
    began = time.perf_counter()
    async with line_process("benchmarks.encode.bare", kind, str(folder)) as process:
        await process.hear()
        return time.perf_counter() - began


async def start_up(rounds: int, folder: Path = TINY) -> dict[str, Any]:
    """Return seconds of each: the worker, a bare load of tower and processor, one of the whole model."""
    found: dict[str, list[float]] = {"worker": [], "tower": [], "whole": []}
    for number in range(rounds):
        names = list(found)
        for name in names[number % 3 :] + names[: number % 3]:
            if name == "worker":
                async with worker(folder) as one:
                    found[name].append(one.start_s)
            else:
                found[name].append(await _bare(name, folder))
    pairs = zip(found["worker"], found["tower"], found["whole"], strict=True)
    ratios = [(mine / tower, mine / whole) for mine, tower, whole in pairs]
    return {
        "seconds": {name: statistics.median(values) for name, values in found.items()},
        "x_tower": statistics.median(tower for tower, _ in ratios),
        "x_whole": statistics.median(whole for _, whole in ratios),
        "rounds": found,
    }


async def resident(folder: Path) -> dict[str, Any]:
    """Return the memory of a started worker's two processes, and that of a process with the whole model."""
    flags = ("--dtype", "float32", "--cache-bytes", str(MEMORY_CACHE_BYTES))
    async with worker(folder, *flags) as one:
        front, engine = memory_of(one.pid), memory_of(one.engine_pid)
    async with line_process("benchmarks.encode.bare", "whole", str(folder)) as process:
        whole = await process.hear()
    share = (front["anonymous"] + engine["anonymous"]) / whole["anonymous"]
    return {"front": front, "engine": engine, "whole": whole, "x_whole": share}
