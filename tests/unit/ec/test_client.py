"""Claims about the control client: one answer for each question, its own, or an error in time."""

from __future__ import annotations

import asyncio
import json
import socket as tcp
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager
from typing import Any

import pytest
import zmq
import zmq.asyncio

from epdctl.ec.client import MAX_IDLE_SOCKETS, ConsumerSilent, ControlClient
from epdctl.ec.protocol import CompleteItem, Refusal, ReserveItem
from epdctl.errors import ConsumerUnavailable, InvalidRequest, UpstreamProtocol
from tests.stubs.ports import free_port
from tests.stubs.process import wait_until

pytestmark = pytest.mark.unit

ITEM = ReserveItem(transfer_id="t", mm_hash="h", nbytes=4, shape=(1, 4), dtype="uint8")
DONE = CompleteItem(transfer_id="t", reservation_id="r")

Handle = Callable[[dict[str, Any]], Awaitable[list[bytes] | None]]


@asynccontextmanager
async def server(handle: Handle) -> AsyncIterator[tuple[str, list[bytes]]]:
    """Serve a control port by `handle`; yield its address and the peers that it has seen."""
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.LINGER, 0)
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    peers: list[bytes] = []
    tasks: set[asyncio.Task[None]] = set()

    async def reply(identity: bytes, body: bytes) -> None:
        frames = await handle(json.loads(body))
        if frames is not None:
            await socket.send_multipart([identity, b"", *frames])

    async def serve() -> None:
        while True:
            identity, _, body = await socket.recv_multipart()
            peers.append(identity)
            tasks.add(asyncio.create_task(reply(identity, body)))

    serving = asyncio.create_task(serve())
    try:
        yield f"tcp://127.0.0.1:{port}", peers
    finally:
        for task in (serving, *tasks):
            task.cancel()
        await asyncio.gather(serving, *tasks, return_exceptions=True)
        context.destroy(linger=0)


def result(value: Any) -> list[bytes]:
    """Return the frames of a positive answer."""
    return [json.dumps({"ok": True, "result": value}).encode()]


async def test_sockets_are_kept_for_the_next_question() -> None:
    """Questions one after another use one connection."""

    async def handle(request: dict[str, Any]) -> list[bytes]:
        return result({"ports": [7]})

    async with server(handle) as (address, peers):
        client = ControlClient(address, 1.0)
        answers = [await client.peers() for _ in range(5)]
        await client.close()

    assert answers == [[7]] * 5
    assert len(set(peers)) == 1


async def test_questions_do_not_wait_for_each_other() -> None:
    """A question that is answered late does not delay one that came after it."""
    release = asyncio.Event()

    async def handle(request: dict[str, Any]) -> list[bytes]:
        if request["op"] == "status":
            await release.wait()
            return result(None)
        return result({"ports": [7]})

    async with server(handle) as (address, _):
        client = ControlClient(address, 5.0)
        slow = asyncio.create_task(client.status("t"))
        fast = [await client.peers() for _ in range(3)]
        still_waiting = not slow.done()
        release.set()
        await slow
        await client.close()

    assert still_waiting
    assert fast == [[7]] * 3


async def test_many_questions_leave_few_sockets() -> None:
    """A burst opens as many sockets as it needs and keeps a few."""

    async def handle(request: dict[str, Any]) -> list[bytes]:
        return result(None)

    async with server(handle) as (address, _):
        client = ControlClient(address, 5.0)
        await asyncio.gather(*(client.status(f"t{number}") for number in range(50)))
        kept = len(client._idle)
        await client.close()

    assert kept == MAX_IDLE_SOCKETS


async def test_a_late_answer_is_nobodys() -> None:
    """An answer that comes after its question has timed out is not taken for the next one's."""
    answers = iter([0.2, 0.0, 0.0])

    async def handle(request: dict[str, Any]) -> list[bytes]:
        await asyncio.sleep(next(answers))
        return result({"ports": [int(request.get("transfer_id", 7))]})

    async with server(handle) as (address, _):
        client = ControlClient(address, 0.1)
        with pytest.raises(ConsumerUnavailable):
            await client.status("999")
        later = [await client.peers(), await client.peers()]
        await client.close()

    assert later == [[7], [7]]


async def test_no_message_is_lost_to_time_outs() -> None:
    """With answers around the time-out each question gets its own answer or an error, and none stalls."""
    count = 0

    async def handle(request: dict[str, Any]) -> list[bytes]:
        nonlocal count
        count += 1
        await asyncio.sleep(0.004 + 0.002 * (count % 2))
        status = {
            "mm_hash": request["transfer_id"],
            "ready": True,
            "reservation_id": "r",
            "nbytes": 1,
            "shape": [1],
            "dtype": "uint8",
        }
        return result(status)

    async with server(handle) as (address, _):
        client = ControlClient(address, 0.008)
        wrong = lost = 0
        async with asyncio.timeout(60):
            for number in range(500):
                try:
                    answer = await client.status(f"t{number}")
                    wrong += answer is None or answer.mm_hash != f"t{number}"
                except ConsumerUnavailable:
                    lost += 1
        await client.close()
        patient = ControlClient(address, 5.0)
        burst = await asyncio.gather(*(patient.status(f"b{number}") for number in range(200)))
        await patient.close()

    assert wrong == 0
    assert lost < 500
    assert [f"b{number}" for number in range(200)] == [answer.mm_hash for answer in burst if answer]


async def test_nobody_there_is_known_at_once() -> None:
    """A refused connection is an error at once, not after the time-out."""
    client = ControlClient(f"tcp://127.0.0.1:{free_port()}", 30.0)
    async with asyncio.timeout(1):
        with pytest.raises(ConsumerUnavailable, match="cannot be reached"):
            await client.peers()
    await client.close()


async def test_a_host_that_does_not_answer_at_all_holds_nobody_up() -> None:
    """A connection that nobody takes or refuses ends at the time-out, and the loop goes on meanwhile."""
    with tcp.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(0)
        with ExitStack() as waiting:
            # The system lets as many wait as the queue has places; whoever comes then hears nothing.
            for _ in range(4):
                one = waiting.enter_context(tcp.socket())
                one.setblocking(False)
                one.connect_ex(deaf.getsockname())
            client = ControlClient(f"tcp://127.0.0.1:{deaf.getsockname()[1]}", 0.5)
            asking = asyncio.create_task(client.peers())
            turns = 0
            while not asking.done():
                await asyncio.sleep(0.01)
                turns += 1
            await client.close()

    with pytest.raises(ConsumerSilent):
        await asking
    assert turns > 3


async def test_silence_is_an_error_in_time() -> None:
    """A question without an answer ends at its time-out."""

    async def handle(request: dict[str, Any]) -> None:
        return None

    async with server(handle) as (address, _):
        client = ControlClient(address, 0.1)
        async with asyncio.timeout(1):
            with pytest.raises(ConsumerUnavailable, match="did not answer 'cancel' in time"):
                await client.cancel("t")
        await client.close()


@pytest.mark.parametrize(
    "frames",
    [[b"{"], [b"{}"], [b"[]"], [b""], [b'{"ok":true,"result":5}'], [*result({"ports": [1]}), b"more"]],
    ids=["cut", "empty object", "a list", "empty", "wrong result", "two frames"],
)
async def test_an_answer_outside_the_protocol_is_named(frames: list[bytes]) -> None:
    """What is not an answer is an error of the consumer, and the next question gets a new socket."""

    async def handle(request: dict[str, Any]) -> list[bytes]:
        return frames if request["op"] == "peers" else result({"cancelled": True})

    async with server(handle) as (address, _):
        client = ControlClient(address, 1.0)
        with pytest.raises(UpstreamProtocol):
            await client.peers()
        cancelled = await client.cancel("t")
        await client.close()

    assert cancelled


async def test_a_batch_has_as_many_answers_as_items() -> None:
    """A batch that is answered short is an error, not a guess."""

    async def handle(request: dict[str, Any]) -> list[bytes]:
        return result({"items": []})

    async with server(handle) as (address, _):
        client = ControlClient(address, 1.0)
        with pytest.raises(UpstreamProtocol, match="0 of 2 items"):
            await client.reserve_batch([ITEM, ITEM])
        with pytest.raises(UpstreamProtocol, match="0 of 1 items"):
            await client.complete_batch([DONE])
        await client.close()


async def test_a_refused_batch_refuses_each_item() -> None:
    """A refusal of the whole message counts for each of its items."""

    async def handle(request: dict[str, Any]) -> list[bytes]:
        return [b'{"ok":false,"error":"no"}']

    async with server(handle) as (address, _):
        client = ControlClient(address, 1.0)
        reserved = await client.reserve_batch([ITEM, ITEM])
        completed = await client.complete_batch([DONE])
        status, cancelled = await client.status("t"), await client.cancel("t")
        await client.close()

    assert [Refusal("no"), Refusal("no")] == reserved
    assert [answer.completed for answer in completed] == [False]
    assert (status, cancelled) == (None, False)


async def test_closing_with_a_dead_peer_does_not_wait() -> None:
    """Messages that were never sent do not keep the process."""

    async def handle(request: dict[str, Any]) -> None:
        return None

    async with server(handle) as (address, _):
        client = ControlClient(address, 30.0)
        asking = [asyncio.create_task(client.status(f"t{number}")) for number in range(10)]
        await asyncio.sleep(0)
    for task in asking:
        task.cancel()
    await asyncio.gather(*asking, return_exceptions=True)
    async with asyncio.timeout(2):
        await client.close()


@pytest.mark.parametrize("address", ["http://127.0.0.1:1", "tcp://127.0.0.1", ""])
def test_a_bad_address_is_refused(address: str) -> None:
    """An address that is none is the caller's mistake, and named as the field it comes from."""
    with pytest.raises(InvalidRequest) as caught:
        ControlClient(address, 1.0)

    assert caught.value.param == "consumer_zmq"


async def test_a_known_consumer_is_asked_by_the_call_itself() -> None:
    """What is asked for on an open connection is on its way before anybody awaits the answer."""
    seen: list[str] = []

    async def handle(request: dict[str, Any]) -> list[bytes]:
        seen.append(request["op"])
        return result({"ports": [7]} if request["op"] == "peers" else {"items": []})

    async with server(handle) as (address, _):
        client = ControlClient(address, 5.0)
        await client.peers()
        asked = client.complete_batch([])
        await wait_until(lambda: seen == ["peers", "complete_batch"], "it has arrived")
        answer = await asked
        await client.close()

    assert answer == []


async def test_a_question_that_nobody_awaits_leaves_no_socket() -> None:
    """Closing the client ends every connection, also that of a question that was dropped."""

    async def handle(request: dict[str, Any]) -> list[bytes]:
        return result({"ports": [7]})

    async with server(handle) as (address, _):
        context = zmq.asyncio.Context()
        client = ControlClient(address, 5.0, context=context)
        await client.peers()
        client.complete_batch([DONE]).close()
        await client.close()
        async with asyncio.timeout(10):
            # It waits until every socket of the context is closed.
            await asyncio.to_thread(context.term)
