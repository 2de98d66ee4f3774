"""Our producer against sequences captured from vLLM 0.33.0's: the same questions, in the same order.

A scripted consumer gives the captured answers. Our extras (`digest`, `fenced`) are taken out first.
That ours asks a full consumer again where vLLM's gives up and cancels is the one difference in order.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq
import zmq.asyncio

from epdctl.domain import MmHash, TransferId
from epdctl.errors import ConsumerFull, TransferFailed
from epdctl.worker.transfer.delivery import Delivery
from epdctl.worker.transfer.ports import PushAnnouncement, PushSource, TransferOutcome
from epdctl.worker.transfer.push_steps import Phase, PushPolicy
from epdctl.worker.transfer.sender import Sender
from tests.stubs.process import wait_until
from tests.unit.transfer.engine import MemoryEngine, Started

pytestmark = pytest.mark.contract

JSON = dict[str, Any]

FILE = json.loads((Path(__file__).parent / "ec-mooncake-vectors.json").read_text())
VECTORS: dict[str, JSON] = {vector["name"]: vector for vector in FILE["vectors"]}
OURS = ("digest", "fenced", "failed")


def sequence(prefix: str) -> list[tuple[JSON, JSON]]:
    """Return the captured requests and replies whose names start with `prefix`, in order."""
    requests = [name for name in VECTORS if name.startswith(prefix) and name.endswith(".request")]
    return [
        (VECTORS[name]["decoded"], VECTORS[name.replace(".request", ".reply")]["decoded"])
        for name in sorted(requests)
    ]


def without_extras(message: Any) -> Any:
    """Return a message without the fields that only our ends know."""
    if isinstance(message, list):
        return [without_extras(part) for part in message]
    if not isinstance(message, dict):
        return message
    return {key: without_extras(value) for key, value in message.items() if key not in OURS}


class ScriptedRank:
    """Answers captured replies in their order; what is not in the script is answered by op."""

    def __init__(self, context: zmq.asyncio.Context, script: list[tuple[JSON, JSON]]) -> None:
        self._replies = [reply for request, reply in script if request["op"] != "peers"]
        self.socket = context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.port = self.socket.bind_to_random_port("tcp://127.0.0.1")
        self.ports = [self.port]
        self.requests: list[JSON] = []

    async def serve(self) -> None:
        """Answer until cancelled."""
        while True:
            *envelope, body = await self.socket.recv_multipart()
            request = json.loads(body)
            await self.socket.send_multipart([*envelope, json.dumps(self._answer(request)).encode()])

    def _answer(self, request: JSON) -> JSON:
        if request["op"] == "peers":
            return {"ok": True, "result": {"ports": self.ports}}
        self.requests.append(without_extras(request))
        return self._replies.pop(0) if len(self._replies) > 1 else self._replies[0]


@asynccontextmanager
async def producer(
    *scripts: list[tuple[JSON, JSON]], policy: PushPolicy | None = None
) -> AsyncIterator[tuple[Sender, list[ScriptedRank]]]:
    """Start a sender and a scripted consumer with one rank for each script."""
    context = zmq.asyncio.Context()
    ranks = [ScriptedRank(context, script) for script in scripts]
    ranks[0].ports = [rank.port for rank in ranks]
    tasks = [asyncio.create_task(rank.serve()) for rank in ranks]
    engine = MemoryEngine(on_write=lambda started: started.end(True))
    sender = Sender(engine, observe=lambda record: None, policy=policy)
    yield sender, ranks
    await sender.close()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    context.destroy(linger=0)


def announcement(rank: ScriptedRank, request: JSON) -> PushAnnouncement:
    """Return the announcement of the item that a captured reserve is about."""
    return PushAnnouncement(
        consumer_zmq=f"tcp://127.0.0.1:{rank.port}",
        transfer_id=TransferId(request["transfer_id"]),
        mm_hash=MmHash(request["mm_hash"]),
        nbytes=request["nbytes"],
        shape=tuple(request["shape"]),
        dtype=request["dtype"],
    )


def source() -> PushSource:
    """Return a source whose bytes nobody looks at."""
    return PushSource(address=1, digest="0" * 64, on_free=lambda: None)


async def until_reserved(delivery: Delivery) -> None:
    """Wait until the consumer's answer to the reserve is known."""
    await wait_until(
        lambda: any(rank._push.phase is Phase.WAITING_FOR_SOURCE for rank in delivery._ranks), "reserved"
    )


@pytest.mark.parametrize("name", ["push.single", "push.deepstack"])
async def test_one_item_goes_as_vllms_does(name: str) -> None:
    """One item is reserved by `reserve` and completed by `complete_batch`, with vLLM's very fields."""
    script = sequence(name)
    if name == "push.deepstack":
        script.append(sequence("push.single")[-1])
    async with producer(script) as (sender, (rank,)):
        reserve = next(request for request, _ in script if request["op"] == "reserve")
        result = await sender.announce(announcement(rank, reserve)).push(source())

    expected = [request for request, _ in script if request["op"] != "peers"]
    assert result.outcome == TransferOutcome.DELIVERED
    assert expected[:1] == rank.requests[:1]
    assert len(expected) == len(rank.requests)


async def test_items_of_one_moment_go_as_one_batch() -> None:
    """Items for one consumer are reserved and completed together, each with its own transfer id."""
    script = sequence("push.batch")
    async with producer(script) as (sender, (rank,)):
        items = script[0][0]["items"]
        deliveries = [sender.announce(announcement(rank, item)) for item in items]
        results = await asyncio.gather(*(delivery.push(source()) for delivery in deliveries))

    assert [request for request, _ in script] == rank.requests
    assert [result.outcome for result in results] == [TransferOutcome.DELIVERED] * 3


async def test_a_refused_completion_is_cancelled() -> None:
    """When the consumer does not accept the bytes, the reservation is abandoned and the caller told."""
    script = sequence("push.complete_refused")
    async with producer(script) as (sender, (rank,)):
        with pytest.raises(TransferFailed):
            await sender.announce(announcement(rank, script[0][0])).push(source())

    assert [request for request, _ in script] == rank.requests


async def test_an_aborted_push_is_cancelled() -> None:
    """A push that is given up before the bytes exist abandons its reservation."""
    script = sequence("push.abort")
    async with producer(script) as (sender, (rank,)):
        delivery = sender.announce(announcement(rank, script[0][0]))
        await until_reserved(delivery)
        delivery.abort()

    assert [request for request, _ in script] == rank.requests


async def test_an_old_reservation_is_refreshed() -> None:
    """A reservation that has become too old is replaced, under the same transfer id, before a write."""
    script = sequence("push.refresh")
    async with producer(script, policy=PushPolicy(refresh_age_s=0.0)) as (sender, (rank,)):
        delivery = sender.announce(announcement(rank, script[0][0]))
        await until_reserved(delivery)
        result = await delivery.push(source())

    assert [request for request, _ in script] == rank.requests
    assert result.outcome == TransferOutcome.DELIVERED


async def test_every_rank_gets_the_item() -> None:
    """With two tensor-parallel ranks both are reserved and completed, each with its own reservation."""
    scripts = sequence("push.tp2.rank0"), sequence("push.tp2.rank1")
    async with producer(*scripts) as (sender, ranks):
        reserve = scripts[1][0][0]
        result = await sender.announce(announcement(ranks[0], reserve)).push(source())

    expected = [[request for request, _ in script if request["op"] != "peers"] for script in scripts]
    assert expected == [rank.requests for rank in ranks]
    assert 2 * reserve["nbytes"] == result.nbytes_written


async def test_one_failing_rank_gives_the_others_up() -> None:
    """When one rank refuses, the reservation at the other is abandoned and the push fails."""
    refusing = sequence("push.tp2.rank1")[:1] + sequence("push.complete_refused")[1:]
    scripts = sequence("push.tp2.rank0"), refusing
    writes: list[Started] = []
    async with producer(*scripts) as (sender, ranks):
        engine = sender._around.engine
        assert isinstance(engine, MemoryEngine)
        engine._on_write = writes.append
        delivery = sender.announce(announcement(ranks[0], scripts[0][1][0]))
        pushed = asyncio.create_task(delivery.push(source()))
        await wait_until(lambda: len(writes) == 2, "both ranks are being written")
        next(write for write in writes if write.session.endswith(":16601")).end(True)
        with pytest.raises(TransferFailed):
            await pushed
        await wait_until(lambda: ranks[0].requests[-1]["op"] == "cancel", "the other rank is cancelled")

    assert [request["op"] for request in ranks[0].requests[:2]] == ["reserve", "cancel"]


async def test_a_full_consumer_is_asked_again_and_not_cancelled() -> None:
    """A refused reserve leaves nothing to cancel; a cancel would only poison the id at vLLM's consumer."""
    script = sequence("push.arena_full")[:1]
    async with producer(script, policy=PushPolicy(full_patience_s=0.2)) as (sender, (rank,)):
        with pytest.raises(ConsumerFull):
            await sender.announce(announcement(rank, script[0][0])).push(source())

    assert len(rank.requests) > 1
    assert {"reserve"} == {request["op"] for request in rank.requests}
