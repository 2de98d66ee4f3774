"""An encode worker that stays up while something is killed, hung, full or broken."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator

import pytest
from PIL import Image

from tests.e2e.encode_worker import EncodeWorker, Reply, new_id, open_consumer, part, picture, start_worker
from tests.faults.encode_worker_watch import (
    BIG,
    is_unhealthy,
    misses,
    pinned,
    until_in_the_tower,
    until_misses,
    until_nothing_pinned,
)
from tests.stubs.consumer import StubConsumer
from tests.stubs.ports import free_port
from tests.stubs.process import wait_until
from tests.stubs.switch import Switch

pytestmark = [pytest.mark.fault, pytest.mark.worker]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[EncodeWorker, Switch]]:
    """Start one worker for the tests that leave it as they found it."""
    folder = tmp_path_factory.mktemp("shared")
    switch = Switch(folder / "fault")
    worker = start_worker(
        folder,
        *("--transfer-timeout", "3", "--max-item-tokens", "100000", "--queue-items", "4000"),
        module="tests.stubs.faulty_encode_worker",
        env=switch.env,
    )
    yield worker, switch
    worker.process.close()


@pytest.fixture
async def worker(shared: tuple[EncodeWorker, Switch]) -> AsyncIterator[EncodeWorker]:
    """Return the shared worker, healthy before and after the test."""
    running, switch = shared
    yield await running.ready()
    switch.set("")
    await running.ready()


@pytest.fixture
def switch(shared: tuple[EncodeWorker, Switch]) -> Switch:
    """Return the shared worker's switch."""
    return shared[1]


def _png(image: Image.Image) -> bytes:
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


async def test_killed_engine_fails_what_was_in_flight_and_comes_back(
    worker: EncodeWorker, switch: Switch
) -> None:
    """kill -9 of the engine: requests in flight fail within 2 s as 503 `engine_unavailable`, `/health` says
    why, and the worker serves again by itself. What they had reserved at a consumer is free again at once."""
    switch.set("hang")
    async with open_consumer() as consumer:
        waiting = [
            asyncio.create_task(
                worker.encode(part(picture((n, 9, 9))), consumer=consumer.address, transfer_ids=[new_id()])
            )
            for n in range(3)
        ]
        await until_in_the_tower(worker)
        await wait_until(
            lambda: consumer.receiver.stats().reservations["writing"] >= 1, "one has reserved", 30.0
        )

        os.kill(worker.engine_pid(), signal.SIGKILL)
        killed_at = time.monotonic()
        replies = await asyncio.gather(*waiting)
        took_s = time.monotonic() - killed_at
        status, text = await worker.get("/health")
        held = consumer.receiver.stats()

    assert held.reservations["writing"] == 0
    assert held.arena_bytes["used"] == 0

    assert [(reply.status, reply.code) for reply in replies] == [(503, "engine_unavailable")] * 3
    assert took_s < 2.0
    assert status == 503
    assert "signal 9" in json.loads(text)["reason"] or "starting" in json.loads(text)["reason"]
    switch.set("")
    await worker.ready()
    assert (await worker.encode(part(picture((0, 9, 9))))).status == 200


async def test_tower_that_fails_on_one_picture_fails_that_one_alone(
    worker: EncodeWorker, switch: Switch
) -> None:
    """A picture on which the tower fails costs its batch nothing: eight others in it succeed."""
    known = await misses(worker)
    switch.set("hang")
    first = asyncio.create_task(worker.encode(part(picture((9, 0, 0)))))
    await until_in_the_tower(worker)
    pictures = [picture((n, 200, 9)) for n in range(8)]
    pictures.insert(4, _png(Image.new("RGB", (112, 112))))
    batch = [asyncio.create_task(worker.encode(part(data))) for data in pictures]
    await until_misses(worker, known + 10)

    switch.set("poison")
    replies = await asyncio.gather(first, *batch)

    assert [reply.status for reply in replies] == [200] * 5 + [500] + [200] * 4
    assert replies[5].code == "encode_failed"
    assert await pinned(worker) == 0


async def test_health_follows_the_tower(worker: EncodeWorker, switch: Switch) -> None:
    """Three failed forwards in a row make `/health` 503 with the reason; it heals without traffic."""
    switch.set("raise")

    replies = [await worker.encode(part(picture((n, 1, 1)))) for n in range(3)]
    await wait_until(lambda: is_unhealthy(worker), "unhealthy", 10.0)
    _, text = await worker.get("/health")
    switch.set("")
    await worker.ready()

    assert [(reply.status, reply.code) for reply in replies] == [(500, "encode_failed")] * 3
    assert "times in a row" in text


async def test_client_that_leaves_frees_its_items(worker: EncodeWorker, switch: Switch) -> None:
    """A client that goes away leaves nothing in flight, nothing queued and nothing pinned."""
    known = await misses(worker)
    encoded = await worker.metric("epdctl_encode_batch_items_sum")
    switch.set("hang")
    first = asyncio.create_task(worker.encode(part(picture((1, 7, 7)))))
    await until_in_the_tower(worker)
    others = [asyncio.create_task(worker.encode(part(picture((n, 7, 8))))) for n in range(3)]
    await until_misses(worker, known + 4)

    for task in (first, *others):
        task.cancel()
    await asyncio.gather(first, *others, return_exceptions=True)

    async def nothing_in_flight() -> bool:
        return await worker.metric("epdctl_in_flight", stage="encode") == 0

    await wait_until(nothing_in_flight, "nothing in flight", 10.0)
    switch.set("")
    await until_nothing_pinned(worker)
    # The one in the tower is finished and kept; the others never ran.
    assert await worker.metric("epdctl_encode_batch_items_sum") == encoded + 1


@pytest.fixture
async def stub_consumer() -> AsyncIterator[StubConsumer]:
    """Run a stub consumer whose behaviour the test sets."""
    async with StubConsumer() as consumer:
        yield consumer


UNAVAILABLE = {(503, "consumer_unavailable"), (504, "upstream_timeout")}


@pytest.mark.parametrize(
    ("behaviour", "answers"),
    [
        ({"reserve": "refuse"}, {(502, "transfer_failed"), (503, "consumer_full")}),
        ({"reserve": "silent"}, UNAVAILABLE),
        ({"peers": "silent"}, UNAVAILABLE),
        ({"reserve": "malformed"}, UNAVAILABLE | {(502, "upstream_protocol"), (502, "transfer_failed")}),
    ],
    ids=["refuses", "silent at reserve", "silent at first contact", "speaks no protocol"],
)
async def test_consumer_that_does_not_take_it_fails_the_request_in_time(
    worker: EncodeWorker,
    stub_consumer: StubConsumer,
    behaviour: dict[str, str],
    answers: set[tuple[int, str]],
) -> None:
    """The reply tells the truth about the push, within the deadline, and nothing stays pinned."""
    stub_consumer.set_behaviour(behaviour)
    failed = await worker.metric("epdctl_ec_transfers_total", side="producer", outcome="failed")
    begun = time.monotonic()

    reply = await worker.encode(part(picture()), consumer=stub_consumer.address, transfer_ids=[new_id()])

    assert (reply.status, reply.code) in answers
    assert time.monotonic() - begun < 9.0
    await until_nothing_pinned(worker)

    async def counted() -> bool:
        now = await worker.metric("epdctl_ec_transfers_total", side="producer", outcome="failed")
        return now == failed + 1

    await wait_until(counted, "the failure is counted once", 10.0)


async def test_dead_consumer_fails_fast_and_harms_no_other(worker: EncodeWorker) -> None:
    """A dead consumer address is 503 `consumer_unavailable` at once; a live consumer gets its rows."""
    async with open_consumer() as alive:
        begun = time.monotonic()
        dead, good = await asyncio.gather(
            worker.encode(
                part(picture((1, 1, 1))),
                consumer=f"tcp://127.0.0.1:{free_port()}",
                transfer_ids=[new_id()],
            ),
            worker.encode(part(picture((2, 2, 2))), consumer=alive.address, transfer_ids=[new_id()]),
        )
        took_s = time.monotonic() - begun

    assert (dead.status, dead.code) == (503, "consumer_unavailable")
    assert good.status == 200
    assert took_s < 5.0


async def test_the_log_names_the_consumer_that_failed(worker: EncodeWorker) -> None:
    """Which consumer did not answer stands in the engine's line and in the request's, not in the answer."""
    address = f"tcp://127.0.0.1:{free_port()}"

    reply = await worker.encode(part(picture((1, 4, 7))), consumer=address, transfer_ids=[new_id()])

    def named(event: str) -> bool:
        lines = worker.process.stderr.splitlines()
        return any(f'"{event}"' in line and f'"consumer":"{address}"' in line for line in lines)

    assert reply.code == "consumer_unavailable"
    assert address.rsplit(":", 1)[1] not in str(reply.body["error"])
    await wait_until(lambda: named("push_failed"), "the engine's line", 20.0)
    await wait_until(lambda: named("encode_finished"), "the request's line", 20.0)


async def test_cache_hits_for_silent_consumers_are_bounded(worker: EncodeWorker) -> None:
    """Hits that wait for silent consumers fill the engine up to its bound; beyond it they are 429 at once,
    the others fail in time, and nothing stays pinned."""
    known = part(picture((77, 1, 1)))
    assert (await worker.encode(known)).status == 200

    async with StubConsumer({"reserve": "silent"}) as one, StubConsumer({"reserve": "silent"}) as other:
        begun = time.monotonic()
        replies = await asyncio.gather(
            *(
                worker.encode(
                    *([known] * 60), consumer=consumer.address, transfer_ids=[new_id() for _ in range(60)]
                )
                for consumer in (one, other)
                for _ in range(14)
            )
        )
        took_s = time.monotonic() - begun

    answers = {(reply.status, reply.code) for reply in replies}
    assert (429, "overloaded") in answers
    assert answers <= UNAVAILABLE | {(429, "overloaded")}
    assert took_s < 15.0
    await until_nothing_pinned(worker)


async def test_full_consumer_is_said_to_be_full(worker: EncodeWorker) -> None:
    """A consumer without room is 503 `consumer_full`; what fits is delivered afterwards."""
    async with open_consumer(nbytes=65536) as small:
        full = await worker.encode(
            part(picture((1, 1, 9), (300, 300))), consumer=small.address, transfer_ids=[new_id()], **BIG
        )
        fits = await worker.encode(part(picture((2, 2, 9))), consumer=small.address, transfer_ids=[new_id()])

    assert (full.status, full.code) == (503, "consumer_full")
    assert fits.status == 200
    await until_nothing_pinned(worker)


async def test_big_pictures_do_not_stop_health(worker: EncodeWorker) -> None:
    """While large pictures are decoded and resized, `/health` still answers soon."""
    large = _png(Image.linear_gradient("L").resize((2500, 2500)).convert("RGB"))
    work = [asyncio.create_task(worker.encode(part(large + bytes([n])))) for n in range(4)]
    slowest = 0.0
    while not all(task.done() for task in work):
        begun = time.monotonic()
        assert await worker.is_healthy()
        slowest = max(slowest, time.monotonic() - begun)
    replies: list[Reply] = await asyncio.gather(*work)

    assert [reply.status for reply in replies] == [200] * 4
    assert slowest < 1.0
