"""Claims about the producer end: what its callers are told, and when sources are free."""

from __future__ import annotations

import asyncio

import pytest

from epdctl.domain import TransferId
from epdctl.errors import (
    ConsumerFull,
    ConsumerUnavailable,
    InvalidRequest,
    ShuttingDown,
    TransferFailed,
    UpstreamProtocol,
    UpstreamTimeout,
)
from epdctl.worker.transfer.ports import PushSource, TransferOutcome
from epdctl.worker.transfer.push_steps import PushPolicy
from epdctl.worker.transfer.service import Verification
from epdctl.worker.transfer.tensors import TensorContract
from tests.conftest import StartConsumer
from tests.stubs.ports import free_port
from tests.stubs.process import wait_until
from tests.unit.transfer.ends import DATA, consumer_end, counted, idle, producer_end, succeed, taken
from tests.unit.transfer.engine import Started

pytestmark = pytest.mark.unit


class TestDelivery:
    """What arrives, and what both ends count."""

    async def test_three_items_of_one_request_arrive_each(self) -> None:
        """Three images under three transfer ids are three deliveries, byte for byte (hazard 5)."""
        pictures = {f"t{number}": bytes([number]) * (100 + number) for number in range(3)}
        async with consumer_end() as consumer, producer_end() as producer:
            items = [
                producer.item(consumer.address, name, data, offset=1000 * index)
                for index, (name, data) in enumerate(pictures.items())
            ]
            results = await asyncio.gather(*(producer.sender.push(item) for item in items))
            received = {name: await taken(consumer, name, data) for name, data in pictures.items()}

            assert pictures == received
            assert [result.outcome for result in results] == [TransferOutcome.DELIVERED] * 3
            assert counted(producer) == counted(consumer)
            assert sorted(pictures) == sorted(producer.freed)

    async def test_the_same_item_twice_is_written_once(self) -> None:
        """Two deliveries of one item: one is written, the other follows; both ends agree on that."""
        async with consumer_end() as consumer, producer_end() as producer:
            items = [producer.item(consumer.address, name, DATA, mm_hash="h") for name in ("t1", "t2")]
            results = await asyncio.gather(*(producer.sender.push(item) for item in items))

            assert {TransferOutcome.DELIVERED, TransferOutcome.CACHED} == {r.outcome for r in results}
            assert counted(producer) == counted(consumer)
            assert len(producer.engine.started) == 1

    async def test_an_announced_item_is_reserved_before_its_bytes_exist(self) -> None:
        """The reservation is made while the tower runs; the push then only writes."""
        async with consumer_end() as consumer, producer_end() as producer:
            item = producer.item(consumer.address, "t", DATA)
            delivery = producer.sender.announce(item)
            await wait_until(
                lambda: consumer.receiver.stats().reservations["writing"] == 1, "the space is reserved"
            )
            await delivery.push(
                PushSource(address=item.address, digest=item.digest, on_free=item.on_source_free)
            )

            assert await taken(consumer, "t", DATA) == DATA

    async def test_an_announced_item_can_be_given_up(self) -> None:
        """When the tower fails the reservation is given back."""
        async with consumer_end() as consumer, producer_end() as producer:
            delivery = producer.sender.announce(producer.item(consumer.address, "t", DATA))
            await wait_until(
                lambda: consumer.receiver.stats().reservations["writing"] == 1, "the space is reserved"
            )
            delivery.abort()

            await wait_until(lambda: idle(consumer), "the space is free")
            await wait_until(lambda: producer.sender.stats().open == 0, "nothing is open")

    async def test_a_flipped_byte_is_counted_at_both_ends(self) -> None:
        """A byte flipped between write and check fails the push, and both ends count one refusal."""

        def flip(transfer_id: TransferId, view: memoryview) -> None:
            view[0] ^= 1

        verification = Verification(before=flip)
        async with consumer_end(verification=verification) as consumer, producer_end() as producer:
            with pytest.raises(TransferFailed, match="did not accept the bytes"):
                await producer.sender.push(producer.item(consumer.address, "t", DATA))

            assert [(TransferOutcome.REFUSED, len(DATA))] == counted(producer) == counted(consumer)

    async def test_another_dtype_is_refused_before_anything_is_written(self) -> None:
        """A producer of another dtype than the consumer's model is told both (hazard 6)."""
        contract = TensorContract(dtype="bfloat16")
        async with consumer_end(contract=contract) as consumer, producer_end() as producer:
            item = producer.item(consumer.address, "t", bytes(16), dtype="float32", shape=(1, 4))
            with pytest.raises(TransferFailed, match="takes bfloat16, the item is float32"):
                await producer.sender.push(item)

            assert producer.engine.started == []
            assert producer.freed == ["t"]

    async def test_a_caller_that_leaves_cancels_its_transfer(self) -> None:
        """A cancelled push gives its reservation back, and its source is freed when nothing reads it."""
        started: list[Started] = []
        async with consumer_end() as consumer, producer_end(on_write=started.append) as producer:
            pushing = asyncio.create_task(producer.sender.push(producer.item(consumer.address, "t", DATA)))
            await wait_until(lambda: bool(started), "the write has started")
            pushing.cancel()
            await asyncio.gather(pushing, return_exceptions=True)
            freed_early = list(producer.freed)
            started[0].end(True)
            await wait_until(lambda: producer.sender.stats().open == 0, "nothing is open")

            assert freed_early == []
            assert producer.freed == ["t"]
            assert [started[0].job] == producer.engine.withdrawn
            await wait_until(lambda: idle(consumer), "the consumer holds nothing")


class TestFailures:
    """What the caller is told."""

    async def test_nobody_listens(self) -> None:
        """A dead address fails at once with the cause (hazard 37)."""
        async with producer_end() as producer:
            async with asyncio.timeout(1):
                with pytest.raises(ConsumerUnavailable):
                    await producer.sender.push(producer.item(f"tcp://127.0.0.1:{free_port()}", "t", DATA))

            assert producer.freed == ["t"]
            assert producer.sender.stats().open == 0
            assert counted(producer) == [(TransferOutcome.FAILED, 0)]

    @pytest.mark.parametrize("op", ["peers", "reserve", "complete", "*"])
    async def test_a_silent_consumer(self, ec_consumer: StartConsumer, op: str) -> None:
        """A consumer that stops answering, at whatever step, fails the push within its time-outs."""
        silent = await ec_consumer({op: "silent"})
        async with producer_end(control_timeout_s=0.1, on_write=succeed) as producer:
            async with asyncio.timeout(2):
                with pytest.raises(ConsumerUnavailable):
                    await producer.sender.push(producer.item(f"tcp://127.0.0.1:{silent.port}", "t", DATA))
            await wait_until(lambda: producer.sender.stats().open == 0, "nothing is open")

            assert producer.freed == ["t"]

    @pytest.mark.parametrize("op", ["peers", "reserve", "complete"])
    async def test_a_consumer_that_talks_nonsense(self, ec_consumer: StartConsumer, op: str) -> None:
        """Answers that are not in the protocol fail the push, and are not told as no answer."""
        mad = await ec_consumer({op: "malformed"})
        async with producer_end(control_timeout_s=0.2, on_write=succeed) as producer:
            with pytest.raises(UpstreamProtocol):
                await producer.sender.push(producer.item(f"tcp://127.0.0.1:{mad.port}", "t", DATA))
            await wait_until(lambda: producer.sender.stats().open == 0, "nothing is open")

            assert producer.freed == ["t"]

    async def test_what_a_paused_consumer_was_not_told_it_is_told_later(
        self, ec_consumer: StartConsumer
    ) -> None:
        """A reserve that was lost in a pause may be granted after it: its cancel is repeated as soon as the
        consumer answers somebody, so that the space is not kept for nobody."""
        paused = await ec_consumer({"reserve": "silent", "cancel": "silent"})
        address = f"tcp://127.0.0.1:{paused.port}"
        async with producer_end(control_timeout_s=0.2, on_write=succeed) as producer:
            with pytest.raises(ConsumerUnavailable):
                await producer.sender.push(producer.item(address, "t1", DATA))
            await wait_until(lambda: producer.sender.stats().open == 0, "nothing is open")
            asked_in_vain = len(paused.calls_to("cancel"))
            paused.set_behaviour({})
            await wait_until(lambda: not producer.sender.is_held(address), "it may be asked again")
            await producer.sender.push(producer.item(address, "t2", DATA))
            await wait_until(lambda: len(paused.calls_to("cancel")) > asked_in_vain, "it is told")

            told = paused.calls_to("cancel")[-1].body
            assert (told["transfer_id"], told["abandon"]) == ("t1", True)

    async def test_a_full_consumer(self) -> None:
        """A full arena is waited for a little, then named, and nothing is left at either end."""
        policy = PushPolicy(full_patience_s=0.2)
        async with consumer_end(256) as consumer, producer_end(policy=policy) as producer:
            await producer.sender.push(producer.item(consumer.address, "a", DATA))
            with pytest.raises(ConsumerFull):
                await producer.sender.push(producer.item(consumer.address, "b", DATA))
            consumer.receiver.cancel(TransferId("a"))

            assert idle(consumer)
            assert producer.freed == ["a", "b"]

    async def test_room_that_appears_in_time_is_used(self) -> None:
        """A push to a full consumer succeeds as soon as there is room."""
        async with consumer_end(256) as consumer, producer_end() as producer:
            await producer.sender.push(producer.item(consumer.address, "a", DATA))
            pushing = asyncio.create_task(producer.sender.push(producer.item(consumer.address, "b", DATA)))
            assert await taken(consumer, "a", DATA) == DATA

            assert (await pushing).outcome == TransferOutcome.DELIVERED

    async def test_a_failed_write_keeps_its_source(self) -> None:
        """The caller is told at once, the source stays until the engine has let go of it (hazard 41)."""
        started: list[Started] = []
        async with consumer_end() as consumer, producer_end(on_write=started.append) as producer:
            pushing = asyncio.create_task(producer.sender.push(producer.item(consumer.address, "t", DATA)))
            await wait_until(lambda: bool(started), "the write has started")
            started[0].end(False, settle=False)
            with pytest.raises(TransferFailed):
                await pushing
            freed_early = list(producer.freed)
            started[0].settle()
            await wait_until(lambda: producer.freed == ["t"], "the source is free")

            assert freed_early == []
            assert consumer.receiver.stats().reservations["cancel_pending"] == 1
            assert consumer.receiver.stats().arena_bytes["used"] == 256

    async def test_a_write_that_never_ends(self) -> None:
        """A push fails at its write's deadline though the engine says nothing."""
        policy = PushPolicy(write_base_s=0.1)
        started: list[Started] = []
        async with (
            consumer_end() as consumer,
            producer_end(policy=policy, on_write=started.append) as producer,
        ):
            async with asyncio.timeout(2):
                with pytest.raises(UpstreamTimeout):
                    await producer.sender.push(producer.item(consumer.address, "t", DATA))

            assert producer.freed == []

    async def test_a_bad_address_is_the_callers_mistake(self) -> None:
        """An address that is none is refused before anything is sent."""
        async with producer_end() as producer:
            with pytest.raises(InvalidRequest, match="tcp://host:port"):
                await producer.sender.push(producer.item("http://127.0.0.1:1", "t", DATA))

            assert producer.sender.stats().open == 0


class TestClosing:
    """Shutting down."""

    async def test_closing_ends_what_waits(self, ec_consumer: StartConsumer) -> None:
        """Pushes that wait when the worker ends fail with a reason, in bounded time."""
        silent = await ec_consumer({"reserve": "silent"})
        async with producer_end(control_timeout_s=30) as producer:
            address = f"tcp://127.0.0.1:{silent.port}"
            pushing = [
                asyncio.create_task(producer.sender.push(producer.item(address, name, DATA)))
                for name in ("t1", "t2")
            ]
            await wait_until(lambda: bool(silent.calls_to("reserve_batch")), "the consumer was asked")
            async with asyncio.timeout(4):
                await producer.sender.close()
            for one in pushing:
                with pytest.raises(TransferFailed):
                    await one

            assert sorted(producer.freed) == ["t1", "t2"]

    async def test_a_source_that_is_read_when_closing_is_freed_by_the_engine(self) -> None:
        """A write that outlives the sender keeps its source until the engine lets go of it."""
        started: list[Started] = []
        async with consumer_end() as consumer, producer_end(on_write=started.append) as producer:
            pushing = asyncio.create_task(producer.sender.push(producer.item(consumer.address, "t", DATA)))
            await wait_until(lambda: bool(started), "the write has started")
            await producer.sender.close()
            await asyncio.gather(pushing, return_exceptions=True)
            early = list(producer.freed)
            started[0].end(False)
            await wait_until(lambda: producer.freed == ["t"], "the source is free")

            assert early == []

    async def test_nothing_is_taken_after_closing(self) -> None:
        """A closed sender refuses."""
        async with producer_end() as producer:
            await producer.sender.close()

            with pytest.raises(ShuttingDown):
                await producer.sender.push(producer.item("tcp://127.0.0.1:1", "t", DATA))

    async def test_closing_tells_the_consumers(self) -> None:
        """Reservations of announced items are given back when the worker ends."""
        async with consumer_end() as consumer, producer_end() as producer:
            producer.sender.announce(producer.item(consumer.address, "t", DATA))
            await wait_until(
                lambda: consumer.receiver.stats().reservations["writing"] == 1, "the space is reserved"
            )
            await producer.sender.close()

            assert idle(consumer)
