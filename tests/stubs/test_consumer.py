"""The stub EC consumer speaks the control protocol and keeps what it heard."""

from __future__ import annotations

import json
from typing import Any

import pytest
import zmq
import zmq.asyncio

from tests.conftest import StartConsumer
from tests.stubs.behaviour import UnknownBehaviour
from tests.stubs.consumer import StubConsumer, parse_ways

pytestmark = pytest.mark.contract

ITEM = {"transfer_id": "t1", "mm_hash": "h", "nbytes": 32, "shape": [2, 8], "dtype": "bfloat16"}


async def ask(consumer: StubConsumer, *frames: bytes, timeout_ms: int = 2000) -> Any:
    """Send one message as a REQ socket does and return the reply, parsed."""
    context = zmq.asyncio.Context()
    try:
        request = context.socket(zmq.REQ)
        request.setsockopt(zmq.RCVTIMEO, timeout_ms)
        request.connect(consumer.address)
        await request.send_multipart(list(frames))
        return json.loads(await request.recv())
    finally:
        context.destroy(linger=0)


def op(name: str, **fields: Any) -> bytes:
    """Return a control message."""
    return json.dumps({"op": name} | fields).encode()


class TestStubConsumer:
    """Ops are answered as by vLLM's consumer, or as told."""

    async def test_reserve_then_complete_makes_ready(self, ec_consumer: StartConsumer) -> None:
        """A reservation is written once and becomes ready when completed."""
        consumer = await ec_consumer()
        reserved = (await ask(consumer, op("reserve", **ITEM)))["result"]
        done = await ask(
            consumer,
            op("complete_batch", items=[{"transfer_id": "t1", "reservation_id": reserved["reservation_id"]}]),
        )
        status = (await ask(consumer, op("status", transfer_id="t1")))["result"]
        assert reserved["write"] is True
        assert done == {"ok": True, "result": {"items": [{"completed": True, "became_ready": True}]}}
        assert status["ready"] is True

    async def test_cancel_leaves_a_tombstone(self, ec_consumer: StartConsumer) -> None:
        """A reserve after a cancel of its id is answered as cancelled, and the cancel is on record."""
        consumer = await ec_consumer()
        await ask(consumer, op("cancel", transfer_id="t1", reservation_id=""))
        reserved = (await ask(consumer, op("reserve", **ITEM)))["result"]
        assert (reserved["cancelled"], reserved["write"]) == (True, False)
        assert consumer.cancelled_ids() == ["t1"]

    async def test_refuses_as_told(self, ec_consumer: StartConsumer) -> None:
        """A refusing consumer answers ok:false to single and batched reserves alike."""
        consumer = await ec_consumer({"reserve": "refuse"})
        assert (await ask(consumer, op("reserve", **ITEM)))["ok"] is False
        batch = await ask(consumer, op("reserve_batch", items=[ITEM]))
        assert batch["result"]["items"][0]["ok"] is False

    async def test_stays_silent_as_told(self, ec_consumer: StartConsumer) -> None:
        """A silent op gets no answer while the others go on."""
        consumer = await ec_consumer({"complete": "silent"})
        with pytest.raises(zmq.Again):
            await ask(consumer, op("complete", transfer_id="t1"), timeout_ms=200)
        assert (await ask(consumer, op("peers")))["result"] == {"ports": [consumer.port]}

    async def test_survives_malformed_messages(self, ec_consumer: StartConsumer) -> None:
        """Two frames and no JSON get an error answer, and the next message is served."""
        consumer = await ec_consumer()
        assert (await ask(consumer, b"{}", b"{}"))["ok"] is False
        assert (await ask(consumer, b"nonsense"))["ok"] is False
        assert (await ask(consumer, op("peers")))["ok"] is True

    @pytest.mark.parametrize("behaviour", [{"resrve": "ok"}, {"reserve": "mumble"}])
    def test_unknown_words_are_named(self, behaviour: dict[str, Any]) -> None:
        """An op or way outside the vocabulary raises, naming it."""
        with pytest.raises(UnknownBehaviour, match=r"resrve|mumble"):
            parse_ways(behaviour)
