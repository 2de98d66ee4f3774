"""Claims about the consumer end: what a request gets, when, and what is left afterwards."""

from __future__ import annotations

import asyncio
import json

import pytest
import zmq
import zmq.asyncio

from epdctl.domain import MmHash, TransferId
from epdctl.ec.client import ControlClient
from epdctl.ec.protocol import CompleteItem, Reservation, ReserveItem
from epdctl.errors import ShuttingDown, TransferFailed, UpstreamTimeout
from epdctl.worker.transfer.digest import SMALL_BYTES, digest_of
from epdctl.worker.transfer.ports import Received, TensorSpec, TransferOutcome
from epdctl.worker.transfer.service import Verification
from tests.stubs.process import wait_until
from tests.unit.transfer.ends import DATA, SHORT, ConsumerEnd, consumer_end, idle, spec

pytestmark = pytest.mark.unit


def item(transfer_id: str, data: bytes = DATA, mm_hash: str = "h") -> ReserveItem:
    """Return a reserve of `data`."""
    return ReserveItem(
        transfer_id=transfer_id, mm_hash=mm_hash, nbytes=len(data), shape=(1, len(data)), dtype="uint8"
    )


class Hand:
    """A producer by hand: reserves, writes into the consumer's memory, completes."""

    def __init__(self, end: ConsumerEnd) -> None:
        self._end = end
        self.client = ControlClient(end.address, 2.0)

    async def reserve(self, transfer_id: str, data: bytes = DATA, mm_hash: str = "h") -> Reservation:
        """Reserve what must be granted."""
        answer = await self.client.reserve(item(transfer_id, data, mm_hash))
        assert isinstance(answer, Reservation), answer
        return answer

    def write(self, reservation: Reservation, data: bytes = DATA) -> None:
        """Let the bytes land."""
        offset = reservation.dst_ptr - self._end.memory.address
        self._end.memory.view(offset, len(data))[:] = data

    async def complete(self, transfer_id: str, reservation: Reservation, digest: str | None = None) -> bool:
        """Complete, and return whether it was accepted."""
        done = CompleteItem(transfer_id=transfer_id, reservation_id=reservation.reservation_id, digest=digest)
        return (await self.client.complete_batch([done]))[0].completed

    async def deliver(self, transfer_id: str, data: bytes = DATA, mm_hash: str = "h") -> bool:
        """Do all of it."""
        reservation = await self.reserve(transfer_id, data, mm_hash)
        self.write(reservation, data)
        return await self.complete(transfer_id, reservation, digest_of(data))


def taking(
    end: ConsumerEnd, transfer_id: str, *, data: bytes = DATA, mm_hash: str = "h", deadline_s: float = 5
) -> asyncio.Task[Received]:
    """Start to wait for an item."""
    return asyncio.create_task(
        end.receiver.take(
            transfer_id=TransferId(transfer_id),
            mm_hash=MmHash(mm_hash),
            expect=spec(data),
            deadline_s=deadline_s,
        )
    )


class TestTake:
    """Waiting for an embedding."""

    @pytest.mark.parametrize("asked_first", [True, False])
    async def test_either_side_may_come_first(self, asked_first: bool) -> None:
        """A request gets its bytes whether it asks before they arrive or after."""
        async with consumer_end() as end:
            hand = Hand(end)
            waiting = taking(end, "t") if asked_first else None
            assert await hand.deliver("t")
            received = await (waiting or taking(end, "t"))
            data = bytes(received.view)
            received.release()
            await hand.client.close()

            assert data == DATA
            assert idle(end)

    async def test_two_requests_share_one_item(self) -> None:
        """Both positions of two identical images are filled, from one delivery (hazard 38)."""
        async with consumer_end() as end:
            hand = Hand(end)
            waiting = [taking(end, "t1"), taking(end, "t2")]
            await hand.deliver("t1")
            received = await asyncio.gather(*waiting)
            second = await hand.client.reserve(item("t2"))
            await hand.client.close()

        assert [bytes(one.view) for one in received] == [DATA, DATA]
        assert isinstance(second, Reservation)
        assert second.is_cancelled

    @pytest.mark.parametrize(
        ("expect", "said"),
        [
            (TensorSpec((2, 6), "uint8"), "[1, 12] where [2, 6]"),
            (TensorSpec((1, 3), "float32"), "uint8 where float32"),
        ],
    )
    async def test_another_tensor_never_reaches_the_model(self, expect: TensorSpec, said: str) -> None:
        """Rows, width and dtype are checked against the request, and what differs is dropped (hazard 44)."""
        async with consumer_end() as end:
            hand = Hand(end)
            await hand.deliver("t")
            with pytest.raises(TransferFailed) as caught:
                await end.receiver.take(
                    transfer_id=TransferId("t"), mm_hash=MmHash("h"), expect=expect, deadline_s=1
                )
            await hand.client.close()

            assert said in caught.value.message
            assert idle(end)

    async def test_nothing_arrives(self) -> None:
        """A wait ends at its deadline, and leaves nothing."""
        async with consumer_end() as end:
            with pytest.raises(UpstreamTimeout):
                await taking(end, "t", deadline_s=0.05)

            assert idle(end)

    async def test_a_request_that_leaves_waits_no_more(self) -> None:
        """A cancelled wait is forgotten."""
        async with consumer_end() as end:
            waiting = taking(end, "t")
            await wait_until(lambda: end.receiver.stats().waiting == 1, "waiting")
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)

            assert idle(end)
            assert end.receiver._waits._waiting == {}

    async def test_a_producers_failure_ends_the_wait(self) -> None:
        """A failure that the producer reports reaches the request at once, not at its deadline."""
        async with consumer_end() as end:
            hand = Hand(end)
            waiting = taking(end, "t", deadline_s=30)
            reservation = await hand.reserve("t")
            await hand.client.cancel("t", reservation.reservation_id, failed=True)
            async with asyncio.timeout(1):
                with pytest.raises(TransferFailed, match="did not arrive"):
                    await waiting
            await hand.client.close()

    async def test_a_failure_that_came_before_the_request_is_not_lost(self) -> None:
        """A request that asks after its transfer has failed is told at once (hazard 14)."""
        async with consumer_end() as end:
            hand = Hand(end)
            reservation = await hand.reserve("t")
            await hand.client.cancel("t", reservation.reservation_id, abandon=True)
            async with asyncio.timeout(1):
                with pytest.raises(TransferFailed):
                    await taking(end, "t", deadline_s=30)
            await hand.client.close()

    async def test_a_follower_gets_a_second_writer(self) -> None:
        """When a follower's writer gives up, the request goes on waiting for the next one."""
        async with consumer_end() as end:
            hand = Hand(end)
            writer = await hand.reserve("w")
            await hand.reserve("f")
            waiting = taking(end, "f")
            await hand.client.cancel("w", writer.reservation_id, abandon=True)
            await hand.deliver("f2")

            assert bytes((await waiting).view) == DATA
            await hand.client.close()

    async def test_a_follower_without_a_second_writer_fails_soon(self) -> None:
        """When nobody else writes the item either, the request fails after about a second."""
        async with consumer_end() as end:
            hand = Hand(end)
            writer = await hand.reserve("w")
            await hand.reserve("f")
            waiting = taking(end, "f", deadline_s=30)
            await hand.client.cancel("w", writer.reservation_id, abandon=True)
            async with asyncio.timeout(3):
                with pytest.raises(TransferFailed, match="gave up"):
                    await waiting
            await hand.client.close()

    async def test_closing_fails_the_waits(self) -> None:
        """A worker that shuts down says so to the requests that wait."""
        async with consumer_end() as end:
            waiting = taking(end, "t")
            await wait_until(lambda: end.receiver.stats().waiting == 1, "waiting")
            await end.receiver.close()

            with pytest.raises(ShuttingDown):
                await waiting


class TestVerification:
    """The digest of the rows."""

    @pytest.mark.parametrize("nbytes", [1, SMALL_BYTES, SMALL_BYTES + 1, 1_000_000])
    async def test_intact_bytes_are_accepted(self, nbytes: int) -> None:
        """Bytes of any size that match their digest become ready."""
        data = bytes(nbytes)
        async with consumer_end(4 << 20) as end:
            hand = Hand(end)

            assert await hand.deliver("t", data)
            assert data == bytes((await taking(end, "t", data=data)).view)
            await hand.client.close()

    @pytest.mark.parametrize("nbytes", [12, 1_000_000])
    async def test_one_flipped_byte_is_refused(self, nbytes: int) -> None:
        """A byte that changed between the write and the check is refused, counted, and never read."""
        data = bytes(nbytes)

        def flip(transfer_id: TransferId, view: memoryview) -> None:
            view[nbytes // 2] ^= 1

        async with consumer_end(4 << 20, verification=Verification(before=flip)) as end:
            hand = Hand(end)
            accepted = await hand.deliver("t", data)
            with pytest.raises(TransferFailed, match="do not match their digest"):
                await taking(end, "t", data=data)
            await hand.client.close()

            assert not accepted
            assert [(TransferOutcome.REFUSED, nbytes)] == [(r.outcome, r.nbytes) for r in end.records]
            assert end.receiver.stats().items == 0

    async def test_the_check_can_be_switched_off(self) -> None:
        """Without it changed bytes are read as they are: so it is the pushed embedding that is read."""

        def flip(transfer_id: TransferId, view: memoryview) -> None:
            view[0] ^= 1

        async with consumer_end(verification=Verification(enabled=False, before=flip)) as end:
            hand = Hand(end)
            accepted = await hand.deliver("t")
            received = await taking(end, "t")
            await hand.client.close()

        assert accepted
        assert bytes([DATA[0] ^ 1]) + DATA[1:] == bytes(received.view)

    async def test_without_a_digest_nothing_is_checked(self) -> None:
        """A vLLM producer sends no digest, and its items are taken."""
        async with consumer_end() as end:
            hand = Hand(end)
            reservation = await hand.reserve("t")
            hand.write(reservation)

            assert await hand.complete("t", reservation)
            await hand.client.close()


class TestTimer:
    """Leases end by themselves (hazards 10 and 40)."""

    async def test_a_dead_producers_bytes_come_back(self) -> None:
        """After a reserve and silence the arena is whole again, though nobody asks for anything."""
        async with consumer_end(leases=SHORT) as end:
            hand = Hand(end)
            await hand.reserve("t")
            await hand.client.close()

            assert end.receiver.stats().arena_bytes["used"] == 256
            await wait_until(lambda: idle(end), "the bytes are back", 5)
            assert end.memory.nbytes == end.receiver.stats().arena_bytes["free"]

    async def test_a_late_write_hits_nobody(self) -> None:
        """After A gave up B gets another place, so that A's late bytes are never B's (hazards 18 and 41)."""
        async with consumer_end() as end:
            hand = Hand(end)
            a = await hand.reserve("a")
            await hand.client.cancel("a", a.reservation_id, abandon=True)
            b = await hand.reserve("b", mm_hash="other")
            hand.write(b, b"bytes of B..")
            hand.write(a, b"late bytes A")
            accepted = await hand.complete("b", b, digest_of(b"bytes of B.."))
            received = await taking(end, "b", mm_hash="other")
            await hand.client.close()

        assert a.dst_ptr != b.dst_ptr
        assert accepted
        assert bytes(received.view) == b"bytes of B.."

    async def test_a_reader_keeps_its_bytes(self) -> None:
        """While a request reads an item, a second item waits for the place (hazard 9)."""
        async with consumer_end(256) as end:
            hand = Hand(end)
            await hand.deliver("a")
            reading = await taking(end, "a")
            refused = await hand.client.reserve(item("b", mm_hash="other"))
            reading.release()
            reading.release()
            granted = await hand.client.reserve(item("b", mm_hash="other"))
            await hand.client.close()

        assert not isinstance(refused, Reservation)
        assert refused.is_full
        assert isinstance(granted, Reservation)


async def test_ready_events_reach_a_puller() -> None:
    """Whoever asks for the event port and pulls there gets an event for each item that becomes ready."""
    async with consumer_end() as end:
        context = zmq.asyncio.Context()
        asker = context.socket(zmq.REQ)
        asker.connect(end.address)
        await asker.send(b'{"op":"event_port"}')
        port = json.loads(await asker.recv())["result"]
        puller = context.socket(zmq.PULL)
        puller.connect(f"tcp://127.0.0.1:{port}")
        hand = Hand(end)
        reservation = await hand.reserve("t")
        await hand.complete("t", reservation)
        async with asyncio.timeout(5):
            event = json.loads(await puller.recv())
        await hand.client.close()
        context.destroy(linger=0)

        assert {
            "transfer_id": "t",
            "mm_hash": "h",
            "ready": True,
            "reservation_id": reservation.reservation_id,
            "nbytes": 12,
            "shape": [1, 12],
            "dtype": "uint8",
            "shard": int(end.address.rsplit(":", 1)[1]),
        } == event


async def test_events_without_a_puller_cost_nothing() -> None:
    """With nobody pulling, transfers go on and the events do not pile up."""
    async with consumer_end() as end:
        hand = Hand(end)
        for number in range(200):
            assert await hand.deliver(f"t{number}", mm_hash="h")
        await hand.client.close()

        assert len(end.receiver._events._queue) <= 200


async def test_a_consumer_closes_with_a_request_open() -> None:
    """Closing does not wait for producers that are gone (no message is left to be sent)."""
    async with consumer_end() as end:
        hand = Hand(end)
        await hand.reserve("t")
        async with asyncio.timeout(3):
            await end.receiver.close()
        await hand.client.close()
