"""What an encode worker is doing now, as its metrics tell, and pictures that are large for it."""

from __future__ import annotations

import asyncio

from tests.e2e.encode_worker import EncodeWorker, Reply, new_id, part, picture
from tests.stubs.process import wait_until

BIG = {"mm_processor_kwargs": {"min_pixels": 1_000_000, "max_pixels": 1_100_000}}
"""Makes a tiny picture give an embedding of some 340 KB."""
MEDIUM = {"mm_processor_kwargs": {"min_pixels": 300_000, "max_pixels": 350_000}}
"""Makes a tiny picture give an embedding of which an arena of a MiB holds ten."""


async def pinned(worker: EncodeWorker) -> float:
    """Return the arena bytes that are read or written now."""
    return await worker.metric("epdctl_arena_bytes", state="pinned")


async def until_in_the_tower(worker: EncodeWorker) -> None:
    """Wait until an item is in the tower: its arena space is pinned."""

    async def running() -> bool:
        return await pinned(worker) > 0

    await wait_until(running, "an item in the tower", 20.0)


async def until_nothing_pinned(worker: EncodeWorker) -> None:
    """Wait until no arena byte is read or written any more."""

    async def quiet() -> bool:
        return await pinned(worker) == 0

    await wait_until(quiet, "nothing pinned", 30.0)


async def until_nothing_in_flight(worker: EncodeWorker) -> None:
    """Wait until the worker has no item of anybody."""

    async def idle() -> bool:
        return await worker.metric("epdctl_in_flight") == 0

    await wait_until(idle, "nothing in flight", 30.0)


async def misses(worker: EncodeWorker) -> float:
    """Return how many items the engine did not know."""
    return await worker.metric("epdctl_cache_requests_total", result="miss")


async def until_misses(worker: EncodeWorker, count: float) -> None:
    """Wait until the engine has heard of `count` items that it did not know."""

    async def heard() -> bool:
        return await misses(worker) >= count

    await wait_until(heard, f"{count} items at the engine", 20.0)


async def is_unhealthy(worker: EncodeWorker) -> bool:
    """Return whether the worker says that it cannot serve."""
    return (await worker.get("/health"))[0] == 503


async def encode_for(worker: EncodeWorker, consumer: str, colours: range) -> list[Reply]:
    """Return the replies to requests, all at once, for a medium picture of each colour."""
    asked = (
        worker.encode(part(picture((n, 8, 8))), consumer=consumer, transfer_ids=[new_id()], **MEDIUM)
        for n in colours
    )
    return await asyncio.gather(*asked)
