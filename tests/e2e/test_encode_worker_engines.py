"""An encode worker with two data-parallel engines behind one URL."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import torch

from tests.e2e.encode_worker import (
    MODELS,
    Consumer,
    EncodeWorker,
    Reply,
    Truth,
    new_id,
    open_consumer,
    part,
    picture,
    start_worker,
)
from tests.stubs.ports import free_port
from tests.stubs.process import wait_until
from tests.stubs.switch import Switch

pytestmark = [pytest.mark.e2e, pytest.mark.worker, pytest.mark.timeout(240)]


class Registry:
    """Takes registrations, on a thread, for as long as the module runs."""

    def __init__(self) -> None:
        heard: list[dict[str, Any]] = []

        class Answer(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                heard.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                self._ok()

            def do_DELETE(self) -> None:
                self._ok()

            def _ok(self) -> None:
                self.send_response(200)
                self.send_header("Content-Length", "2")
                self.end_headers()
                self.wfile.write(b"{}")

            def log_message(self, *_: object) -> None:
                pass

        self.heard = heard
        self.port = free_port()
        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), Answer)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture(scope="module")
def registry() -> Iterator[Registry]:
    """Run a registry."""
    running = Registry()
    yield running
    running.close()


@pytest.fixture(scope="module")
def switch(tmp_path_factory: pytest.TempPathFactory) -> Switch:
    """Return the switch that holds the towers of both engines."""
    return Switch(tmp_path_factory.mktemp("switch") / "fault")


@pytest.fixture(scope="module")
def started(
    tmp_path_factory: pytest.TempPathFactory, switch: Switch, registry: Registry
) -> Iterator[EncodeWorker]:
    """Start the worker of this module."""
    worker = start_worker(
        tmp_path_factory.mktemp("engines"),
        *("--data-parallel-size", "2"),
        *("--register", f"http://127.0.0.1:{registry.port}"),
        module="tests.stubs.faulty_encode_worker",
        env={**switch.env, "ADMIN_API_KEY": "k"},
    )
    yield worker
    worker.process.close()


@pytest.fixture
async def worker(started: EncodeWorker, switch: Switch) -> AsyncIterator[EncodeWorker]:
    """Return the worker with both engines well, before and after the test."""

    async def both_serve() -> bool:
        if not await started.is_healthy():
            return False
        return all(e["state"] == "ready" and e["reason"] is None for e in await started.engines())

    await started.process.wait_until(both_serve, "both engines serve", 120.0)
    yield started
    switch.set("")
    if started.process.exit_code is None:
        await started.process.wait_until(both_serve, "both engines serve again", 120.0)


@pytest.fixture
async def consumer() -> AsyncIterator[Consumer]:
    """Run a consumer."""
    async with open_consumer() as running:
        yield running


@pytest.fixture(scope="module")
def truth() -> Truth:
    """Return the model as transformers alone runs it."""
    return Truth(MODELS / "qwen2_5_vl")


def pictures(red: int, count: int = 12) -> list[bytes]:
    """Return different small pictures."""
    return [picture((red, number * 9, 77), (56, 56 + 28 * (number % 3))) for number in range(count)]


async def lookups(worker: EncodeWorker) -> dict[str, float]:
    """Return the L1 look-ups of both engines by result."""
    results = ("hit", "miss", "joined")
    name = "epdctl_cache_requests_total"
    return {result: await worker.metric(name, tier="l1", result=result) for result in results}


async def until_under_way(worker: EncodeWorker, count: int) -> list[int]:
    """Wait until `count` items have reached the engines; return how many each has."""

    async def all_asked() -> bool:
        return sum((await lookups(worker)).values()) >= count

    await worker.process.wait_until(all_asked, "all items are with the engines", 60.0)
    return [engine["in_flight"] for engine in await worker.engines()]


def deliveries(
    worker: EncodeWorker, consumer: Consumer, data: list[bytes], ids: list[str], name: str
) -> list[asyncio.Task[Reply]]:
    """Start a request for each picture, which is called `name` with its number, and return them."""
    return [
        asyncio.create_task(
            worker.encode(
                part(item, f"{name}-{number}"),
                consumer=consumer.address,
                transfer_ids=[ids[number]],
                timeout_s=120.0,
            )
        )
        for number, item in enumerate(data)
    ]


async def assert_delivered(
    consumer: Consumer, truth: Truth, data: list[bytes], ids: list[str], name: str
) -> None:
    """Fail unless the consumer has the right rows of each picture of `deliveries`."""
    for number, item in enumerate(data):
        expected = truth.rows(item)
        rows = await consumer.rows(ids[number], f"{name}-{number}", (expected.shape[0], expected.shape[1]))
        assert torch.allclose(rows, expected, rtol=1e-4, atol=1e-4)


async def test_items_are_spread_and_found_again(worker: EncodeWorker, switch: Switch) -> None:
    """Both engines get items of a burst; one by one, a picture always goes to the same engine, a hit."""
    seen = int(sum((await lookups(worker)).values()))
    switch.set("hang")
    burst = [asyncio.create_task(worker.encode(part(data))) for data in pictures(1)]
    loads = await until_under_way(worker, seen + 12)
    switch.set("")
    replies = await asyncio.gather(*burst)
    replies += [await worker.encode(part(data)) for data in pictures(1)]
    before = await lookups(worker)
    replies += [await worker.encode(part(data)) for data in pictures(1)]
    after = await lookups(worker)

    assert sum(loads) == 12
    assert min(loads) >= 3
    assert [reply.status for reply in replies] == [200] * 36
    assert (after["hit"] - before["hit"], after["miss"] - before["miss"]) == (12, 0)
    assert [engine["in_flight"] for engine in await worker.engines()] == [0, 0]


async def test_identical_items_meet_on_one_engine(worker: EncodeWorker, consumer: Consumer) -> None:
    """Six times the same picture in one request: one forward, whatever the share of an engine is."""
    before = await lookups(worker)
    forwards = await worker.metric("epdctl_encode_seconds_count")
    ids = [new_id() for _ in range(6)]

    reply = await worker.encode(
        *[part(picture((3, 3, 99)), "same")] * 6, consumer=consumer.address, transfer_ids=ids
    )
    after = await lookups(worker)

    assert reply.items["same"]["item_indices"] == list(range(6))
    assert after["miss"] - before["miss"] == 1
    assert await worker.metric("epdctl_encode_seconds_count") == forwards + 1


async def test_a_killed_engine_costs_its_items_one_retry_and_no_request(
    worker: EncodeWorker, switch: Switch, consumer: Consumer, truth: Truth
) -> None:
    """kill -9 of one engine with reservations at a consumer: every request is answered, the rows that arrive
    are right, only the lost engine's items are tried again, and /health stays 200. After its restart the
    engine's keys come home, where they have been forgotten, though the other engine has them."""
    seen = int(sum((await lookups(worker)).values()))
    retries = await worker.metric("epdctl_retries_total", stage="encode", reason="engine_unavailable")
    data = pictures(2)
    ids = [new_id() for _ in data]
    switch.set("hang")
    waiting = deliveries(worker, consumer, data, ids, "kill")
    loads = await until_under_way(worker, seen + 12)

    async def is_reserved() -> bool:
        return consumer.receiver.stats().reservations.get("writing", 0) >= 2

    await worker.process.wait_until(is_reserved, "both engines have reserved", 60.0)

    os.kill(worker.engine_pid(), signal.SIGKILL)

    async def is_down() -> bool:
        return any(engine["state"] != "ready" for engine in await worker.engines())

    await wait_until(is_down, "one engine is down", 30.0)
    health, _ = await worker.get("/health")
    lost = next(n for n, engine in enumerate(await worker.engines()) if engine["state"] != "ready")
    switch.set("")
    replies = await asyncio.gather(*waiting)

    assert health == 200
    assert [reply.status for reply in replies] == [200] * 12
    tried = await worker.metric("epdctl_retries_total", stage="encode", reason="engine_unavailable")
    assert tried - retries == loads[lost] > 0
    await assert_delivered(consumer, truth, data, ids, "kill")

    async def is_back() -> bool:
        return all(engine["state"] == "ready" for engine in await worker.engines())

    await worker.process.wait_until(is_back, "it is back", 120.0)
    before = await lookups(worker)
    again = [await worker.encode(part(item)) for item in data]
    home = await lookups(worker)
    again += [await worker.encode(part(item)) for item in data]
    after = await lookups(worker)

    assert [reply.status for reply in again] == [200] * 24
    assert 0 < home["miss"] - before["miss"] < 12
    assert (after["hit"] - home["hit"], after["miss"] - home["miss"]) == (12, 0)


async def test_engines_need_not_agree(worker: EncodeWorker, consumer: Consumer, truth: Truth) -> None:
    """One engine stands still: the other serves all that comes, with rows as ever, and waits for nobody; when
    the first goes on it finishes its own items."""
    data = pictures(5)
    ids = [new_id() for _ in data]
    held = worker.engine_pids()[0]
    os.kill(held, signal.SIGSTOP)
    try:
        waiting = deliveries(worker, consumer, data, ids, "held")

        async def other_is_done() -> bool:
            loads = [engine["in_flight"] for engine in await worker.engines()]
            return min(loads) == 0 and max(loads) + sum(task.done() for task in waiting) == 12

        await wait_until(other_is_done, "the engine that runs has finished its items", 20.0)
        fresh = [await worker.encode(part(item)) for item in pictures(6, 8)]
        stuck = sum(not task.done() for task in waiting)
    finally:
        os.kill(held, signal.SIGCONT)
    replies = await asyncio.gather(*waiting)

    assert 4 <= stuck <= 8
    assert [reply.status for reply in (*fresh, *replies)] == [200] * 20
    await assert_delivered(consumer, truth, data, ids, "held")


async def test_the_worker_registers_once_under_its_own_url(worker: EncodeWorker, registry: Registry) -> None:
    """What a registry hears of two engines is one encoder with one URL: no engine announces itself."""

    async def was_told() -> bool:
        return bool(registry.heard)

    await wait_until(was_told, "the worker has registered", 60.0)

    seen = {(body["role"], body["url"], body["dp_size"]) for body in registry.heard}
    assert seen == {("encode", worker.url, 1)}
    assert all(body["ec_zmq_addrs"] == [] for body in registry.heard)


async def test_the_log_names_the_transport(worker: EncodeWorker) -> None:
    """What carries embeddings stands in the line of the ready worker, and in one of each engine."""

    def transports(event: str) -> list[str]:
        lines = [json.loads(line) for line in worker.process.stderr.splitlines() if line.startswith("{")]
        return [line["transport"] for line in lines if line["event"] == event]

    await wait_until(lambda: transports("worker_ready") == ["tcp"], "the worker's line", 20.0)
    await wait_until(lambda: transports("transfer_ready")[:2] == ["tcp"] * 2, "the engines' lines", 20.0)


async def test_sigterm_lets_both_engines_finish(
    started: EncodeWorker, worker: EncodeWorker, switch: Switch
) -> None:
    """SIGTERM with items on both engines: all are answered, the worker ends with 0 and leaves no process."""
    pids = worker.engine_pids()
    seen = int(sum((await lookups(worker)).values()))
    switch.set("hang")
    waiting = [asyncio.create_task(worker.encode(part(data))) for data in pictures(7)]
    loads = await until_under_way(worker, seen + 12)

    started.process.send_signal(signal.SIGTERM)

    async def is_draining() -> bool:
        return not await worker.is_healthy()

    await wait_until(is_draining, "draining", 10.0)
    switch.set("")
    replies = await asyncio.gather(*waiting)

    assert min(loads) > 0
    assert [reply.status for reply in replies] == [200] * 12
    assert await started.process.wait_exit(30.0) == 0
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
