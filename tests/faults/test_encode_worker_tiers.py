"""The tiers below the arena with real workers and a real Mooncake Store: absent, killed, hung, full.

Two workers are started once, before their store is; the first test finds it absent, the others start it, and
the last one ends a worker.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest

from epdctl.worker.transfer.environment import mooncake_environment
from tests.e2e.encode_worker import (
    Consumer,
    EncodeWorker,
    Reply,
    new_id,
    open_consumer,
    part,
    picture,
    start_worker,
)
from tests.stubs.mooncake_master import Master
from tests.stubs.process import wait_until

pytestmark = [pytest.mark.fault, pytest.mark.worker, pytest.mark.timeout(240)]

LOOK_S = 2.0
"""The workers' `--mooncake-store-timeout`: long, so that a slow machine does not turn a hit into a miss."""

SLACK_S = 15.0
"""What a request may take beside: most of it is for a machine that does much else."""

BIG = {"mm_processor_kwargs": {"min_pixels": 1_000_000, "max_pixels": 1_100_000}}
"""Makes a tiny picture give an embedding of some 340 KB."""

_colours = ((red, green, 77) for red, green in itertools.product(range(256), range(256)))


def fresh() -> bytes:
    """Return a picture that no worker has seen."""
    return picture(next(_colours))


@dataclass(slots=True, kw_only=True)
class Fleet:
    """Two workers that share a store; the second one's arena is small and has host memory below it."""

    master: Master
    first: EncodeWorker
    second: EncodeWorker
    has_store: bool = False

    async def ready(self) -> Fleet:
        """Wait until both workers are healthy."""
        await asyncio.gather(self.first.ready(), self.second.ready())
        return self

    async def joined(self) -> Fleet:
        """Wait until both workers use the store, which is started if it never was."""
        await self.ready()
        if not self.has_store:
            await self.master.start()
            self.has_store = True
            for worker in (self.first, self.second):
                await wait_until(lambda w=worker: changes(w, "store_up") > 0, "the store is joined", 90)
        return self


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Start the workers."""
    folder = tmp_path_factory.mktemp("fleet")
    master = Master(folder)
    store = ("--mooncake-store", master.address, "--mooncake-store-timeout", str(LOOK_S))
    store += ("--mooncake-store-segment-bytes", str(16 * 2**20))
    small = ("--cache-bytes", str(2**20), "--cache-dram-bytes", str(8 * 2**20), "--max-item-tokens", "9999")
    # Mooncake's own time-out, 2 s as we set it, must not be what saves us from a store that hangs.
    env = {"MC_RPC_TIMEOUT_MS": "60000"}
    first = start_worker(folder, *store, name="first", env=env)
    second = start_worker(folder, *store, *small, name="second", env=env)
    yield Fleet(master=master, first=first, second=second)
    for running in (first, second):
        running.process.close()
    master.close()


async def publications(worker: EncodeWorker, outcome: str) -> float:
    """Return how many publications ended so."""
    return await worker.metric("epdctl_store_publications_total", outcome=outcome)


async def looked(worker: EncodeWorker, tier: str, result: str) -> float:
    """Return how many look-ups ended so."""
    return await worker.metric("epdctl_cache_requests_total", tier=tier, result=result)


async def forwards(worker: EncodeWorker) -> float:
    """Return how many items the tower encoded."""
    return await worker.metric("epdctl_encode_batch_items_sum")


def changes(worker: EncodeWorker, event: str) -> int:
    """Return how often the worker logged that its store is there or not."""
    return worker.process.logs.count(f'"event":"{event}"')


async def encode_until_stored(worker: EncodeWorker) -> bytes:
    """Encode new pictures until one was published; return it."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        await wait_until(lambda: all_ended(worker), "every publication has ended", 60)
        before = await publications(worker, "stored")
        data = fresh()
        assert (await worker.encode(part(data))).status == 200
        await wait_until(lambda: all_ended(worker), "the publication has ended", 60)
        if await publications(worker, "stored") > before:
            return data
    raise AssertionError("nothing was published within 60 s")


async def all_ended(worker: EncodeWorker) -> bool:
    """Return whether as many publications have ended as items were encoded."""
    sums = {"epdctl_store_publications_total": 0.0, "epdctl_encode_batch_items_sum": 0.0}
    for line in (await worker.get("/metrics"))[1].splitlines():
        series, _, value = line.rpartition(" ")
        if (name := series.split("{")[0]) in sums:
            sums[name] += float(value)
    published, encoded = sums.values()
    return published >= encoded


async def is_unhealthy(worker: EncodeWorker) -> bool:
    """Return whether `/health` says so."""
    return not await worker.is_healthy()


async def delivered(worker: EncodeWorker, consumer: Consumer, data: bytes) -> Any:
    """Have the rows of a picture pushed, and return them."""
    name, transfer_id = new_id(), new_id()
    reply = await worker.encode(part(data, name), consumer=consumer.address, transfer_ids=[transfer_id])
    assert reply.status == 200, reply.body
    rows = reply.body["usage"]["prompt_tokens"]
    return await consumer.rows(transfer_id, name, (rows, 64))


async def test_without_a_store_at_the_start_memory_serves(fleet: Fleet) -> None:
    """A worker whose store is absent starts and serves; more embeddings than its arena holds go to memory and
    come back whole, also while pushes leave no room for a moment."""
    worker = (await fleet.ready()).second
    assert changes(worker, "store_down") == 1
    pictures = [picture((n, 40, 40), (300, 300)) for n in range(5)]
    draw = random.Random(7)
    for data in pictures:
        assert (await worker.encode(part(data), **BIG)).status == 200
    encoded = await forwards(worker)

    async with open_consumer(nbytes=32 * 2**20) as consumer:

        async def ask(data: bytes) -> Reply:
            return await worker.encode(
                part(data, new_id()), consumer=consumer.address, transfer_ids=[new_id()], **BIG
            )

        async def client() -> list[Reply]:
            return [await ask(draw.choice(pictures)) for _ in range(10)]

        replies = [reply for some in await asyncio.gather(*(client() for _ in range(6))) for reply in some]

    # Each push carries a digest of the rows as they left the tower, which the consumer compares.
    assert {reply.status for reply in replies} == {200}
    assert await forwards(worker) == encoded, "nothing was lost on the way"
    assert await looked(worker, "l2", "hit") >= 5
    assert await worker.metric("epdctl_cache_evictions_total", tier="l2") == 0
    assert await looked(worker, "l3", "hit") == 0


async def test_the_second_worker_finds_what_the_first_one_made(fleet: Fleet) -> None:
    """A picture that one worker encoded needs no tower at another one with the same store."""
    await fleet.joined()
    data = await encode_until_stored(fleet.first)
    encoded = await forwards(fleet.second)

    async with open_consumer() as consumer:
        theirs = await delivered(fleet.second, consumer, data)
        ours = await delivered(fleet.first, consumer, data)

    assert bool((theirs == ours).all())
    assert await looked(fleet.second, "l3", "hit") == 1
    assert await forwards(fleet.second) == encoded
    assert await looked(fleet.first, "l1", "hit") >= 1


async def test_a_store_that_is_killed_under_load_fails_nothing(fleet: Fleet) -> None:
    """Kill the store among requests: all succeed in time. Restarted it is used; each change is one line."""
    await fleet.joined()
    workers = [fleet.first, fleet.second]
    before = [(changes(worker, "store_down"), changes(worker, "store_up")) for worker in workers]
    slowest = 0.0
    replies: list[Reply] = []
    go_on = True

    async def client(worker: EncodeWorker) -> None:
        nonlocal slowest
        while go_on:
            begun = time.monotonic()
            replies.append(await worker.encode(part(fresh())))
            slowest = max(slowest, time.monotonic() - begun)

    clients = [asyncio.create_task(client(worker)) for worker in workers * 2]
    await wait_until(lambda: len(replies) > 20, "requests are served", 60)
    fleet.master.kill()
    killed = len(replies)
    for worker, (down, _) in zip(workers, before, strict=True):
        await wait_until(lambda w=worker, d=down: changes(w, "store_down") > d, "the store is missed", 60)
    await wait_until(lambda: len(replies) > killed + 40, "requests are served without a store", 60)
    await fleet.master.start()
    for worker, (_, up) in zip(workers, before, strict=True):
        await wait_until(lambda w=worker, u=up: changes(w, "store_up") > u, "the store is joined again", 90)
    go_on = False
    await asyncio.gather(*clients)

    assert {reply.status for reply in replies} == {200}
    assert slowest < LOOK_S + SLACK_S
    found = await looked(fleet.second, "l3", "hit")
    data = await encode_until_stored(fleet.first)
    assert (await fleet.second.encode(part(data))).status == 200
    assert await looked(fleet.second, "l3", "hit") == found + 1
    after = [(changes(worker, "store_down"), changes(worker, "store_up")) for worker in workers]
    assert after == [(down + 1, up + 1) for down, up in before]


async def test_a_store_that_hangs_costs_one_deadline(fleet: Fleet) -> None:
    """Stop the store's process: requests under way wait for the look-up's deadline, later ones do not."""
    worker = (await fleet.joined()).first
    await encode_until_stored(worker)
    joined = changes(worker, "store_up")
    late = await looked(worker, "l3", "late") + await looked(worker, "l3", "failed")
    fleet.master.process.send_signal(signal.SIGSTOP)
    try:
        begun = time.monotonic()
        assert (await worker.encode(part(fresh()))).status == 200
        assert time.monotonic() - begun < LOOK_S + SLACK_S

        begun = time.monotonic()
        for _ in range(10):
            assert (await worker.encode(part(fresh()))).status == 200
        assert time.monotonic() - begun < 10 * LOOK_S, "ten requests did not wait for the store each"

        waited = await looked(worker, "l3", "late") + await looked(worker, "l3", "failed") - late
        assert waited <= 2
        assert await looked(worker, "l3", "skipped") >= 8
    finally:
        fleet.master.process.send_signal(signal.SIGCONT)
    await wait_until(lambda: changes(worker, "store_up") > joined, "the store is joined again", 60)


async def test_a_bad_value_is_a_miss(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """A value that somebody overwrote is no hit: the tower runs, and the right value takes its place."""
    await fleet.joined()
    known = await keys_of(fleet.master)
    data = await encode_until_stored(fleet.first)
    key = (await keys_of(fleet.master) - known).pop()
    intruder = Intruder(fleet.master, monkeypatch)
    hits = await looked(fleet.second, "l3", "hit")
    try:
        good = await asyncio.to_thread(intruder.read, key)
        assert good
        bad = good[:-1] + bytes([good[-1] ^ 1])
        await asyncio.to_thread(intruder.replace, key, bad)

        async with open_consumer() as consumer:
            ours = await delivered(fleet.second, consumer, data)
            theirs = await delivered(fleet.first, consumer, data)

        assert bool((ours == theirs).all())
        assert await looked(fleet.second, "l3", "hit") == hits

        async def is_healed() -> bool:
            return await asyncio.to_thread(intruder.read, key) == good

        await wait_until(is_healed, "the second worker's value took its place", 30)
    finally:
        await asyncio.to_thread(intruder.close)


async def keys_of(master: Master) -> set[str]:
    """Return the keys that the store has."""
    async with (
        aiohttp.ClientSession() as session,
        session.get(master.metrics_url + "/get_all_keys") as answer,
    ):
        return set((await answer.text()).split())


async def test_a_full_store_fails_nothing(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """With no byte left in the store requests are served and what it refuses is counted; it is not down."""
    worker = (await fleet.joined()).second
    await encode_until_stored(worker)
    filler = Intruder(fleet.master, monkeypatch)
    full = await publications(worker, "full")
    try:

        async def is_refused() -> bool:
            # Anew each time: a segment that was away comes back, and what lay there unpinned is evicted.
            await asyncio.to_thread(filler.fill)
            assert (await worker.encode(part(fresh()), **BIG)).status == 200
            return await publications(worker, "full") > full

        await wait_until(is_refused, "a publication found no space", 60)
        assert '"event":"store_down"' not in worker.process.logs.rsplit('"event":"store_up"', 1)[1]
    finally:
        await asyncio.to_thread(filler.close)
    await encode_until_stored(worker)


class Intruder:
    """Another client of the store, which takes space and overwrites values, and lends none."""

    def __init__(self, master: Master, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, value in mooncake_environment(os.environ, protocol="tcp").items():
            monkeypatch.setenv(name, value)
        from mooncake.store import MooncakeDistributedStore, ReplicateConfig

        self._store = MooncakeDistributedStore()
        assert self._store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 32 * 2**20, "tcp", "", master.address) == 0
        self._config = ReplicateConfig()
        self._config.with_hard_pin = True
        self._keys: list[str] = []

    def read(self, key: str) -> bytes:
        """Return a value; nothing when there is none."""
        return bytes(self._store.get(key))

    def replace(self, key: str, value: bytes) -> None:
        """Put another value in the place of one."""
        assert self._store.remove(key, True) == 0
        assert self._store.put(key, value) == 0

    def fill(self) -> None:
        """Put ever smaller values that are never evicted, until not even a small one has space."""
        for nbytes in (8 * 2**20, 2**20, 2**17, 2**14):
            value = bytes(nbytes)
            while self._store.put(key := f"filler-{len(self._keys)}", value, self._config) == 0:
                self._keys.append(key)
                assert len(self._keys) < 2000

    def close(self) -> None:
        """Give the space back and leave."""
        for key in self._keys:
            self._store.remove(key, True)
        self._store.close()


async def test_a_store_that_hangs_at_the_start_is_left_alone(fleet: Fleet) -> None:
    """An engine that starts while the store hangs encodes as if there was none, and joins it later."""
    worker = (await fleet.joined()).first
    joined = changes(worker, "store_up")
    fleet.master.process.send_signal(signal.SIGSTOP)
    try:
        os.kill(worker.engine_pid(), signal.SIGKILL)
        await wait_until(lambda: is_unhealthy(worker), "the engine is gone", 30)
        # Setting a client up would stop the engine for as long as Mooncake's own time-out, here 60 s.
        await worker.process.wait_until(worker.is_healthy, "healthy without a store", 50)
        begun = time.monotonic()
        for _ in range(10):
            assert (await worker.encode(part(fresh()))).status == 200
        assert time.monotonic() - begun < SLACK_S
    finally:
        fleet.master.process.send_signal(signal.SIGCONT)
    await wait_until(lambda: changes(worker, "store_up") > joined, "the store is joined", 60)


async def test_a_store_that_hangs_does_not_keep_a_worker_from_ending(fleet: Fleet) -> None:
    """SIGTERM when leaving the store hangs: the worker ends in time, with exit code 0."""
    worker = (await fleet.joined()).second
    await encode_until_stored(worker)
    fleet.master.process.send_signal(signal.SIGSTOP)
    try:
        worker.process.send_signal(signal.SIGTERM)

        assert await worker.process.wait_exit(25) == 0
    finally:
        fleet.master.process.send_signal(signal.SIGCONT)
