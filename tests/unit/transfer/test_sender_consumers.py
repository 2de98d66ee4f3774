"""Claims about a producer end with several consumers, or one that comes back as another process."""

from __future__ import annotations

import asyncio

import pytest

from epdctl.errors import ConsumerUnavailable, Overloaded, TransferFailed
from epdctl.worker.transfer import rank_push
from epdctl.worker.transfer.ports import PushSource, TransferOutcome
from epdctl.worker.transfer.push_steps import PushPolicy
from epdctl.worker.transfer.receiver import Receiver, ReceiverSettings
from epdctl.worker.transfer.sender import MAX_CONSUMERS
from tests.conftest import StartConsumer
from tests.stubs.ports import free_port
from tests.stubs.process import wait_until
from tests.unit.transfer.ends import DATA, consumer_end, producer_end, succeed
from tests.unit.transfer.engine import Started

pytestmark = pytest.mark.unit


class TestIsolation:
    """One consumer's trouble is its own (hazards 17, 29 and 30)."""

    async def test_a_silent_consumer_delays_nobody(self, ec_consumer: StartConsumer) -> None:
        """With 50 items parked at a consumer that never answers, all that one may have, another consumer's go
        through at once."""
        silent = await ec_consumer({"reserve": "silent"})
        async with (
            consumer_end() as consumer,
            producer_end(control_timeout_s=3, max_pending=50) as producer,
        ):
            loop = asyncio.get_running_loop()
            parked = [
                asyncio.create_task(
                    producer.sender.push(producer.item(f"tcp://127.0.0.1:{silent.port}", f"s{n}", DATA))
                )
                for n in range(50)
            ]
            await wait_until(lambda: bool(silent.calls), "the silent consumer was asked")
            began = loop.time()
            for number in range(20):
                await producer.sender.push(producer.item(consumer.address, f"t{number}", DATA))
            took = loop.time() - began
            for task in parked:
                task.cancel()
            await asyncio.gather(*parked, return_exceptions=True)

        assert took < 1.5

    async def test_a_consumer_that_failed_to_answer_is_asked_once_a_second(
        self, ec_consumer: StartConsumer
    ) -> None:
        """After a consumer has failed an item, the next fail at once, without a message; its first answer, to
        the probe of the second, clears it."""
        stub = await ec_consumer({"reserve": "silent"})
        address = f"tcp://127.0.0.1:{stub.port}"
        async with producer_end(control_timeout_s=0.2, on_write=succeed) as producer:
            with pytest.raises(ConsumerUnavailable, match="did not answer"):
                await producer.sender.push(producer.item(address, "first", DATA))
            asked = len(stub.calls_to("reserve"))
            for number in range(50):
                with pytest.raises(ConsumerUnavailable, match="did not answer"):
                    producer.sender.announce(producer.item(address, f"t{number}", DATA))
            assert len(stub.calls_to("reserve")) == asked

            stub.set_behaviour({})
            await wait_until(lambda: not producer.sender.is_held(address), "the next probe is due")
            await producer.sender.push(producer.item(address, "probe", DATA))
            await asyncio.gather(
                *(producer.sender.push(producer.item(address, f"u{number}", DATA)) for number in range(5))
            )

            assert not producer.sender.is_suspect(address)

    @pytest.mark.parametrize("is_given_up", [False, True])
    async def test_a_consumer_that_hangs_before_the_write_is_not_written_to(
        self, ec_consumer: StartConsumer, monkeypatch: pytest.MonkeyPatch, is_given_up: bool
    ) -> None:
        """A consumer that was last heard of before the tower ran is greeted first: no byte goes to it while
        it hangs, which could hold up every other peer, nor later, when the push was given up."""
        monkeypatch.setattr(rank_push, "FRESH_S", -1.0)
        stub = await ec_consumer()
        async with producer_end(control_timeout_s=1.5, on_write=succeed) as producer:
            item = producer.item(f"tcp://127.0.0.1:{stub.port}", "t", DATA)
            delivery = producer.sender.announce(item)
            await wait_until(lambda: bool(stub.reservations), "the space is reserved")
            stub.set_behaviour({"peers": {"delay_ms": 300} if is_given_up else "silent"})
            source = PushSource(address=item.address, digest=item.digest, on_free=item.on_source_free)
            pushing = asyncio.create_task(delivery.push(source))
            await wait_until(lambda: stub.calls[-1].op == "peers", "it is greeted")
            if is_given_up:
                pushing.cancel()
            (ended,) = await asyncio.gather(pushing, return_exceptions=True)
            await wait_until(lambda: producer.freed == ["t"], "the source is free")

            assert isinstance(ended, asyncio.CancelledError if is_given_up else TransferFailed)
            assert producer.engine.started == []

    async def test_a_refused_connection_is_no_silence(self) -> None:
        """Nobody is there: that is known at once each time, so the next item finds out for itself."""
        async with producer_end() as producer:
            address = f"tcp://127.0.0.1:{free_port()}"
            with pytest.raises(ConsumerUnavailable):
                await producer.sender.push(producer.item(address, "t", DATA))

            assert not producer.sender.is_suspect(address)

    async def test_waiting_items_are_bounded(self, ec_consumer: StartConsumer) -> None:
        """10,000 cache hits for a stalled consumer: some wait, the others are refused at once."""
        silent = await ec_consumer({"reserve": "silent"})
        async with producer_end(control_timeout_s=0.2, max_pending=100) as producer:
            item = producer.item(f"tcp://127.0.0.1:{silent.port}", "t", DATA)
            results = await asyncio.gather(
                *(producer.sender.push(item) for _ in range(10_000)), return_exceptions=True
            )
            kinds = [type(result) for result in results]
            await wait_until(lambda: producer.sender.stats().open == 0, "nothing is open")

        assert (kinds.count(ConsumerUnavailable), kinds.count(Overloaded)) == (100, 9900)
        assert producer.sender.stats().pending == 0


class TestRanks:
    """A consumer of several ranks: each gets the whole item."""

    async def test_a_delivery_is_over_when_every_rank_has_the_item(self, ec_consumer: StartConsumer) -> None:
        """The source is kept until the last rank has it, and the bytes of all are counted."""
        base, left, right = await ec_consumer(), await ec_consumer(), await ec_consumer()
        base.rank_ports = [left.port, right.port]
        started: list[Started] = []
        async with producer_end(on_write=started.append) as producer:
            item = producer.item(f"tcp://127.0.0.1:{base.port}", "t", DATA)
            pushing = asyncio.create_task(producer.sender.push(item))
            await wait_until(lambda: len(started) == 2, "both are written to")
            started[0].end(True)
            await wait_until(
                lambda: any(rank.calls_to("complete_batch") for rank in (left, right)), "one has"
            )
            freed_early = list(producer.freed)
            started[1].end(True)
            result = await pushing

            assert freed_early == []
            assert producer.freed == ["t"]
            assert (result.outcome, result.nbytes_written) == (TransferOutcome.DELIVERED, 2 * len(DATA))
        assert [rank.reservations["t"].state for rank in (left, right)] == ["ready", "ready"]

    async def test_a_rank_that_fails_ends_the_delivery_to_the_others(
        self, ec_consumer: StartConsumer
    ) -> None:
        """The caller hears of it; the write to another rank is given up, its source kept until it ends."""
        base, good, silent = (
            await ec_consumer(),
            await ec_consumer(),
            await ec_consumer({"reserve": "silent"}),
        )
        base.rank_ports = [good.port, silent.port]
        started: list[Started] = []
        patient = PushPolicy(write_base_s=60.0)
        async with producer_end(policy=patient, control_timeout_s=1.0, on_write=started.append) as producer:
            with pytest.raises(ConsumerUnavailable):
                await producer.sender.push(producer.item(f"tcp://127.0.0.1:{base.port}", "t", DATA))
            await wait_until(lambda: bool(good.calls_to("cancel")), "the other rank is told")
            freed_early = list(producer.freed)
            started[0].end(False)
            await wait_until(lambda: producer.freed == ["t"], "the source is free")

            assert freed_early == []
            assert [started[0].job] == producer.engine.withdrawn
        assert good.calls_to("cancel")[0].body["failed"] is True


async def test_consumers_that_are_gone_are_forgotten() -> None:
    """A producer that outlives hundreds of consumers does not remember them all (hazard 27)."""
    port = free_port()
    async with producer_end() as producer:
        for number in range(MAX_CONSUMERS + 50):
            address = f"tcp://127.0.{number // 200}.{1 + number % 200}:{port}"
            with pytest.raises(ConsumerUnavailable):
                await producer.sender.push(producer.item(address, "t", DATA))

        assert producer.sender.stats().consumers <= MAX_CONSUMERS


class TestIncarnations:
    """Consumers come back as other processes (hazard 16)."""

    async def test_ranks_are_asked_for_once(self, ec_consumer: StartConsumer) -> None:
        """Ten pushes to one consumer ask for its ranks once."""
        stub = await ec_consumer()
        async with producer_end(on_write=succeed) as producer:
            for number in range(10):
                await producer.sender.push(producer.item(f"tcp://127.0.0.1:{stub.port}", f"t{number}", DATA))

        assert [call.op for call in stub.calls].count("peers") == 1

    async def test_a_restarted_consumer_is_asked_again(self, ec_consumer: StartConsumer) -> None:
        """When its Mooncake session has changed, a consumer's ranks are asked for anew."""
        stub = await ec_consumer()
        async with producer_end(on_write=succeed) as producer:
            address = f"tcp://127.0.0.1:{stub.port}"
            await producer.sender.push(producer.item(address, "t1", DATA))
            stub.session = "127.0.0.1:2"
            for name in ("t2", "t3", "t4"):
                await producer.sender.push(producer.item(address, name, DATA))

        assert [call.op for call in stub.calls].count("peers") == 2

    async def test_a_rank_that_moved_to_another_port_is_found(self, ec_consumer: StartConsumer) -> None:
        """When a rank is not where it was, its consumer is asked anew: the next push reaches it."""
        base, first, second = await ec_consumer(), await ec_consumer(), await ec_consumer()
        address = f"tcp://127.0.0.1:{base.port}"
        base.rank_ports = [first.port]
        async with producer_end(on_write=succeed) as producer:
            await producer.sender.push(producer.item(address, "t1", DATA))
            await first.stop()
            base.rank_ports = [second.port]
            with pytest.raises(ConsumerUnavailable):
                await producer.sender.push(producer.item(address, "t2", DATA))
            await wait_until(lambda: not producer.sender.is_held(address), "it may be asked again")
            await producer.sender.push(producer.item(address, "t3", DATA))

        assert list(second.reservations) == ["t3"]

    async def test_a_consumer_restarted_on_the_same_port_is_reached(self) -> None:
        """After a restart with another session and memory the next push succeeds."""
        async with producer_end() as producer:
            async with consumer_end() as first:
                address = first.address
                await producer.sender.push(producer.item(address, "t1", DATA))
                memory = first.memory
            receiver = Receiver(
                ReceiverSettings(port=int(address.rsplit(":", 1)[1])),
                memory=memory,
                session="consumer:2",
                observe=lambda record: None,
            )
            receiver.start()
            results = []
            for name in ("t2", "t3"):
                try:
                    results.append(await producer.sender.push(producer.item(address, name, DATA)))
                except ConsumerUnavailable:
                    continue
            await receiver.close()

        assert results
        assert producer.engine.started[-1].session == "consumer:2"
