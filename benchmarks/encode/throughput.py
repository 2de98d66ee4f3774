"""Images a second of a worker against the bare tower, in turns; what an image costs beside the tower.

Rules of this file: both sides see the same pictures in batches of the same size, new ones in every round, so
that no cache answers. The worker's clock runs from the first byte of the requests to the last byte of the
answers: HTTP, decoding, resizing, the tower and the push to a consumer process are inside.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.encode.checkpoint import data_url, picture
from benchmarks.encode.world import Line, Worker, cpu_of, line_process, pin, worker

CONSUMER_BYTES = 256 * 2**20
CACHE_FLAGS = ("--cache-bytes", str(64 * 2**20))


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """`images` of `side` x `side` in each round, in requests and batches of `batch`."""

    images: int
    side: int
    batch: int
    rounds: int


class Seeds:
    """Numbers of pictures that nobody has seen yet."""

    def __init__(self) -> None:
        self._next = itertools.count(1)

    def take(self, count: int) -> list[int]:
        """Return `count` of them."""
        return list(itertools.islice(self._next, count))


async def worker_round(
    one: Worker, load: Load, seeds: Sequence[int], consumer: str, session: aiohttp.ClientSession
) -> dict[str, float]:
    """Post all pictures at once, in requests of a batch each; return seconds and processor seconds."""
    urls = [data_url(picture(seed, load.side)) for seed in seeds]
    requests = [urls[at : at + load.batch] for at in range(0, len(urls), load.batch)]
    cpu = cpu_of(one.pid), cpu_of(one.engine_pid)
    began = time.perf_counter()
    await asyncio.gather(*(one.encode(session, request, consumer) for request in requests))
    seconds = time.perf_counter() - began
    return {
        "seconds": seconds,
        "front_cpu": cpu_of(one.pid) - cpu[0],
        "engine_cpu": cpu_of(one.engine_pid) - cpu[1],
    }


async def in_turns(
    one: Worker, bare: Line, load: Load, consumer: str, session: aiohttp.ClientSession
) -> Iterator[dict[str, Any]]:
    """Run the rounds, bare and worker, starting with the other one each time; the first warms up."""
    seeds, rounds = Seeds(), []
    for number in range(load.rounds + 1):
        found: dict[str, Any] = {}
        for side in ("bare", "worker") if number % 2 else ("worker", "bare"):
            taken = seeds.take(load.images)
            if side == "bare":
                found["bare"] = await bare.ask({"seeds": taken, "side": load.side, "batch": load.batch})
            else:
                found["worker"] = await worker_round(one, load, taken, consumer, session)
        rounds.append(found)
    return iter(rounds[1:])


async def throughput(
    folder: Path, load: Load, *, threads: int = 1, flags: Sequence[str] = (), device: str = "cpu"
) -> dict[str, Any]:
    """Return the rounds and the median ratio; with two cores the engine has one and the front the other."""
    async with AsyncExitStack() as stack:
        bare = await stack.enter_async_context(
            line_process("benchmarks.encode.bare", "tower", str(folder), str(threads), device)
        )
        settings = f'{{"nbytes": {CONSUMER_BYTES}, "verify": true}}'
        consumer = await stack.enter_async_context(line_process("benchmarks.transfer.consumer", settings))
        control = (await consumer.hear())["control"]
        await bare.hear()
        wanted = ("--dtype", "float32", "--threads", str(threads), "--device", device)
        batches = ("--max-batch-items", str(load.batch))
        one = await stack.enter_async_context(worker(folder, *wanted, *batches, *CACHE_FLAGS, *flags))
        pinned = _pin(one, bare, consumer)
        session = await stack.enter_async_context(
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600))
        )
        rounds = list(await in_turns(one, bare, load, control, session))
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
