"""Claims about the control port: it survives any message and always answers (hazards 19, 33 and 42)."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest
import zmq
import zmq.asyncio

from epdctl.ec.client import ControlClient
from epdctl.ec.protocol import ControlAddress
from epdctl.worker.transfer.listener import ControlListener
from tests.stubs.process import wait_until
from tests.unit.transfer.ends import ConsumerEnd, consumer_end

pytestmark = pytest.mark.unit


@pytest.fixture
async def context() -> AsyncIterator[zmq.asyncio.Context]:
    """Return a ZMQ context that ends with the test."""
    made = zmq.asyncio.Context()
    yield made
    made.destroy(linger=0)


async def send(
    context: zmq.asyncio.Context, end: ConsumerEnd, frames: list[bytes], kind: int = zmq.REQ
) -> Any:
    """Send one message from a socket of its own and return the decoded last frame of the answer."""
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.connect(end.address)
    try:
        async with asyncio.timeout(5):
            await socket.send_multipart(frames)
            return json.loads((await socket.recv_multipart())[-1])
    finally:
        socket.close(linger=0)


ODD = {
    "two frames": [b'{"op":"peers"}', b'{"op":"peers"}'],
    "three frames": [b"a", b"b", b"c"],
    "empty": [b""],
    "empty and one": [b"", b'{"op":"peers"}'],
    "not JSON": [b"{not json"],
    "a list": [b"[1,2]"],
    "a number": [b"7"],
    "not text": [b"\xff\x00\xfe"],
    "deep": [b"[" * 200_000],
    "unknown op": [b'{"op":"frobnicate"}'],
    "op is a number": [b'{"op":5}'],
    "missing fields": [b'{"op":"reserve","transfer_id":"E3"}'],
    "wrong types": [b'{"op":"reserve","transfer_id":[],"mm_hash":{},"nbytes":"1","shape":1,"dtype":0}'],
    "items is a number": [b'{"op":"complete_batch","items":5}'],
    "items of numbers": [b'{"op":"complete_batch","items":[1,null,"x"]}'],
    "empty batch": [b'{"op":"reserve_batch","items":[]}'],
    "too many": [b'{"op":"reserve_batch","items":[' + b",".join([b"1"] * 5000) + b"]}"],
}


@pytest.mark.parametrize("frames", ODD.values(), ids=ODD.keys())
async def test_an_odd_message_is_answered_and_so_is_the_next_good_one(
    context: zmq.asyncio.Context, frames: list[bytes]
) -> None:
    """Whatever arrives gets an answer, and a good request after it is served."""
    async with consumer_end() as end:
        odd = await send(context, end, frames)
        answer = await send(context, end, [b'{"op":"peers"}'])

    assert odd["ok"] is (frames in (ODD["empty batch"], ODD["items of numbers"]))
    assert {"ok": True, "result": {"ports": [port_of(end.address)]}} == answer


def port_of(address: str) -> int:
    """Return the port of an address."""
    return int(address.rsplit(":", 1)[1])


async def test_peers_without_a_delimiter_are_answered_too(context: zmq.asyncio.Context) -> None:
    """A socket that is no REQ, and sends no delimiter, neither hangs nor hurts the loop."""
    async with consumer_end() as end:
        answer = await send(context, end, [b'{"op":"peers"}'], zmq.DEALER)
        refused = await send(context, end, [b"a", b"b"], zmq.DEALER)

    assert answer["ok"]
    assert not refused["ok"]


async def test_random_frames_do_not_stop_it(context: zmq.asyncio.Context) -> None:
    """Each of 500 random messages of up to four frames is refused, and then a good request is answered."""
    chance = random.Random(5)
    async with consumer_end() as end:
        socket = context.socket(zmq.DEALER)
        socket.connect(end.address)
        for _ in range(500):
            await socket.send_multipart(
                [chance.randbytes(chance.choice((0, 1, 20, 200))) for _ in range(chance.randint(1, 4))]
            )
        async with asyncio.timeout(60):
            answers = [json.loads((await socket.recv_multipart())[-1]) for _ in range(500)]
        socket.close(linger=0)

        assert not any(answer["ok"] for answer in answers)
        assert (await send(context, end, [b'{"op":"peers"}']))["ok"]


async def test_a_batch_answers_each_item(context: zmq.asyncio.Context) -> None:
    """A malformed item of a batch fails alone; the answers keep their order and number."""
    good = {"transfer_id": "t", "mm_hash": "h", "nbytes": 4, "shape": [1, 4], "dtype": "uint8"}
    body = {"op": "reserve_batch", "items": [1, good, {**good, "nbytes": -4, "transfer_id": "u"}, None]}
    async with consumer_end() as end:
        answer = await send(context, end, [json.dumps(body).encode()])
        stats = end.receiver.stats()

    assert [item["ok"] for item in answer["result"]["items"]] == [False, True, False, False]
    assert stats.arena_bytes["used"] == 256


@pytest.mark.parametrize("nbytes", [0, -1, 2**63, "10", 1.5, None])
async def test_impossible_sizes_reserve_nothing(context: zmq.asyncio.Context, nbytes: Any) -> None:
    """Sizes that cannot be are refused with a reason, and the arena is untouched (hazard 43)."""
    body = {"op": "reserve", "transfer_id": "t", "mm_hash": "h", "shape": [1, 4], "dtype": "uint8"}
    if nbytes is not None:
        body["nbytes"] = nbytes
    async with consumer_end() as end:
        answer = await send(context, end, [json.dumps(body).encode()])
        stats = end.receiver.stats()

    assert not answer["ok"]
    assert answer["error"]
    assert end.memory.nbytes == stats.arena_bytes["free"]


@pytest.mark.parametrize("shape", [[-1, -4], [0, 4], [2**40, 2**40], [1, 4.0], [1, True], [], "14"])
async def test_impossible_shapes_reserve_nothing(context: zmq.asyncio.Context, shape: Any) -> None:
    """So are negative, zero, huge and non-integer dimensions (hazard 43)."""
    body = {
        "op": "reserve",
        "transfer_id": "t",
        "mm_hash": "h",
        "nbytes": 4,
        "shape": shape,
        "dtype": "uint8",
    }
    async with consumer_end() as end:
        answer = await send(context, end, [json.dumps(body).encode()])
        stats = end.receiver.stats()

    assert not answer["ok"]
    assert end.memory.nbytes == stats.arena_bytes["free"]


async def test_a_slow_request_holds_nobody_up(context: zmq.asyncio.Context) -> None:
    """A request that takes long is answered after one that came later and does not."""
    release = asyncio.Event()

    async def answer(body: bytes) -> bytes:
        if body == b"slow":
            await release.wait()
        return b'"' + body + b'"'

    listener = ControlListener(ControlAddress(host="127.0.0.1", port=0), answer, context)
    listener.open()
    socket = context.socket(zmq.DEALER)
    socket.connect(f"tcp://127.0.0.1:{listener.port}")
    await socket.send_multipart([b"", b"slow"])
    await socket.send_multipart([b"", b"fast"])
    first = (await socket.recv_multipart())[-1]
    release.set()
    second = (await socket.recv_multipart())[-1]
    socket.close(linger=0)
    await listener.close()

    assert (first, second) == (b'"fast"', b'"slow"')


async def test_an_error_of_ours_is_answered(context: zmq.asyncio.Context) -> None:
    """An exception in the answering code costs one refusal, not the port."""

    async def answer(body: bytes) -> bytes:
        raise KeyError(body)

    listener = ControlListener(ControlAddress(host="127.0.0.1", port=0), answer, context)
    listener.open()
    socket = context.socket(zmq.REQ)
    socket.connect(f"tcp://127.0.0.1:{listener.port}")
    await socket.send(b"x")
    reply = json.loads(await socket.recv())
    socket.close(linger=0)
    await listener.close()

    assert reply == {"ok": False, "error": "internal error"}


async def test_a_broken_socket_is_opened_again(context: zmq.asyncio.Context) -> None:
    """When the socket itself breaks the port is served again, by a new one."""
    async with consumer_end() as end:
        listener = end.receiver._listener
        broken = listener._socket
        assert broken is not None
        broken.close(linger=0)
        await wait_until(lambda: listener._socket not in (None, broken), "the port is open again")
        client = ControlClient(end.address, 2.0)
        ports = await client.peers()
        await client.close()

    assert [listener.port] == ports


async def test_a_taken_port_is_named(context: zmq.asyncio.Context) -> None:
    """A port that somebody else has is an error at the start, with the address and the flags."""
    async with consumer_end() as end:
        address = ControlAddress(host="127.0.0.1", port=port_of(end.address))

        async def answer(body: bytes) -> bytes:
            return body

        second = ControlListener(address, answer, context)
        with pytest.raises(OSError, match=rf"{address}.*--ec-port"):
            second.open()


async def test_only_the_configured_address_is_served() -> None:
    """Both ports are bound on the address that was asked for, on no other of the machine (hazard 33)."""
    async with consumer_end() as end:
        for port in (port_of(end.address), end.receiver._events.port):
            with pytest.raises(ConnectionRefusedError):
                await asyncio.open_connection("127.0.0.2", port)
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.close()
