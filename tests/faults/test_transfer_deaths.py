"""EC transfer between real processes over real Mooncake, one of which is killed, stopped or restarted."""

from __future__ import annotations

import asyncio
import signal
import statistics
import time
from typing import Any

import pytest

from tests.conftest import StartConsumer
from tests.faults.transfer_ends import MEBIBYTE, End, Ends, digest, item, latencies
from tests.stubs.ports import free_port, free_ports
from tests.stubs.process import wait_until

pytestmark = [pytest.mark.fault, pytest.mark.worker]

SHORT_LEASES = {"lease_s": 1.0, "pending_s": 0.5, "quarantine_s": 0.5}


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
        before = await latencies(producer, good, "before", 30)
        stopped.process.send_signal(signal.SIGSTOP)
        parked = [
            asyncio.create_task(producer.push(stopped, f"p{n}", 1000, seed=n, fill=False)) for n in range(10)
        ]
        during = await latencies(producer, good, "during", 30)
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
        during = await latencies(producer, good, "during", 30)
        answers = await asyncio.gather(*parked)
        hung.process.send_signal(signal.SIGCONT)

        assert {"transfer_failed"} == {answer["error"] for answer in answers}
        assert max(during) < 1.0


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


async def is_writing(end: End) -> bool:
    """Whether somebody holds a reservation there."""
    return bool((await end.stats())["reservations"]["writing"])


async def is_following(end: End) -> bool:
    """Whether somebody follows a writer there."""
    return bool((await end.stats())["reservations"]["following"])


async def is_free(end: End, name: str) -> bool:
    """Whether a source has been given back."""
    return name in (await end.stats())["freed"]


async def _push_until_delivered(producer: End, consumer: End, nbytes: int, **fields: Any) -> str:
    """Push an item, under a new transfer id each time as a retry must, and return the id that arrived."""
    answers = []
    for attempt in range(20):
        answers.append(await producer.push(consumer, f"again{attempt}", nbytes, **fields))
        if answers[-1].get("outcome") == "delivered":
            return f"again{attempt}"
    raise AssertionError(answers)
