"""Our EC messages and both our ends against messages captured from vLLM 0.33.0's own classes.

`ec-mooncake-vectors.json` says how each was captured. Values are compared, not bytes: JSON whitespace differs
between senders, and ids, addresses, sessions and ports belong to one run.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from epdctl.domain import TransferId
from epdctl.ec import protocol
from epdctl.ec.protocol import BadMessage, CompleteItem, ReserveItem
from epdctl.worker.transfer.arena import Arena
from epdctl.worker.transfer.memory import HostMemory
from epdctl.worker.transfer.notices import LeasePolicy
from epdctl.worker.transfer.receiver import Receiver, ReceiverSettings
from epdctl.worker.transfer.reservation import Reservations
from epdctl.worker.transfer.service import ControlService, Verification

pytestmark = pytest.mark.contract

JSON = dict[str, Any]

FILE = json.loads((Path(__file__).parent / "ec-mooncake-vectors.json").read_text())
VECTORS: dict[str, JSON] = {vector["name"]: vector for vector in FILE["vectors"]}
REQUESTS = [name for name in VECTORS if name.endswith(".request")]
VALID_REQUESTS = [
    name
    for name in REQUESTS
    if not name.startswith("err.")
    or name in ("err.dtype.request", "err.nbytes.request", "err.full.request", "err.active_writer.request")
]
REPLIES: dict[str | None, Callable[[bytes], Any]] = {
    "peers": partial(protocol.parse_reply, kind=protocol.PeersResult),
    "event_port": partial(protocol.parse_reply, kind=int),
    "status": partial(protocol.parse_reply, kind=protocol.TransferStatus | None),
    "reserve": partial(protocol.parse_reply, kind=protocol.Reservation),
    "reserve_batch": protocol.parse_reserve_replies,
    "complete": partial(protocol.parse_reply, kind=protocol.CompleteResult),
    "complete_batch": protocol.parse_complete_replies,
    "cancel": partial(protocol.parse_reply, kind=protocol.CancelResult),
}
GREETING_BYTES = 64
RUN_SPECIFIC = ("reservation_id", "dst_session", "dst_ptr")


def body(name: str) -> bytes:
    """Return a vector's message body."""
    return bytes.fromhex(VECTORS[name]["hex"])


def value(name: str) -> Any:
    """Return a vector's message as it was decoded when it was captured."""
    return VECTORS[name]["decoded"]


def normalised(message: Any) -> Any:
    """Return a message with what belongs to one run reduced to whether it is there, and bare refusals."""
    if isinstance(message, list):
        return [normalised(part) for part in message]
    if not isinstance(message, dict):
        return message
    if message.get("ok") is False:
        return {"ok": False}
    return {key: bool(part) if key in RUN_SPECIFIC else normalised(part) for key, part in message.items()}


class TestMessages:
    """What vLLM sends is understood, and what we send is what it sends."""

    @pytest.mark.parametrize("name", VALID_REQUESTS)
    def test_requests_are_understood_and_rebuilt(self, name: str) -> None:
        """A captured request parses, and encodes to the same JSON value again."""
        request = protocol.parse_request(body(name))

        assert value(name) == json.loads(protocol.encode(request))

    @pytest.mark.parametrize("name", [name for name in REQUESTS if name not in VALID_REQUESTS])
    def test_malformed_requests_are_refused_with_a_reason(self, name: str) -> None:
        """What vLLM answers with ok:false, whatever it is, is a BadMessage here."""
        with pytest.raises(BadMessage, match=r"\w"):
            protocol.parse_request(body(name))

    @pytest.mark.parametrize("name", [name for name in VECTORS if name.endswith("reserve.reply")])
    def test_reservations_are_understood(self, name: str) -> None:
        """A captured answer to a reserve has the fields it was captured with."""
        answer = protocol.parse_reply(body(name), protocol.Reservation)

        if value(name)["ok"]:
            assert value(name)["result"] == json.loads(protocol.encode(answer))
        else:
            assert value(name)["error"] == answer.error

    @pytest.mark.parametrize("name", [name for name in VECTORS if name.endswith("reserve_batch.reply")])
    def test_batches_of_reservations_are_understood(self, name: str) -> None:
        """Each item of a captured batch is a reservation or a refusal, in order."""
        answers = protocol.parse_reserve_replies(body(name))

        assert isinstance(answers, list)
        expected = [item["ok"] for item in value(name)["result"]["items"]]
        assert expected == [isinstance(answer, protocol.Reservation) for answer in answers]

    @pytest.mark.parametrize(
        "name", [name for name in VECTORS if "complete_batch" in name and "reply" in name]
    )
    def test_completions_are_understood(self, name: str) -> None:
        """The answers to a captured complete_batch are read in order."""
        answers = protocol.parse_complete_replies(body(name))

        assert value(name)["result"]["items"] == json.loads(protocol.encode(answers))

    @pytest.mark.parametrize("name", [name for name in VECTORS if name.endswith(".reply")])
    def test_every_reply_is_read_as_the_answer_to_its_request(self, name: str) -> None:
        """Each captured answer, good or not, is what its request asks for, and gives the same JSON again."""
        request = value(name.removesuffix(".reply") + ".request")
        op = request.get("op") if isinstance(request, dict) else None
        answer = REPLIES.get(op, protocol.parse_reserve_replies)(body(name))

        if not value(name)["ok"]:
            assert isinstance(answer, protocol.Refusal)
            assert answer.error == value(name)["error"]
        elif op == "reserve_batch":
            again = [
                {"ok": False, "error": item.error}
                if isinstance(item, protocol.Refusal)
                else {"ok": True, "result": json.loads(protocol.encode(item))}
                for item in answer
            ]
            assert again == value(name)["result"]["items"]
        else:
            result = value(name)["result"]
            expected = result["items"] if op == "complete_batch" else result
            assert json.loads(protocol.encode(answer)) == expected

    def test_no_vector_is_left_out(self) -> None:
        """Each vector is a request, the reply to one, or an event: the three kinds that are tested here."""
        events = {name for name in VECTORS if name.startswith("event.ready")}
        replies = {name for name in VECTORS if name.endswith(".reply")}

        assert set(VECTORS) == set(REQUESTS) | replies | events
        assert {name.removesuffix(".reply") for name in replies} == {
            name.removesuffix(".request") for name in REQUESTS
        }

    @pytest.mark.parametrize("name", [name for name in VECTORS if name.startswith("event.ready")])
    def test_events_are_understood_and_rebuilt(self, name: str) -> None:
        """A captured ready event parses, and encodes to the same JSON value again."""
        assert value(name) == json.loads(protocol.encode(protocol.parse_event(body(name))))

    def test_a_full_arena_is_recognised_by_vllms_words(self) -> None:
        """vLLM has no code for a full arena, only a text."""
        refusal = protocol.parse_reply(body("err.full.reply"), protocol.Reservation)

        assert refusal.is_full


Step = Callable[["Consumer"], None]


class Consumer:
    """Our consumer's control side with a clock of its own, and a hand to bring it into any state."""

    def __init__(self) -> None:
        self.memory = HostMemory(1 << 20)
        self.reservations = Reservations(
            Arena(self.memory.nbytes),
            session="127.0.0.1:1",
            base_address=self.memory.address,
            policy=LeasePolicy(),
        )
        self.now = 0.0
        self.service = ControlService(
            self.reservations,
            read=lambda region: self.memory.view(region.offset, region.nbytes),
            ports=lambda: (22100, 37503),
            verification=Verification(),
            executor=ThreadPoolExecutor(max_workers=1),
            settle=self.reservations.collect,
            clock=lambda: self.now,
        )

    def answer(self, message: bytes) -> Any:
        """Return the decoded reply to one message."""
        return json.loads(asyncio.run(self.service.answer(message)))

    def reserve(self, transfer_id: str, mm_hash: str, rows: int = 4) -> str:
        """Reserve `rows` of 32 bfloat16 and return the reservation id."""
        item = ReserveItem(
            transfer_id=transfer_id, mm_hash=mm_hash, nbytes=64 * rows, shape=(rows, 32), dtype="bfloat16"
        )
        reply = self.answer(protocol.encode(protocol.Reserve(**_fields(item))))
        return str(reply["result"]["reservation_id"])

    def complete(self, transfer_id: str, reservation_id: str) -> None:
        """Publish what was reserved."""
        item = CompleteItem(transfer_id=transfer_id, reservation_id=reservation_id)
        self.answer(protocol.encode(protocol.Complete(**_fields(item))))


def _fields(item: ReserveItem | CompleteItem) -> JSON:
    return {name: getattr(item, name) for name in item.__struct_fields__}


def nothing(consumer: Consumer) -> None:
    """Nothing happened before."""


def writing(transfer_id: str, mm_hash: str) -> Step:
    """Return a step after which somebody is writing the item."""
    return lambda consumer: [consumer.reserve(transfer_id, mm_hash), None][1]


def ready(transfer_id: str, mm_hash: str) -> Step:
    """Return a step after which the item is available."""
    return lambda consumer: consumer.complete(transfer_id, consumer.reserve(transfer_id, mm_hash))


def cancelled(transfer_id: str, mm_hash: str) -> Step:
    """Return a step after which the item was cancelled while it was being written."""

    def step(consumer: Consumer) -> None:
        consumer.reserve(transfer_id, mm_hash)
        consumer.reservations.cancel(TransferId(transfer_id), now=consumer.now)

    return step


def tombstoned(transfer_id: str) -> Step:
    """Return a step after which the id was cancelled before anybody reserved it."""
    return lambda consumer: [consumer.reservations.cancel(TransferId(transfer_id), now=0.0), None][1]


def expired(transfer_id: str, mm_hash: str) -> Step:
    """Return a step after which the lease ran out while the item was being written."""

    def step(consumer: Consumer) -> None:
        consumer.reserve(transfer_id, mm_hash, rows=4096)
        consumer.now = 301.0

    return step


BEFORE: dict[str, Step] = {
    "peers": nothing,
    "event_port": nothing,
    "status.unknown": nothing,
    "reserve": nothing,
    "status.writing": writing("T1", "H1"),
    "reserve.duplicate_while_writing": writing("T1", "H1"),
    "complete.repeat": ready("T1", "H1"),
    "complete.wrong_reservation": ready("T1", "H1"),
    "complete_batch.unknown": nothing,
    "status.ready": ready("T1", "H1"),
    "reserve.duplicate_while_ready": ready("T1", "H1"),
    "reserve.conflict": ready("T1", "H1"),
    "reserve.cached": ready("T1", "H1"),
    "reserve.cached_conflict": ready("T1", "H1"),
    "reserve.follower": writing("W1", "HF"),
    "reserve.cancelled": cancelled("F2", "HG"),
    "reserve_batch.partial": nothing,
    "cancel.unknown": nothing,
    "reserve.tombstoned": tombstoned("C0"),
    "cancel.deferred": writing("C1", "HC1"),
    "reserve.after_refresh": nothing,
    "err.dtype": nothing,
    "err.nbytes": nothing,
    "err.op": nothing,
    "err.missing": nothing,
    "err.full": nothing,
    "err.negative_shape": nothing,
    "err.active_writer": expired("DW", "HDW"),
    "err.malformed_json": nothing,
    "err.non_object": nothing,
}


class TestOurConsumer:
    """Our consumer answers what vLLM's answered in the same state."""

    @pytest.mark.parametrize("name", BEFORE)
    def test_answers_as_vllm_does(self, name: str) -> None:
        """Brought into the same state and sent the same bytes, our consumer gives the same answer."""
        consumer = Consumer()
        BEFORE[name](consumer)
        request = body(f"{name}.request")
        if name == "complete.repeat":
            request = _with_live_reservation(consumer, request)

        assert normalised(value(f"{name}.reply")) == normalised(consumer.answer(request))

    @pytest.mark.parametrize(
        "name", ["complete_batch", "complete_batch.two", "cancel.abandon", "cancel.refresh"]
    )
    def test_answers_about_a_reservation_as_vllm_does(self, name: str) -> None:
        """The same for messages that name a reservation, with our reservation's id in the place of vLLM's."""
        consumer = Consumer()
        message = value(f"{name}.request")
        for item in message.get("items", [message]):
            item = dict(item)
            consumer.reserve(item["transfer_id"], f"hash of {item['transfer_id']}")
        request = _with_live_reservation(consumer, body(f"{name}.request"))

        assert normalised(value(f"{name}.reply")) == normalised(consumer.answer(request))

    def test_regions_lie_where_vllm_puts_them(self) -> None:
        """Addresses are absolute, and a multiple of 256 from the arena's first byte."""
        consumer = Consumer()
        replies = [
            consumer.answer(body("reserve.request")),
            consumer.answer(body("reserve.follower.request")),
        ]
        offsets = [reply["result"]["dst_ptr"] - consumer.memory.address for reply in replies]

        assert offsets == [0, 256]

    def test_every_captured_state_is_covered(self) -> None:
        """No captured exchange with vLLM's consumer is left out."""
        by_consumer = {
            name.removesuffix(".request")
            for name in REQUESTS
            if VECTORS[name]["source"].startswith("independent producer")
        }
        left_out = by_consumer - set(BEFORE)

        assert {
            "complete_batch",
            "complete_batch.two",
            "cancel.abandon",
            "cancel.refresh",
            "peers.tp2",
        } == left_out


def _with_live_reservation(consumer: Consumer, request: bytes) -> bytes:
    message = json.loads(request)
    for item in message.get("items", [message]):
        status = consumer.reservations.status(item["transfer_id"])
        assert status is not None
        item["reservation_id"] = status.reservation_id
    return json.dumps(message).encode()


async def test_a_captured_tcp_stream_is_answered() -> None:
    """The very bytes that a REQ socket sent to vLLM's consumer get an answer of the same body from ours."""
    memory = HostMemory(4096)
    receiver = Receiver(ReceiverSettings(port=0), memory=memory, session="x:1", observe=lambda record: None)
    receiver.start()
    port = int(receiver.consumer_zmq.rsplit(":", 1)[1])
    sent = bytes.fromhex(FILE["zmtp_tcp_capture"]["client_to_server_hex"])

    reply = await asyncio.to_thread(_exchange_tcp, port, sent)
    await receiver.close()

    expected = {"ok": True, "result": {"ports": [port]}}
    assert expected == json.loads(reply[reply.index(b'{"ok"') :])


def _exchange_tcp(port: int, sent: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
        # libzmq drops a peer that does not wait for its greeting.
        connection.sendall(sent[:GREETING_BYTES])
        received = _receive(connection, b"", lambda data: len(data) >= GREETING_BYTES)
        connection.sendall(sent[GREETING_BYTES:])
        return _receive(connection, received, lambda data: data.endswith(b"}}"))


def _receive(connection: socket.socket, received: bytes, is_enough: Callable[[bytes], bool]) -> bytes:
    while not is_enough(received):
        chunk = connection.recv(4096)
        assert chunk, f"the connection was closed after {received!r}"
        received += chunk
    return received
