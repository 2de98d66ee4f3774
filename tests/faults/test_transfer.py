"""EC transfer between real processes over real Mooncake: what arrives, and who is slow, odd or in the way."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from typing import Any

import pytest
import zmq
import zmq.asyncio

from tests.faults.transfer_ends import MEBIBYTE, Ends, digest, latencies
from tests.stubs.process import wait_until

pytestmark = [pytest.mark.fault, pytest.mark.worker]


def producer_counts(stats: dict[str, Any]) -> dict[str, int]:
    """Return a producer's counts without its side."""
    return {key.split(".")[1]: n for key, n in stats["counts"].items() if key.startswith("producer")}


def consumer_counts(stats: dict[str, Any]) -> dict[str, int]:
    """Return a consumer's counts without its side."""
    return {key.split(".")[1]: n for key, n in stats["counts"].items() if key.startswith("consumer")}


class TestDelivery:
    """Bytes over Mooncake."""

    async def test_every_size_arrives_byte_for_byte(self, ends: Ends) -> None:
        """From one byte to 64 MB each item arrives as it was, and both ends count the same bytes."""
        producer, consumer = await asyncio.gather(
            ends.start("producer", nbytes=192 * MEBIBYTE), ends.start("consumer", nbytes=192 * MEBIBYTE)
        )
        sizes = [1, 2, 255, 256, 257, 4095, 65_536, MEBIBYTE, MEBIBYTE + 1, 5_000_000, 64_000_000]
        for index, nbytes in enumerate(sizes):
            pushed = await producer.push(consumer, f"t{index}", nbytes, seed=index)
            taken = await consumer.take(f"t{index}", nbytes)

            assert pushed.get("outcome") == "delivered", pushed
            assert digest(nbytes, index)["digest"] == taken.get("digest"), (nbytes, taken)

        sent, received = await producer.stats(), await consumer.stats()
        assert {"delivered": len(sizes), "bytes": sum(sizes)} == producer_counts(sent)
        assert producer_counts(sent) == consumer_counts(received)
        assert await consumer.is_idle()

    async def test_ipv6_peers_reach_each_other_and_an_ipv4_producer_says_why_not(self, ends: Ends) -> None:
        """At IPv6 addresses embeddings arrive; from an IPv4 one the push fails at once, with the cure."""
        producer, consumer, stranger = await asyncio.gather(
            ends.start("producer", host="::1"), ends.start("consumer", host="::1"), ends.start("stranger")
        )

        pushed = await producer.push(consumer, "t", 1000)
        refused = await stranger.push(consumer, "u", 1000)
        after = await stranger.stats()

        assert pushed.get("outcome") == "delivered", pushed
        assert (await consumer.take("t", 1000))["digest"] == digest(1000)["digest"]
        assert refused["error"] == "transfer_failed"
        assert "MC_USE_IPV6=1" in refused["message"]
        assert after["freed"] == ["u"]

    async def test_both_directions_at_once(self, ends: Ends) -> None:
        """Two processes of one host push 100 items to each other at once, and no bytes get mixed up."""
        left, right = await asyncio.gather(ends.start("left"), ends.start("right"))
        nbytes = 20_000
        sides = [(left, right, "l"), (right, left, "r")]
        pushes = [
            source.push(target, f"{name}{n}", nbytes, seed=n + 1000 * (name == "r"), offset=n * nbytes)
            for source, target, name in sides
            for n in range(100)
        ]
        takes = [target.take(f"{name}{n}", nbytes) for _, target, name in sides for n in range(100)]
        answers = await asyncio.gather(*pushes, *takes)

        assert {"delivered"} == {answer.get("outcome") for answer in answers[:200]}
        expected = [digest(nbytes, n + offset)["digest"] for offset in (0, 1000) for n in range(100)]
        assert expected == [answer.get("digest") for answer in answers[200:]]

    async def test_a_flipped_byte_is_refused_and_counted_at_both_ends(self, ends: Ends) -> None:
        """A byte that is flipped between write and check fails the push and the take; both ends count it."""
        producer, consumer = await asyncio.gather(ends.start("producer"), ends.start("consumer", flip=True))
        nbytes = 3 * MEBIBYTE
        taking = asyncio.create_task(consumer.take("t", nbytes))
        pushed = await producer.push(consumer, "t", nbytes)

        assert pushed["error"] == "transfer_failed"
        assert (await taking)["error"] == "transfer_failed"
        refused = {"refused": 1, "bytes": nbytes}
        assert refused == producer_counts(await producer.stats()) == consumer_counts(await consumer.stats())

    async def test_nothing_is_registered_or_held_after_a_request(self, ends: Ends) -> None:
        """After one request both ends are back where they were, without another request (hazard 10)."""
        producer, consumer = await asyncio.gather(ends.start("producer"), ends.start("consumer"))
        await producer.push(consumer, "t", 1000)
        await consumer.take("t", 1000)

        await wait_until(consumer.is_idle, "the consumer is idle", 2)
        await wait_until(producer.is_idle, "the producer is idle", 2)
        assert (await producer.stats())["freed"] == ["t"]


async def test_a_slow_consumer_among_fast_ones(ends: Ends) -> None:
    """A consumer that takes 300 ms for each answer does not slow down the pushes to two others."""
    producer, slow, fast, faster = await asyncio.gather(
        ends.start("producer"),
        ends.start("slow", delay_ms=300),
        ends.start("fast"),
        ends.start("faster"),
    )
    crawling = [
        asyncio.create_task(producer.push(slow, f"s{n}", 1000, seed=n, fill=False)) for n in range(20)
    ]
    times = await asyncio.gather(
        latencies(producer, fast, "fast", 30), latencies(producer, faster, "faster", 30, offset=8192)
    )
    answers = await asyncio.gather(*crawling)

    assert {"delivered"} == {answer.get("outcome") for answer in answers}
    assert max(statistics.median(one) for one in times) < 0.1
    assert min(answer["seconds"] for answer in answers) > 0.5


async def test_odd_control_messages_do_not_stop_a_consumer(ends: Ends) -> None:
    """After two-frame, empty, non-JSON and wrong-type messages the next push succeeds (hazards 19, 42)."""
    producer, consumer = await asyncio.gather(ends.start("producer"), ends.start("consumer"))
    context = zmq.asyncio.Context()
    odd = [
        [b'{"op":"peers"}', b'{"op":"peers"}'],
        [b""],
        [b"{not json"],
        [b'{"op":["reserve"]}'],
        [b"\x00\xff" * 5000, b"", b""],
    ]
    answers = []
    for frames in odd:
        socket = context.socket(zmq.REQ)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(consumer.address)
        await socket.send_multipart(frames)
        async with asyncio.timeout(5):
            answers.append(json.loads(await socket.recv()))
        socket.close(linger=0)
    context.destroy(linger=0)

    assert [False] * len(odd) == [answer["ok"] for answer in answers]
    assert (await producer.push(consumer, "t", 1000))["outcome"] == "delivered"


async def test_a_taken_control_port_is_named(ends: Ends) -> None:
    """A second consumer on one control port exits with a line that names the port; the first one lives."""
    first = await ends.start("first")
    with pytest.raises(AssertionError, match="exited with 1"):
        await ends.start("second", control_port=first.settings["control_port"])

    assert "--ec-port" in (first.process.stderr_path.parent / "second.err").read_text()
    assert await first.is_idle()


async def test_a_process_with_open_transfers_ends_soon(ends: Ends) -> None:
    """Asked to stop while a consumer hangs, a producer ends by itself in a few seconds."""
    producer, hung = await asyncio.gather(
        ends.start("producer"), ends.start("hung", hang=["reserve", "complete_batch"])
    )
    pushes = [asyncio.create_task(producer.push(hung, f"t{n}", 1000)) for n in range(10)]
    await asyncio.sleep(0.2)
    began = time.monotonic()
    code = await producer.stop()
    for push in pushes:
        push.cancel()
    await asyncio.gather(*pushes, return_exceptions=True)

    assert code == 0
    assert time.monotonic() - began < 8
