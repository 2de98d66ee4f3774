"""An encode worker with something killed, hung, full or broken."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.e2e.encode_worker import (
    EncodeWorker,
    Reply,
    new_id,
    open_consumer,
    part,
    picture,
    start_worker,
)
from tests.stubs.consumer import StubConsumer
from tests.stubs.ports import free_port
from tests.stubs.process import wait_until
from tests.stubs.switch import Switch

pytestmark = [pytest.mark.fault, pytest.mark.worker]

Launch = Callable[..., EncodeWorker]


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    """Start workers whose tower has the test's switch; they end with the test."""
    started: list[EncodeWorker] = []

    def starter(*flags: str, **options: Any) -> EncodeWorker:
        started.append(start_worker(tmp_path, *flags, name=f"encode-{len(started)}", **options))
        return started[-1]

    yield starter
    for worker in started:
        worker.process.close()


def faulty(launch: Launch, switch: Switch, *flags: str) -> EncodeWorker:
    """Start a worker whose tower has a switch."""
    return launch(*flags, module="tests.stubs.faulty_encode_worker", env=switch.env)


@pytest.fixture
def own_switch(tmp_path: Path) -> Switch:
    """Return a switch for a worker of the test's own."""
    return Switch(tmp_path / "fault")


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


async def _is_unhealthy(worker: EncodeWorker) -> bool:
    return (await worker.get("/health"))[0] == 503


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
    await wait_until(lambda: _is_unhealthy(worker), "unhealthy", 10.0)
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


MEDIUM = {"mm_processor_kwargs": {"min_pixels": 300_000, "max_pixels": 350_000}}
"""Makes a tiny picture give an embedding of which an arena of a MiB holds ten."""


async def encode_for(worker: EncodeWorker, consumer: str, colours: range) -> list[Reply]:
    """Return the replies to requests, all at once, for a medium picture of each colour."""
    asked = (
        worker.encode(part(picture((n, 8, 8))), consumer=consumer, transfer_ids=[new_id()], **MEDIUM)
        for n in colours
    )
    return await asyncio.gather(*asked)


async def test_silent_consumer_does_not_keep_the_arena_from_others(
    launch: Launch, own_switch: Switch
) -> None:
    """Two arenas full of items for a consumer that answers no reservation, then four for a live one: these
    are delivered while all the others still wait for their answer, however long that takes (hazard 29)."""
    worker = launch(
        *("--cache-bytes", str(2**20), "--transfer-timeout", "600"),
        module="tests.stubs.faulty_encode_worker",
        env=own_switch.env | {"EPDCTL_TEST_CONTROL_TIMEOUT": "600"},
    )
    await worker.ready()

    async with StubConsumer({"reserve": "silent", "cancel": "silent"}) as stub, open_consumer() as alive:
        silent = asyncio.create_task(encode_for(worker, stub.address, range(20)))
        await until_misses(worker, 20)
        await until_in_the_tower(worker)
        good = await encode_for(worker, alive.address, range(100, 104))
        in_flight = await worker.metric("epdctl_in_flight")
        silent.cancel()
        await asyncio.gather(silent, return_exceptions=True)

    assert [reply.status for reply in good] == [200] * 4
    assert in_flight == 20
    await until_nothing_pinned(worker)
    await until_nothing_in_flight(worker)


async def test_what_waits_for_a_silent_consumer_fails_in_time(launch: Launch) -> None:
    """Two arenas full of items for a consumer that answers no reservation fail within the deadline, and so do
    as many once it is known to be silent; nothing stays behind."""
    worker = await launch("--cache-bytes", str(2**20)).ready()
    replies: list[Reply] = []

    async with StubConsumer({"reserve": "silent", "cancel": "silent"}) as stub:
        for _ in range(2):
            begun = time.monotonic()
            replies += await encode_for(worker, stub.address, range(20))
            assert time.monotonic() - begun < 8.0 + 4.0

    assert {(reply.status, reply.code) for reply in replies} == {(503, "consumer_unavailable")}
    await until_nothing_pinned(worker)
    await until_nothing_in_flight(worker)


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


BIG = {"mm_processor_kwargs": {"min_pixels": 1_000_000, "max_pixels": 1_100_000}}
"""Makes a tiny picture give an embedding of some 340 KB."""


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


async def test_small_cache_serves_what_fits_and_names_what_does_not(launch: Launch) -> None:
    """An embedding that can never fit is refused with the flag that helps, its sibling succeeds; more
    embeddings than fit at a time are encoded one after the other as space comes back."""
    worker = await launch("--cache-bytes", str(2**20), "--max-item-tokens", "100000").ready()
    huge = {"mm_processor_kwargs": {"min_pixels": 4_000_000, "max_pixels": 5_000_000}}

    large, small = await asyncio.gather(
        worker.encode(part(picture((1, 2, 3), (400, 400))), **huge), worker.encode(part(picture((3, 2, 1))))
    )
    many = await asyncio.gather(
        *(worker.encode(part(picture((n, 2, 3), (300, 300))), **BIG) for n in range(8))
    )

    assert (large.status, large.code) == (400, "media_unavailable")
    assert "--cache-bytes" in large.body["error"]["message"]
    assert [small.status, *(reply.status for reply in many)] == [200] * 9
    assert await worker.metric("epdctl_cache_evictions_total", tier="l1") >= 5
    assert await pinned(worker) == 0


async def test_full_queue_and_sigterm(launch: Launch, own_switch: Switch) -> None:
    """Beyond --queue-items a request gets 429 `overloaded` at once. SIGTERM under load: new requests get 503
    `shutting_down`, accepted ones are answered, exit 0."""
    worker = await faulty(launch, own_switch, "--queue-items", "2", "--max-items", "2").ready()
    own_switch.set("hang")
    accepted = [asyncio.create_task(worker.encode(part(picture((n, 5, 5))))) for n in range(2)]
    await until_misses(worker, 2)

    refused = await worker.encode(part(picture((99, 5, 5))))
    worker.process.send_signal(signal.SIGTERM)
    await wait_until(lambda: _is_unhealthy(worker), "draining", 10.0)
    late = await worker.encode(part(picture((98, 5, 5))))
    own_switch.set("")
    replies = await asyncio.gather(*accepted)

    assert (refused.status, refused.code) == (429, "overloaded")
    assert "(--queue-items)" in refused.body["error"]["message"]
    assert (late.status, late.code) == (503, "shutting_down")
    assert [reply.status for reply in replies] == [200, 200]
    assert await worker.process.wait_exit(15.0) == 0


async def test_memory_for_media_is_bounded(launch: Launch, own_switch: Switch) -> None:
    """Beyond --media-memory-bytes: 400 for a request that is too large by itself, 429 for one that finds no
    room beside others, and what ended makes room."""
    flags = ("--max-media-bytes", "100000", "--media-memory-bytes", "150000")
    worker = await faulty(launch, own_switch, *flags).ready()

    def large(number: int) -> bytes:
        return picture((number, 7, 7)) + bytes(90_000)  # what follows a PNG's end is not looked at

    too_large = await worker.encode(part(large(1)), part(large(2)))
    in_turn = [await worker.encode(part(large(number))) for number in range(3)]
    own_switch.set("hang")
    hung = asyncio.create_task(worker.encode(part(large(9))))
    await until_misses(worker, 4)
    beside = await worker.encode(part(large(10)))
    own_switch.set("")

    assert (too_large.status, too_large.code) == (400, "media_unavailable")
    assert (beside.status, beside.code) == (429, "overloaded")
    for refused in (too_large, beside):
        assert "--media-memory-bytes" in refused.body["error"]["message"]
    assert [reply.status for reply in (*in_turn, await hung)] == [200] * 4
    assert (await worker.encode(part(large(10)))).status == 200


async def test_sigterm_fails_what_does_not_finish(launch: Launch, own_switch: Switch) -> None:
    """At the end of its grace a worker answers what is left with 503 `shutting_down`, and exits 0."""
    worker = await faulty(launch, own_switch, "--shutdown-grace", "0.5").ready()
    own_switch.set("hang")
    stuck = asyncio.create_task(worker.encode(part(picture((1, 6, 6)))))
    await until_in_the_tower(worker)

    worker.process.send_signal(signal.SIGTERM)
    reply = await stuck

    assert (reply.status, reply.code) == (503, "shutting_down")
    assert await worker.process.wait_exit(20.0) == 0


async def test_sigterm_while_loading_ends_at_once(launch: Launch) -> None:
    """A worker that is told to stop while it still loads does not finish loading first, and exits 0."""
    worker = launch()

    async def loading() -> bool:
        return (await worker.get("/health"))[0] == 503

    await worker.process.wait_until(loading, "it answers while it loads", 60.0)
    worker.process.send_signal(signal.SIGTERM)
    begun = time.monotonic()

    assert await worker.process.wait_exit(30.0) == 0
    assert time.monotonic() - begun < 3.0
    assert "worker_ready" not in worker.process.stderr


async def test_reply_after_encode_and_death_of_the_front(launch: Launch, stub_consumer: StubConsumer) -> None:
    """With --reply-after encode the answer comes when the rows are there, whatever the consumer does; kill -9
    of the front leaves no engine process behind."""
    flags = ("--reply-after", "encode", "--transfer-timeout", "2", "--cache-bytes", str(2**20))
    worker = await launch(*flags).ready()
    stub_consumer.set_behaviour({"reserve": "silent"})

    reply = await worker.encode(
        part(picture()), consumer=stub_consumer.address, transfer_ids=["t"], timeout_s=1.9
    )

    assert reply.items[next(iter(reply.items))]["transfer_id"] == "t"

    async def counted() -> bool:
        return await worker.metric("epdctl_ec_transfers_total", side="producer", outcome="failed") == 1

    await wait_until(counted, "the failed push is counted", 20.0)
    await until_nothing_pinned(worker)
    async with StubConsumer({"reserve": "silent", "cancel": "silent"}) as other:
        await _what_waits_aside_ends(worker, other)
    engine = worker.engine_pid()
    os.kill(worker.process.pid, signal.SIGKILL)
    await wait_until(lambda: not Path(f"/proc/{engine}").exists(), "the engine's end", 15.0)


async def _what_waits_aside_ends(worker: EncodeWorker, silent: StubConsumer) -> None:
    """Items that are kept back for a silent consumer, two arenas full, fail within the deadline of a push and
    not one after the other; why is in the log and in the metrics, and nothing stays behind."""
    begun = time.monotonic()
    replies = await encode_for(worker, silent.address, range(20))
    took_s = time.monotonic() - begun

    failed = [reply for reply in replies if reply.status != 200]
    assert {(reply.status, reply.code) for reply in failed} == {(503, "consumer_unavailable")}
    assert took_s < 2.0 + 8.0

    async def counted() -> bool:
        metrics = {"reason": "consumer_unavailable"}
        return await worker.metric("epdctl_ec_unsent_total", **metrics) >= len(failed)

    await wait_until(counted, "the items that were not sent are counted", 20.0)
    await wait_until(lambda: '"items_unsent"' in worker.process.stderr, "the reason in the log", 20.0)
    await until_nothing_pinned(worker)
    await until_nothing_in_flight(worker)


async def test_wrong_start_says_what_is_wrong(worker: EncodeWorker, launch: Launch, tmp_path: Path) -> None:
    """A missing model, a folder that is none, and a taken port end with exit 1 and one clear line."""
    (tmp_path / "empty").mkdir()
    port = worker.url.rsplit(":", 1)[1]
    wrong = {
        "no such folder": launch(model=tmp_path / "missing", env={"HF_HUB_OFFLINE": "1"}),
        "config.json": launch(model=tmp_path / "empty"),
        f"--port {port}": launch("--port", port),
    }

    for text, failing in wrong.items():
        assert await failing.process.wait_exit(60.0) == 1
        assert text in failing.process.stderr
        assert "Traceback" not in failing.process.stderr
