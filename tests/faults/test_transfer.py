"""EC transfer between real processes over real Mooncake, with something killed, hung, slow or broken."""

from __future__ import annotations

import asyncio
import json
import signal
import statistics
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import zmq
import zmq.asyncio

from tests.conftest import StartConsumer
from tests.faults.transfer_ends import MEBIBYTE, End, Ends, digest, item
from tests.stubs.ports import free_port, free_ports
from tests.stubs.process import wait_until

pytestmark = [pytest.mark.fault, pytest.mark.worker]

SHORT_LEASES = {"lease_s": 1.0, "pending_s": 0.5, "quarantine_s": 0.5}


@pytest.fixture
async def ends(tmp_path: Path) -> AsyncIterator[Ends]:
    """Return a starter of transfer ends."""
    starter = Ends(tmp_path / "logs")
    yield starter
    await starter.close()


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


class TestKilledConsumer:
    """Kill -9 of the consumer, in each state of a transfer (hazards 15 and 37)."""

    @pytest.mark.parametrize("state", ["unasked", "peers", "reserve", "complete", "taken"])
    async def test_the_push_ends_and_the_next_one_works(self, ends: Ends, state: str) -> None:
        """Its push ends within the deadline with a cause, sources are free, and others are served."""
        hang = [state, f"{state}_batch"] if state in ("peers", "reserve", "complete") else []
        producer, victim, other = await asyncio.gather(
            ends.start("producer"), ends.start("victim", hang=hang), ends.start("other")
        )
        if state == "unasked":
            victim.process.kill_group()
        began = time.monotonic()
        pushing = asyncio.create_task(producer.push(victim, "t", MEBIBYTE))
        if state == "taken":
            assert (await pushing)["outcome"] == "delivered"
        elif hang:
            await asyncio.sleep(0.3)
        victim.process.kill_group()
        answer = await pushing
        took = time.monotonic() - began
        healthy = await producer.push(other, "u", MEBIBYTE)

        assert healthy["outcome"] == "delivered"
        if state != "taken":
            assert answer["error"] in ("consumer_unavailable", "transfer_failed"), answer
        assert took < 8
        assert {"t", "u"} == set((await producer.stats())["freed"])

    async def test_killed_while_the_bytes_are_under_way(self, ends: Ends) -> None:
        """A consumer that dies in the middle of 96 MB fails the push, and the source is free again."""
        nbytes = 96 * MEBIBYTE
        producer, victim = await asyncio.gather(
            ends.start("producer", nbytes=100 * MEBIBYTE), ends.start("victim", nbytes=100 * MEBIBYTE)
        )
        await producer.ask("announce", **item(victim, "t", nbytes))
        pushing = asyncio.create_task(producer.ask("deliver", **item(victim, "t", nbytes)))
        await wait_until(lambda: is_writing(victim), "the space is reserved")
        await asyncio.sleep(0.02)
        victim.process.kill_group()
        answer = await pushing

        assert answer.get("error") in ("transfer_failed", "upstream_timeout", "consumer_unavailable"), answer
        await wait_until(lambda: is_free(producer, "t"), "the source is free", 10)

    async def test_killed_before_the_bytes_exist(self, ends: Ends) -> None:
        """A consumer that dies after the reservation fails the push when the bytes come."""
        producer, victim = await asyncio.gather(ends.start("producer"), ends.start("victim"))
        await producer.ask("announce", **item(victim, "t", 1000))
        await wait_until(lambda: is_writing(victim), "the space is reserved")
        victim.process.kill_group()
        await victim.process.wait_exit()
        answer = await producer.ask("deliver", **item(victim, "t", 1000))

        assert answer["error"] in ("consumer_unavailable", "transfer_failed"), answer
        await wait_until(lambda: is_free(producer, "t"), "the source is free", 10)

    async def test_killed_while_another_producer_follows(self, ends: Ends) -> None:
        """Writer and follower both end when their consumer dies."""
        writer, follower, victim = await asyncio.gather(
            ends.start("writer"), ends.start("follower"), ends.start("victim")
        )
        await writer.ask("announce", **item(victim, "w", 1000))
        await wait_until(lambda: is_writing(victim), "the space is reserved")
        fields = {**item(victim, "f", 1000), "mm_hash": "hash of w"}
        following = asyncio.create_task(follower.ask("push", **fields))
        await wait_until(lambda: is_following(victim), "somebody follows")
        victim.process.kill_group()

        assert (await following)["error"] == "consumer_unavailable"


class TestRestartedConsumer:
    """A consumer that comes back on the same ports (hazard 16)."""

    async def test_the_next_pushes_reach_the_new_process(self, ends: Ends) -> None:
        """After kill -9 and a restart on the same control port and Mooncake range a push gets through."""
        ports = free_ports(12)
        fixed = {
            "control_port": free_port(),
            "command_port": free_port(),
            "mooncake_ports": [ports[0], ports[-1]],
        }
        producer = await ends.start("producer")
        first = await ends.start("first", **fixed)
        assert (await producer.push(first, "t0", 5000)).get("outcome") == "delivered"
        first.process.kill_group()
        await first.process.wait_exit()
        second = await ends.start("second", **fixed | {"command_port": free_port()})
        answers = []
        began = time.monotonic()
        for attempt in range(3):
            answers.append(await producer.push(second, f"t{attempt + 1}", 5000, seed=attempt + 7))
            if "outcome" in answers[-1]:
                break

        assert answers[-1].get("outcome") == "delivered", answers
        assert len(answers) <= 2
        assert time.monotonic() - began < 4
        taken = await second.take(f"t{len(answers)}", 5000)
        assert digest(5000, len(answers) + 6)["digest"] == taken["digest"]


class TestHungConsumer:
    """A consumer that is stopped (hazards 17, 18 and 41)."""

    async def test_late_bytes_hit_nobody(self, ends: Ends) -> None:
        """A push that fails in the middle keeps source and place apart; after the peer wakes, all is well."""
        nbytes = 64 * MEBIBYTE
        policy = {"write_base_s": 1.0}
        leases = {"pending_s": 60.0, "quarantine_s": 5.0}
        producer, victim = await asyncio.gather(
            ends.start("producer", nbytes=100 * MEBIBYTE, policy=policy),
            ends.start("victim", nbytes=80 * MEBIBYTE, leases=leases),
        )
        await producer.push(victim, "warm", 1000)
        await producer.ask("announce", **item(victim, "a", nbytes, 1))
        await wait_until(lambda: is_writing(victim), "the space is reserved")
        delivering = asyncio.create_task(producer.ask("deliver", **item(victim, "a", nbytes, 1)))
        await asyncio.sleep(0.02)
        victim.process.send_signal(signal.SIGSTOP)
        answer = await delivering
        freed_early = (await producer.stats())["freed"]
        await wait_until(lambda: is_free(producer, "a"), "the engine lets go of the source", 15)
        victim.process.send_signal(signal.SIGCONT)
        name = await _push_until_delivered(producer, victim, 10 * MEBIBYTE, seed=2, offset=nbytes)
        taken = await victim.take(name, 10 * MEBIBYTE)

        assert answer["error"] in ("upstream_timeout", "transfer_failed", "consumer_unavailable")
        if answer["error"] == "upstream_timeout":
            assert "a" not in freed_early
        assert digest(10 * MEBIBYTE, 2)["digest"] == taken["digest"]

    async def test_a_stopped_consumer_delays_nobody(self, ends: Ends) -> None:
        """While one consumer is stopped, pushes to another keep their latency."""
        producer, stopped, good = await asyncio.gather(
            ends.start("producer"), ends.start("stopped"), ends.start("good")
        )
        await asyncio.gather(producer.push(stopped, "w", 1000), producer.push(good, "v", 1000))
        before = await _latencies(producer, good, "before", 30)
        stopped.process.send_signal(signal.SIGSTOP)
        parked = [
            asyncio.create_task(producer.push(stopped, f"p{n}", 1000, seed=n, fill=False)) for n in range(10)
        ]
        during = await _latencies(producer, good, "during", 30)
        answers = await asyncio.gather(*parked)
        stopped.process.send_signal(signal.SIGCONT)

        assert {"consumer_unavailable"} == {answer["error"] for answer in answers}
        assert statistics.median(during) < max(0.1, 5 * statistics.median(before))
        assert max(during) < 1.0

    async def test_a_peer_that_hangs_at_first_contact_delays_nobody(
        self, ends: Ends, ec_consumer: StartConsumer
    ) -> None:
        """A consumer whose control port works and whose Mooncake hangs stalls its own pushes only."""
        producer, hung, good = await asyncio.gather(
            ends.start("producer"), ends.start("hung"), ends.start("good")
        )
        stub = await ec_consumer()
        stub.session = (await hung.stats())["session"]
        hung.process.send_signal(signal.SIGSTOP)
        fields = {"consumer": f"tcp://127.0.0.1:{stub.port}", "nbytes": 1000, "seed": 1}
        parked = [
            asyncio.create_task(
                producer.ask("push", transfer_id=f"p{n}", mm_hash=f"p{n}", **fields, fill=False)
            )
            for n in range(5)
        ]
        await wait_until(lambda: "reserve_batch" in {call.op for call in stub.calls}, "it was asked")
        during = await _latencies(producer, good, "during", 30)
        answers = await asyncio.gather(*parked)
        hung.process.send_signal(signal.SIGCONT)

        assert {"transfer_failed"} == {answer["error"] for answer in answers}
        assert max(during) < 1.0


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
        _latencies(producer, fast, "fast", 30), _latencies(producer, faster, "faster", 30, offset=8192)
    )
    answers = await asyncio.gather(*crawling)

    assert {"delivered"} == {answer.get("outcome") for answer in answers}
    assert max(statistics.median(one) for one in times) < 0.1
    assert min(answer["seconds"] for answer in answers) > 0.5


class TestDeadProducer:
    """A producer that dies (hazard 40)."""

    async def test_its_bytes_come_back(self, ends: Ends) -> None:
        """Kill -9 after the reservation: within lease, wait and rest the arena is whole again."""
        producer, consumer = await asyncio.gather(
            ends.start("producer"), ends.start("consumer", leases=SHORT_LEASES)
        )
        await producer.ask("announce", **item(consumer, "t", MEBIBYTE))
        await wait_until(lambda: is_writing(consumer), "the space is reserved")
        producer.process.kill_group()

        await wait_until(consumer.is_idle, "the bytes are back", 6)
        assert (await consumer.stats())["arena"]["free"] == 8 * MEBIBYTE

    async def test_its_followers_are_served_by_another(self, ends: Ends) -> None:
        """When the writer dies its follower becomes the writer, and the waiting request gets its bytes."""
        writer, follower, consumer = await asyncio.gather(
            ends.start("writer"), ends.start("follower"), ends.start("consumer", leases=SHORT_LEASES)
        )
        await writer.ask("announce", **item(consumer, "w", 1000, 3))
        await wait_until(lambda: is_writing(consumer), "the space is reserved")
        fields = {**item(consumer, "f", 1000, 3), "mm_hash": "hash of w"}
        following = asyncio.create_task(follower.ask("push", **fields))
        await wait_until(lambda: is_following(consumer), "somebody follows")
        writer.process.kill_group()
        pushed = await following
        taken = await consumer.ask("take", transfer_id="f", mm_hash="hash of w", nbytes=1000)

        assert pushed.get("outcome") == "delivered", pushed
        assert digest(1000, 3)["digest"] == taken["digest"]


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


async def is_writing(end: End) -> bool:
    """Whether somebody holds a reservation there."""
    return bool((await end.stats())["reservations"]["writing"])


async def is_following(end: End) -> bool:
    """Whether somebody follows a writer there."""
    return bool((await end.stats())["reservations"]["following"])


async def is_free(end: End, name: str) -> bool:
    """Whether a source has been given back."""
    return name in (await end.stats())["freed"]


async def _latencies(
    producer: End, consumer: End, name: str, count: int, *, offset: int = 4096
) -> list[float]:
    times = []
    for number in range(count):
        answer = await producer.push(consumer, f"{name}{number}", 1000, seed=number, offset=offset)
        assert "seconds" in answer, answer
        times.append(answer["seconds"])
    return times


async def _push_until_delivered(producer: End, consumer: End, nbytes: int, **fields: Any) -> str:
    """Push an item, under a new transfer id each time as a retry must, and return the id that arrived."""
    answers = []
    for attempt in range(20):
        answers.append(await producer.push(consumer, f"again{attempt}", nbytes, **fields))
        if answers[-1].get("outcome") == "delivered":
            return f"again{attempt}"
    raise AssertionError(answers)
