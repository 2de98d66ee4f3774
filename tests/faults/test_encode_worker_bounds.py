"""Encode workers of the test's own: full, told to stop, killed, or started wrongly."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from epdctl.worker.transfer.ports import TransferOutcome
from tests.e2e.encode_worker import EncodeWorker, Reply, new_id, open_consumer, part, picture, start_worker
from tests.faults.encode_worker_watch import (
    BIG,
    MEDIUM,
    encode_for,
    is_unhealthy,
    pinned,
    until_in_the_tower,
    until_misses,
    until_nothing_in_flight,
    until_nothing_pinned,
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


async def test_the_end_of_what_waits_for_one_consumer_is_not_that_of_others(
    launch: Launch, own_switch: Switch
) -> None:
    """While items for a silent consumer fail, those for a live one wait behind the tower: they arrive."""
    worker = await faulty(launch, own_switch, "--cache-bytes", str(2**20)).ready()

    async with StubConsumer({"reserve": "silent", "cancel": "silent"}) as stub, open_consumer() as alive:
        silent = asyncio.create_task(encode_for(worker, stub.address, range(20)))
        await until_misses(worker, 20)

        async def share_is_encoded() -> bool:
            return await worker.metric("epdctl_encode_seconds_count") > 0

        await wait_until(share_is_encoded, "the silent one's share is encoded, the rest is parked", 20.0)
        begun = await worker.metric("epdctl_encode_queue_seconds_count")
        own_switch.set("hang")
        before = asyncio.create_task(worker.encode(part(picture((8, 8, 200)))))

        async def in_the_tower() -> bool:
            return await worker.metric("epdctl_encode_queue_seconds_count") > begun

        await wait_until(in_the_tower, "the tower stands still", 20.0)
        waiting = asyncio.create_task(encode_for(worker, alive.address, range(100, 104)))
        await until_misses(worker, 25)
        failed = await silent
        own_switch.set("")
        good = [await before, *await waiting]

    assert {(reply.status, reply.code) for reply in failed} == {(503, "consumer_unavailable")}
    assert [reply.status for reply in good] == [200] * 5


async def test_consumers_whose_host_is_none_do_not_keep_the_arena(launch: Launch) -> None:
    """Cache hits for a consumer whose host can be none are refused by name, those for a host that nobody
    knows fail; neither keeps a byte of the arena, nor holds up what comes after them, nor the end."""
    worker = await launch("--cache-bytes", str(2**20)).ready()
    asked = [part(picture((n, 9, 9))) for n in range(8)]
    for one in asked:
        assert (await worker.encode(one, **MEDIUM)).status == 200
    ends = {}
    for host in ("a..b", "..", "x" * 64, ".".join(["x" * 60] * 5), "unknown.invalid"):
        to = f"tcp://{host}:5"
        replies = await asyncio.gather(
            *(worker.encode(one, consumer=to, transfer_ids=[new_id()], **MEDIUM) for one in asked)
        )
        ends[host] = {(reply.status, reply.code, reply.body["error"]["param"]) for reply in replies}

    assert ends.pop("unknown.invalid") == {(503, "consumer_unavailable", "messages[0].content[0]")}
    assert set().union(*ends.values()) == {(400, "invalid_request", "ec_transfer_params.consumer_zmq")}
    await until_nothing_pinned(worker)
    big = await asyncio.gather(*(worker.encode(part(picture((n, 2, 3))), **BIG) for n in range(4)))
    assert [reply.status for reply in big] == [200] * 4
    worker.process.send_signal(signal.SIGTERM)
    assert await worker.process.wait_exit(20.0) == 0


async def test_items_without_room_in_the_arena_end_in_time(launch: Launch) -> None:
    """While deliveries keep the whole arena, items that are not in it get 429 `overloaded` after
    --transfer-timeout, with one log line, as all do who wait for them; once there is room they are served."""
    worker = await launch("--cache-bytes", str(2**20), "--transfer-timeout", "2").ready()
    hits = [part(picture((n, 7, 7))) for n in range(10)]
    for hit in hits:
        assert (await worker.encode(hit, **MEDIUM)).status == 200
    cold = [part(picture((n, 7, 70))) for n in (0, 1, 1)]

    async with StubConsumer({"reserve": "follower"}) as stub:

        async def keep(hit: dict[str, Any], pause_s: float) -> None:
            await asyncio.sleep(pause_s)
            while True:
                await worker.encode(hit, consumer=stub.address, transfer_ids=[new_id()], **MEDIUM)

        keeping = [asyncio.create_task(keep(hit, pause_s)) for hit in hits for pause_s in (0.0, 0.6, 1.2)]

        async def is_full() -> bool:
            return await pinned(worker) > 0.9 * 2**20 and await worker.metric("epdctl_in_flight") == 30

        await wait_until(is_full, "the whole arena is pinned", 20.0)
        refused = await asyncio.gather(
            *(worker.encode(one, **MEDIUM) for one in cold),
            worker.encode(cold[0], consumer=stub.address, transfer_ids=[new_id()], **MEDIUM),
        )
        for task in keeping:
            task.cancel()
        await asyncio.gather(*keeping, return_exceptions=True)
    await until_nothing_pinned(worker)
    served = await asyncio.gather(*(worker.encode(one, **MEDIUM) for one in cold))

    assert {(reply.status, reply.code) for reply in refused} == {(429, "overloaded")}
    assert all("--cache-bytes" in reply.body["error"]["message"] for reply in refused)
    assert worker.process.stderr.count('"arena_full"') in (1, 2)
    assert await worker.metric("epdctl_ec_unsent_total", reason="overloaded") == 1
    assert [reply.status for reply in served] == [200] * 3
    await until_nothing_in_flight(worker)


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
    os.killpg(worker.process.pid, signal.SIGTERM)  # to the engine as well, as a service manager does
    await wait_until(lambda: is_unhealthy(worker), "draining", 10.0)
    late = await worker.encode(part(picture((98, 5, 5))))
    own_switch.set("")
    replies = await asyncio.gather(*accepted)

    assert (refused.status, refused.code) == (429, "overloaded")
    assert "(--queue-items)" in refused.body["error"]["message"]
    assert (late.status, late.code) == (503, "shutting_down")
    assert [reply.status for reply in replies] == [200, 200]
    assert await worker.process.wait_exit(15.0) == 0


async def test_sigterm_waits_for_what_is_answered_and_not_delivered(
    launch: Launch, own_switch: Switch
) -> None:
    """With --reply-after encode an item can be on its way after its answer: SIGTERM lets it arrive."""
    env = own_switch.env | {"EPDCTL_TEST_CONTROL_TIMEOUT": "60"}
    worker = await launch(
        "--reply-after", "encode", module="tests.stubs.faulty_encode_worker", env=env
    ).ready()
    async with open_consumer() as consumer:
        listener, may_answer = consumer.receiver._listener, asyncio.Event()
        answer = listener._answer

        async def answer_later(body: bytes) -> bytes:
            await may_answer.wait()
            return await answer(body)

        listener._answer = answer_later
        reply = await worker.encode(
            part(picture((4, 6, 6))), consumer=consumer.address, transfer_ids=[new_id()]
        )
        worker.process.send_signal(signal.SIGTERM)
        await wait_until(lambda: is_unhealthy(worker), "draining", 10.0)
        for _ in range(5):
            assert await is_unhealthy(worker), "it waits for the push"
        may_answer.set()
        await wait_until(lambda: bool(consumer.records), "the transfer is over", 10.0)
        code = await worker.process.wait_exit(20.0)

    assert reply.status == 200
    assert [record.outcome for record in consumer.records] == [TransferOutcome.DELIVERED]
    assert code == 0


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


async def test_reply_after_encode_and_death_of_the_front(launch: Launch) -> None:
    """With --reply-after encode the answer comes when the rows are there, whatever the consumer does; kill -9
    of the front leaves no engine process behind."""
    flags = ("--reply-after", "encode", "--transfer-timeout", "2", "--cache-bytes", str(2**20))
    worker = await launch(*flags).ready()

    async def counted() -> bool:
        return await worker.metric("epdctl_ec_transfers_total", side="producer", outcome="failed") == 1

    async with StubConsumer({"reserve": "silent"}) as one:
        reply = await worker.encode(part(picture()), consumer=one.address, transfer_ids=["t"], timeout_s=1.9)
        await wait_until(counted, "the failed push is counted", 20.0)
        await until_nothing_pinned(worker)

    assert reply.items[next(iter(reply.items))]["transfer_id"] == "t"
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


async def test_wrong_start_says_what_is_wrong(launch: Launch, tmp_path: Path) -> None:
    """A missing model, a folder that is none, and a taken port end with exit 1 and one clear line."""
    (tmp_path / "empty").mkdir()
    with socket.create_server(("127.0.0.1", free_port())) as taken:
        port = str(taken.getsockname()[1])
        wrong = {
            "no such folder": launch(model=tmp_path / "missing", env={"HF_HUB_OFFLINE": "1"}),
            "config.json": launch(model=tmp_path / "empty"),
            f"--port {port}": launch("--port", port),
        }
        codes = [await failing.process.wait_exit(60.0) for failing in wrong.values()]

    assert codes == [1, 1, 1]
    for text, failing in wrong.items():
        assert text in failing.process.stderr
        assert "Traceback" not in failing.process.stderr
