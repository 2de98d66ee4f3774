"""Claims about a prefill_decode worker whose parts are killed, stopped, or lied to."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
import zmq
import zmq.asyncio

from tests.e2e.language_worker import (
    HOST,
    MODEL,
    Producer,
    Worker,
    engine_pids,
    language_worker,
    parse_event,
    rewritten,
)
from tests.e2e.tiny_pictures import (
    COLOUR_QUESTION,
    LONG_QUESTION,
    QWEN2_5_VL,
    ask,
    expected_answer,
    held_out_pictures,
    text,
)
from tests.e2e.tower import Tower
from tests.stubs.ports import free_port
from tests.stubs.process import epdctl_command, start_process

pytestmark = [
    pytest.mark.fault,
    pytest.mark.worker,
    pytest.mark.timeout(180),
    pytest.mark.asyncio(loop_scope="module"),
]

ENDLESS: dict[str, Any] = {"max_tokens": 3500, "ignore_eos": True}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def producer() -> AsyncIterator[Producer]:
    """Give a producer for all workers of this module."""
    made = Producer(Tower(QWEN2_5_VL))
    yield made
    await made.close()


class Stream:
    """A stream that is read in the background."""

    def __init__(self, worker: Worker, **fields: Any) -> None:
        body = {"model": MODEL, "messages": text(LONG_QUESTION), "temperature": 0, "stream": True, **fields}
        self.status = 0
        self.received = b""
        self.broken = False
        self._worker = worker
        self._body = body
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        url = self._worker.url + "/v1/chat/completions"
        try:
            async with self._worker.session.post(url, json=self._body) as answer:
                self.status = answer.status
                async for data in answer.content.iter_any():
                    self.received += data
        except aiohttp.ClientError:
            self.broken = True

    async def until_running(self) -> None:
        """Wait until some of it has arrived."""
        await self._worker.process.wait_until(lambda: len(self.received) > 2000, "the stream runs")

    @property
    def events(self) -> list[Any]:
        """All events so far."""
        return [parse_event(block) for block in self.received.decode().split("\n\n") if block]


async def until_ready(worker: Worker) -> None:
    """Wait until /health is 200."""

    async def ready() -> bool:
        return (await worker.health())[0] == 200

    await worker.process.wait_until(ready, "healthy again", 60)


class TestEngineDeath:
    """The engine process is killed."""

    async def test_what_is_under_way_fails_clearly_and_service_returns(
        self, tmp_path: Path, producer: Producer
    ) -> None:
        """Streams end with one error event, the rest answers 503, a new engine serves pictures again."""
        async with language_worker(QWEN2_5_VL, tmp_path) as worker:
            stream = Stream(worker, **ENDLESS)
            whole = asyncio.create_task(worker.ask(text(LONG_QUESTION), **ENDLESS))
            await stream.until_running()
            (engine,) = engine_pids(worker)
            began = time.monotonic()
            os.kill(engine, signal.SIGKILL)
            answer = await whole
            await stream.task
            elapsed_s = time.monotonic() - began
            during = await worker.health()
            refused = await worker.ask(text(COLOUR_QUESTION))
            await until_ready(worker)
            pictures = list(held_out_pictures(1))
            request = await producer.prepare(worker.consumer_zmq, ask(pictures), pictures)
            after = await worker.ask(**request)
            await worker.until_idle()

        assert (answer.status, answer.error["code"]) == (503, "engine_unavailable")
        assert elapsed_s < 2
        assert (stream.status, stream.broken) == (200, False)
        assert stream.events[-1]["error"]["code"] == "engine_unavailable"
        assert None not in stream.events
        assert during[0] == 503
        assert (refused.status, refused.error["code"]) == (503, "engine_unavailable")
        assert (after.status, after.text) == (200, expected_answer(pictures))

    async def test_a_hung_engine_does_not_hang_health(self, tmp_path: Path) -> None:
        """While the engine is stopped /health answers at once, and after it goes on so do the requests."""
        async with language_worker(QWEN2_5_VL, tmp_path) as worker:
            (engine,) = engine_pids(worker)
            os.kill(engine, signal.SIGSTOP)
            began = time.monotonic()
            await worker.health()
            elapsed_s = time.monotonic() - began
            request = asyncio.create_task(worker.ask(text(COLOUR_QUESTION)))
            os.kill(engine, signal.SIGCONT)
            answer = await request

        assert elapsed_s < 1
        assert answer.status == 200


class TestShutdown:
    """SIGTERM."""

    async def test_accepted_requests_finish(self, tmp_path: Path) -> None:
        """Under load accepted streams run to their end, new requests are refused, and the exit code is 0."""
        async with language_worker(QWEN2_5_VL, tmp_path) as worker:
            streams = [Stream(worker, max_tokens=1500, ignore_eos=True) for _ in range(4)]
            for stream in streams:
                await stream.until_running()
            worker.process.send_signal(signal.SIGTERM)

            async def draining() -> bool:
                return (await worker.health())[0] == 503

            await worker.process.wait_until(draining, "draining")
            refused = await worker.ask(text(COLOUR_QUESTION))
            await asyncio.gather(*(stream.task for stream in streams))
            code = await worker.process.wait_exit(15)

        assert (refused.status, refused.error["code"]) == (503, "shutting_down")
        assert [stream.events[-1] for stream in streams] == [None] * 4
        assert [sum(1 for e in stream.events if e) for stream in streams] == [1501] * 4 or all(
            stream.events[-2]["choices"][0]["finish_reason"] == "length" for stream in streams
        )
        assert code == 0

    async def test_what_does_not_finish_in_time_is_told(self, tmp_path: Path) -> None:
        """At the end of the grace a stream ends with an error event, a whole request with 503; exit is 0."""
        async with language_worker(QWEN2_5_VL, tmp_path, "--shutdown-grace", "0.5") as worker:
            stream = Stream(worker, **ENDLESS)
            whole = asyncio.create_task(worker.ask(text(LONG_QUESTION), **ENDLESS))
            await stream.until_running()
            worker.process.send_signal(signal.SIGTERM)
            answer = await whole
            await stream.task
            code = await worker.process.wait_exit(15)

        assert (answer.status, answer.error["code"]) == (503, "shutting_down")
        assert (stream.status, stream.broken) == (200, False)
        assert stream.events[-1]["error"]["code"] == "shutting_down"
        assert stream.received.count(b"HTTP/1.1") == 0
        assert code == 0

    async def test_a_request_that_waits_for_its_embedding_is_not_forgotten(
        self, tmp_path: Path, producer: Producer
    ) -> None:
        """A drain is not over while a request waits for its push: it is answered, then the worker ends."""
        pictures = list(held_out_pictures(1))
        (encoded,) = producer.encode(pictures)
        item = {"mm_hash": "h", "transfer_id": "t"}
        async with language_worker(QWEN2_5_VL, tmp_path) as worker:
            waiting = asyncio.create_task(worker.ask(**rewritten(ask(pictures), [encoded], [item])))

            async def in_flight() -> bool:
                return await worker.metric("epdctl_in_flight") > 0

            await worker.process.wait_until(in_flight, "the request waits")
            worker.process.send_signal(signal.SIGTERM)

            async def draining() -> bool:
                return (await worker.health())[1]["reason"] == "shutting down"

            await worker.process.wait_until(draining, "draining")
            still_there = worker.process.exit_code is None
            await producer.push(worker.consumer_zmq, encoded, **item)
            answer = await waiting
            code = await worker.process.wait_exit(15)

        assert (still_there, answer.status, answer.text, code) == (True, 200, expected_answer(pictures), 0)


class TestStartUp:
    """What cannot work is said at start."""

    @pytest.mark.parametrize(
        ("flags", "code", "words"),
        [
            (("--model", "no such model"), 1, "no such model"),
            (("--model", str(QWEN2_5_VL), "--max-model-len", "9999"), 1, "--max-model-len 9999"),
            (("--model", str(QWEN2_5_VL), "--device", "cuda:7"), 1, "--device cuda:7"),
            (("--model", str(QWEN2_5_VL), "--kv-bytes", "1000"), 1, "--kv-bytes"),
            (("--model", str(QWEN2_5_VL), "--max-batch-tokens", "8"), 2, "--max-batch-tokens"),
            (("--model", str(QWEN2_5_VL), "--ec-port", "65535", "--data-parallel-size", "2"), 2, "--ec-port"),
            ((), 2, "--model"),
        ],
    )
    async def test_a_wrong_command_line_is_named(
        self, tmp_path: Path, flags: tuple[str, ...], code: int, words: str
    ) -> None:
        """The flag is named on stderr, with exit code 1 for what fails and 2 for what cannot be meant."""
        place = ("--host", HOST, "--port", str(free_port()))
        ec = () if "--ec-port" in flags else ("--ec-port", str(free_port()))
        command = epdctl_command("worker", "prefill-decode", *place, *ec, *flags)
        process = start_process(command, tmp_path, "worker")
        try:
            exit_code = await process.wait_exit(60)
        finally:
            process.close()

        assert (exit_code, words in process.stderr) == (code, True), process.stderr

    @pytest.mark.parametrize("flag", ["--port", "--ec-port"])
    async def test_a_taken_port_is_named(self, tmp_path: Path, flag: str) -> None:
        """A worker whose port is taken ends with 1 and names the port."""
        taken = free_port()
        ports = {"--port": free_port(), "--ec-port": free_port()} | {flag: taken}
        arguments = [word for name, port in ports.items() for word in (name, str(port))]
        with socket.create_server((HOST, taken)):
            command = epdctl_command(
                "worker", "prefill-decode", "--model", str(QWEN2_5_VL), "--host", HOST, *arguments
            )
            process = start_process(command, tmp_path, "worker")
            try:
                exit_code = await process.wait_exit(60)
            finally:
                process.close()

        assert (exit_code, str(taken) in process.stderr) == (1, True), process.stderr


class TestForeignFrames:
    """Anybody may send anything to the control socket."""

    async def test_the_control_socket_survives_any_frame(self, tmp_path: Path, producer: Producer) -> None:
        """After two-frame, empty, non-JSON and wrong-type messages pictures are served as before."""
        frames: list[list[bytes]] = [
            [b"{}", b"{}"],
            [b""],
            [b"\xff\xfe"],
            [b"[1, 2]"],
            [b'{"op": "no_such_op"}'],
            [b'{"op": "reserve", "transfer_id": 5}'],
            [b'{"op": "reserve", "transfer_id": "t", "mm_hash": "h", "nbytes": 4, "shape": [-1]}'],
            [b"{" * 10_000],
        ]
        async with language_worker(QWEN2_5_VL, tmp_path) as worker:
            with zmq.asyncio.Context() as context:
                for parts in frames:
                    with context.socket(zmq.REQ) as client:
                        client.setsockopt(zmq.LINGER, 0)
                        client.connect(worker.consumer_zmq)
                        await client.send_multipart(parts)
                        reply = await asyncio.wait_for(client.recv(), 5)
                        assert b'"ok":false' in reply.replace(b" ", b"")
            pictures = list(held_out_pictures(1))
            request = await producer.prepare(worker.consumer_zmq, ask(pictures), pictures)
            answer = await worker.ask(**request)
            await worker.until_idle()

        assert answer.text == expected_answer(pictures)
