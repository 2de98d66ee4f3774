"""A stub EC consumer: the control side of one replica on a real ZMQ socket, every message recorded.

Rules of this file: it speaks the control protocol of vLLM's ECMooncakeConnector (0.32 and 0.33) and moves no
bytes; `behaviour` maps an op to what happens instead of the right answer:
`ok`, `refuse` (ok:false), `silent` (no answer), `cancelled`, `cached`, `follower`, `false` (completed:false),
`malformed` (not JSON), or `{"delay_ms": n}` before the right answer (`[a, b]`: from a to b, evenly, in turn).
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import zmq
import zmq.asyncio

from tests.stubs.behaviour import UnknownBehaviour
from tests.stubs.ports import free_port

JSON = dict[str, Any]

OPS = frozenset({"peers", "event_port", "reserve", "complete", "cancel", "status"})
WAYS = frozenset({"ok", "refuse", "silent", "cancelled", "cached", "follower", "false", "malformed"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlCall:
    """One received message: its frames, its op (None when it is no JSON object), and when it came."""

    frames: tuple[bytes, ...]
    op: str | None
    body: JSON
    at: float


@dataclass(slots=True, kw_only=True)
class Reservation:
    """What the stub remembers about a transfer id."""

    mm_hash: str
    nbytes: int
    shape: list[int]
    dtype: str
    reservation_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    state: str = "writing"


def parse_ways(behaviour: Mapping[str, Any]) -> dict[str, Any]:
    """Return the behaviour per op; raise UnknownBehaviour for an op or way outside the vocabulary."""
    for op, way in behaviour.items():
        if op not in OPS and op != "*":
            raise UnknownBehaviour(f"zmq_behaviour.{op}")
        if not (isinstance(way, dict) and set(way) == {"delay_ms"}) and way not in WAYS:
            raise UnknownBehaviour(f"zmq_behaviour.{op}: {way!r}")
    return dict(behaviour)


class StubConsumer:
    """One EC consumer replica with a single rank; `async with StubConsumer() as consumer:`."""

    def __init__(
        self,
        behaviour: Mapping[str, Any] | None = None,
        *,
        port: int | None = None,
        session: str = "127.0.0.1:1",
    ) -> None:
        self.port = port if port is not None else free_port()
        self.session = session
        self.base_address = 1 << 40
        self.rank_ports = [self.port]
        self.calls: list[ControlCall] = []
        self.reservations: dict[str, Reservation] = {}
        self.set_behaviour(behaviour or {})
        self._task: asyncio.Task[None] | None = None
        self._context: zmq.asyncio.Context | None = None

    @property
    def address(self) -> str:
        """The EC control address to register."""
        return f"tcp://127.0.0.1:{self.port}"

    def set_behaviour(self, behaviour: Mapping[str, Any]) -> None:
        """Change what it does from now on."""
        self._ways = parse_ways(behaviour)
        self._delays = {
            op: _delays(way["delay_ms"]) for op, way in self._ways.items() if isinstance(way, dict)
        }

    def calls_to(self, op: str) -> list[ControlCall]:
        """Calls of one op, in order."""
        return [call for call in self.calls if call.op == op]

    def cancelled_ids(self) -> list[str]:
        """Transfer ids of all cancel messages, in order."""
        return [str(call.body.get("transfer_id")) for call in self.calls_to("cancel")]

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        """Bind the control socket and answer until `stop`."""
        self._context = zmq.asyncio.Context()
        # A ROUTER sees what a REP sees and may also stay silent, which a REP cannot.
        control = self._context.socket(zmq.ROUTER)
        control.setsockopt(zmq.LINGER, 0)
        control.bind(self.address)
        self._task = asyncio.create_task(self._serve(control))

    async def stop(self) -> None:
        """Stop answering and free the socket."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        if self._context is not None:
            self._context.destroy(linger=0)
            self._context = None

    async def _serve(self, control: zmq.asyncio.Socket) -> None:
        answers: set[asyncio.Task[None]] = set()
        try:
            while True:
                peer, _, *frames = await control.recv_multipart()
                task = asyncio.create_task(self._answer(control, peer, frames))
                answers.add(task)
                task.add_done_callback(answers.discard)
        finally:
            for task in answers:
                task.cancel()
            control.close(linger=0)

    async def _answer(self, control: zmq.asyncio.Socket, peer: bytes, frames: list[bytes]) -> None:
        body = _parsed(frames)
        op = body.get("op") if body is not None else None
        self.calls.append(ControlCall(frames=tuple(frames), op=op, body=body or {}, at=time.monotonic()))
        way = self._ways.get(str(op).removesuffix("_batch"), self._ways.get("*", "ok"))
        if way == "silent":
            return
        if isinstance(way, dict):
            base = str(op).removesuffix("_batch")
            await asyncio.sleep(next(self._delays[base if base in self._delays else "*"]) / 1000)
            way = "ok"
        reply = b"not json" if way == "malformed" else json.dumps(self._reply(op, body, way)).encode()
        await control.send_multipart([peer, b"", reply])

    def _reply(self, op: Any, body: JSON | None, way: str) -> JSON:
        if body is None:
            return _refused("malformed message")
        if way == "refuse" and op != "reserve_batch":
            return _refused("arena is full")
        if op == "peers":
            return _ok({"ports": self.rank_ports})
        if op == "status":
            return _ok(self._status(str(body.get("transfer_id"))))
        if op == "cancel":
            return _ok({"cancelled": self._cancel(body)})
        if op in ("reserve", "complete"):
            return self._single(op, body, way)
        if op in ("reserve_batch", "complete_batch"):
            return self._batch(op.removesuffix("_batch"), body, way)
        return _refused(f"unknown op {op!r}")

    def _batch(self, op: str, body: JSON, way: str) -> JSON:
        replies = [self._single(op, item, way) for item in body.get("items", [])]
        return _ok({"items": [r["result"] for r in replies] if op == "complete" else replies})

    def _single(self, op: str, item: JSON, way: str) -> JSON:
        return self._reserve(item, way) if op == "reserve" else _ok(self._complete(item, way))

    def _reserve(self, item: JSON, way: str) -> JSON:
        if way == "refuse":
            return _refused("arena is full")
        wanted = str(item.get("transfer_id"))
        known = self.reservations.get(wanted)
        if way == "cancelled" or (known is not None and known.state == "cancelled"):
            empty = {"reservation_id": "", "dst_session": "", "dst_ptr": 0, "nbytes": 0}
            return _ok(empty | {"write": False, "ready": False, "cancelled": True})
        fresh = known is None
        if known is None:
            known = Reservation(
                mm_hash=item["mm_hash"], nbytes=item["nbytes"], shape=item["shape"], dtype=item["dtype"]
            )
            self.reservations[wanted] = known
        if way == "cached":
            known.state = "ready"
        return _ok(
            {
                "reservation_id": known.reservation_id,
                "dst_session": self.session,
                "dst_ptr": self.base_address + 256 * len(self.reservations),
                "nbytes": known.nbytes,
                "write": fresh and way == "ok",
                "ready": known.state == "ready",
                "cached": way == "cached",
            }
        )

    def _complete(self, item: JSON, way: str) -> JSON:
        known = self.reservations.get(str(item.get("transfer_id")))
        right = known is not None and known.reservation_id == item.get("reservation_id")
        if way == "false" or known is None or not right:
            return {"completed": False, "became_ready": False}
        became, known.state = known.state == "writing", "ready"
        return {"completed": True, "became_ready": became}

    def _cancel(self, item: JSON) -> bool:
        wanted = str(item.get("transfer_id"))
        tombstone = Reservation(mm_hash="", nbytes=0, shape=[], dtype="", state="cancelled")
        self.reservations.setdefault(wanted, tombstone).state = "cancelled"
        return True

    def _status(self, transfer_id: str) -> JSON | None:
        known = self.reservations.get(transfer_id)
        if known is None or known.state == "cancelled":
            return None
        return {
            "mm_hash": known.mm_hash,
            "ready": known.state == "ready",
            "reservation_id": known.reservation_id,
            "nbytes": known.nbytes,
            "shape": known.shape,
            "dtype": known.dtype,
        }


def _delays(wanted: float | list[float]) -> Iterator[float]:
    low, high = wanted if isinstance(wanted, list) else (wanted, wanted)
    return itertools.cycle(low + (high - low) * n / 10 for n in range(11))


def _parsed(frames: list[bytes]) -> JSON | None:
    try:
        value = json.loads(frames[0]) if len(frames) == 1 else None
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _ok(result: Any) -> JSON:
    return {"ok": True, "result": result}


def _refused(error: str) -> JSON:
    return {"ok": False, "error": error}
