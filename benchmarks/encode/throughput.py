"""Images a second of a worker against the bare tower, in turns; what an image costs beside the tower.

Rules of this file: both sides see the same pictures in batches of the same size, new ones in every round, so
that no cache answers. The worker's clock runs from the first byte of the requests to the last byte of the
answers: HTTP, decoding, resizing, the tower and the push to a consumer process are inside.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import statistics
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.encode.checkpoint import data_url, picture
from benchmarks.encode.world import Line, Worker, cpu_of, line_process, pin, worker

ROW_SIDE = 28
MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """`images` of `side` x `side` (a multiple of 28) a round, in requests and batches of `batch`."""

    images: int
    side: int
    batch: int
    rounds: int

    @property
    def rows(self) -> int:
        """Embedding rows of an image: one for 28 x 28 pixels."""
        return (self.side // ROW_SIDE) ** 2


class Seeds:
    """Numbers of pictures that nobody has seen yet."""

    def __init__(self) -> None:
        self._next = itertools.count(1)

    def take(self, count: int) -> list[int]:
        """Return `count` of them."""
        return list(itertools.islice(self._next, count))


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """What a measurement needs: the worker, the bare tower, a consumer, and the width of the rows."""

    worker: Worker
    bare: Line
    consumer: Line
    control: str
    session: aiohttp.ClientSession
    width: int


async def worker_round(world: World, load: Load, seeds: Sequence[int]) -> dict[str, float]:
    """Post all pictures at once, in requests of a batch each; return seconds and processor seconds."""
    one, prefix = world.worker, f"s{seeds[0]}-"
    urls = [data_url(picture(seed, load.side)) for seed in seeds]
    names = [f"{prefix}{number}" for number in range(len(urls))]
    shape = [load.rows, world.width]
    await world.consumer.ask({"prefix": prefix, "items": len(urls), "shape": shape, "dtype": "float32"})
    cpu = cpu_of(one.pid), cpu_of(one.engine_pid)
    began = time.perf_counter()
    requests = (
        one.encode(world.session, urls[at : at + load.batch], world.control, names[at : at + load.batch])
        for at in range(0, len(urls), load.batch)
    )
    await asyncio.gather(*requests)
    seconds = time.perf_counter() - began
    spent = {"front_cpu": cpu_of(one.pid) - cpu[0], "engine_cpu": cpu_of(one.engine_pid) - cpu[1]}
    await world.consumer.hear()
    return {"seconds": seconds, **spent}


async def in_turns(world: World, load: Load, seeds: Seeds) -> list[dict[str, Any]]:
    """Run the rounds, bare and worker, starting with the other one each time; the first warms up."""
    rounds = []
    for number in range(load.rounds + 1):
        found: dict[str, Any] = {}
        for side in ("bare", "worker") if number % 2 else ("worker", "bare"):
            taken = seeds.take(load.images)
            if side == "bare":
                wanted = {"seeds": taken, "side": load.side, "batch": load.batch}
                found["bare"] = await world.bare.ask(wanted)
            else:
                found["worker"] = await worker_round(world, load, taken)
        rounds.append(found)
    return rounds[1:]


@asynccontextmanager
async def open_world(
    folder: Path,
    *,
    width: int,
    flags: Sequence[str] = (),
    arena_bytes: int = 64 * MIB,
    threads: int = 1,
    device: str = "cpu",
) -> AsyncIterator[World]:
    """Start everything; the arenas of worker and consumer have `arena_bytes`."""
    async with AsyncExitStack() as stack:
        bare = await stack.enter_async_context(
            line_process("benchmarks.encode.bare", "tower", str(folder), str(threads), device)
        )
        settings = json.dumps({"nbytes": arena_bytes, "verify": True})
        consumer = await stack.enter_async_context(line_process("benchmarks.transfer.consumer", settings))
        control = str((await consumer.hear())["control"])
        await bare.hear()
        wanted = ("--dtype", "float32", "--threads", str(threads), "--device", device)
        arena = ("--cache-bytes", str(arena_bytes))
        one = await stack.enter_async_context(worker(folder, *wanted, *arena, *flags))
        session = await stack.enter_async_context(
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600))
        )
        yield World(worker=one, bare=bare, consumer=consumer, control=control, session=session, width=width)


async def throughput(folder: Path, load: Load, *, width: int) -> dict[str, Any]:
    """Return the rounds and the medians; with two cores the engine has one and the rest the other."""
    async with open_world(folder, width=width, flags=("--max-batch-items", str(load.batch))) as world:
        pinned = _pin(world.worker, world.bare, world.consumer)
        rounds = await in_turns(world, load, Seeds())
    return {"load": load, "pinned": pinned, "rounds": rounds, **summary(rounds, load.images)}


def _pin(one: Worker, bare: Line, consumer: Line) -> bool:
    """Give the engine and the bare tower the same core, and all the rest another one."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) != 2:
        return False
    one.pin(front=cores[1], engine=cores[0])
    pin(bare.pid, cores[0])
    pin(consumer.pid, cores[1])
    return True


def summary(rounds: Sequence[dict[str, Any]], images: int) -> dict[str, float]:
    """Return images a second of both (medians), the median ratio, and milliseconds per image beside it."""

    def median(values: Iterator[float]) -> float:
        return statistics.median(values)

    return {
        "bare_per_s": median(images / r["bare"]["seconds"] for r in rounds),
        "worker_per_s": median(images / r["worker"]["seconds"] for r in rounds),
        "ratio": median(r["bare"]["seconds"] / r["worker"]["seconds"] for r in rounds),
        "tower_ms": median(r["bare"]["seconds"] / images * 1e3 for r in rounds),
        "front_cpu_ms": median(r["worker"]["front_cpu"] / images * 1e3 for r in rounds),
        "engine_cpu_ms": median(r["worker"]["engine_cpu"] / images * 1e3 for r in rounds),
        "overhead_ms": median((r["worker"]["engine_cpu"] - r["bare"]["cpu"]) / images * 1e3 for r in rounds),
    }
