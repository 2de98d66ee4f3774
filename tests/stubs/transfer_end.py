"""A process with both ends of EC transfer over real Mooncake, led by JSON commands on a ZMQ port.

    python -m tests.stubs.transfer_end '{"command_port": 12000, "control_port": 12001, "nbytes": 67108864}'

Settings beyond those: `arena_nbytes` (of the consumer's end, else as `nbytes`), `leases` and `policy` (fields
of LeasePolicy and PushPolicy), `host` (under which Mooncake is reached), `mooncake_ports` [a, b], `hang` (ops
that are never answered), `delay_ms` (before each answer), `flip` (flip a byte before the check).
Commands are `{"id": …, "do": "push" | "announce" | "deliver" | "abort" | "take" | "cancel" | "stats", …}`;
each is answered by `{"id": …, …}`, failures with `error` and `message`. An item's bytes are made from its
`seed`, and `take` answers with the digest of what it got.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import blake3
import zmq
import zmq.asyncio

from epdctl.domain import MmHash, TransferId
from epdctl.ec.protocol import BadMessage, parse_request
from epdctl.errors import EpdError
from epdctl.worker.transfer.environment import mooncake_environment, writes_to_ipv6
from epdctl.worker.transfer.memory import HostMemory
from epdctl.worker.transfer.mooncake import TransferEngine
from epdctl.worker.transfer.notices import LeasePolicy
from epdctl.worker.transfer.ports import (
    Delivery,
    PushAnnouncement,
    PushSource,
    TensorSpec,
    TransferRecord,
)
from epdctl.worker.transfer.push_steps import PushPolicy
from epdctl.worker.transfer.receiver import Receiver, ReceiverSettings
from epdctl.worker.transfer.sender import Sender
from epdctl.worker.transfer.service import Verification

JSON = dict[str, Any]


def item_bytes(seed: int, nbytes: int) -> bytes:
    """Return the bytes of the item made from `seed`."""
    return blake3.blake3(seed.to_bytes(8, "little")).digest(length=nbytes)


def item_digest(seed: int, nbytes: int) -> str:
    """Return the digest of the item made from `seed`."""
    return blake3.blake3(item_bytes(seed, nbytes)).hexdigest()


def flip_a_byte(transfer_id: TransferId, view: memoryview) -> None:
    """Damage what arrived."""
    view[len(view) // 2] ^= 1


class TransferEnd:
    """Both ends, sharing one transfer engine."""

    def __init__(self, settings: JSON) -> None:
        self._settings = settings
        self.records: list[TransferRecord] = []
        host = settings.get("host", "127.0.0.1")
        self.engine = TransferEngine(host=host, ipv6=writes_to_ipv6(os.environ))
        sizes = (settings["nbytes"], settings.get("arena_nbytes", settings["nbytes"]))
        self._memories = [HostMemory(size) for size in sizes]
        for memory in self._memories:
            self.engine.register(memory.address, memory.nbytes)
        self._sources, arena = self._memories
        self.receiver = Receiver(
            ReceiverSettings(
                port=settings["control_port"],
                leases=LeasePolicy(**settings.get("leases", {})),
                verification=Verification(before=flip_a_byte if settings.get("flip") else None),
                tick_s=0.05,
            ),
            memory=arena,
            session=self.engine.session,
            observe=self.records.append,
        )
        self._spoil_answers(self.receiver)
        self.sender = Sender(
            self.engine,
            observe=self.records.append,
            policy=PushPolicy(**settings.get("policy", {})),
            control_timeout_s=settings.get("control_timeout_s", 2.0),
        )
        self._deliveries: dict[str, Delivery] = {}
        self._offsets = itertools.count()
        self._free: list[str] = []

    def _spoil_answers(self, receiver: Receiver) -> None:
        listener = receiver._listener
        answer: Callable[[bytes], Awaitable[bytes]] = listener._answer
        hang, delay_s = set(self._settings.get("hang", ())), self._settings.get("delay_ms", 0) / 1000

        async def spoiled(body: bytes) -> bytes:
            if _op(body) in hang:
                await asyncio.Event().wait()
            await asyncio.sleep(delay_s)
            return await answer(body)

        listener._answer = spoiled

    async def push(self, command: JSON) -> JSON:
        """Announce and deliver."""
        await self.announce(command)
        return await self.deliver(command)

    async def announce(self, command: JSON) -> JSON:
        """Start to reserve."""
        nbytes = command["nbytes"]
        self._deliveries[command["transfer_id"]] = self.sender.announce(
            PushAnnouncement(
                consumer_zmq=command["consumer"],
                transfer_id=TransferId(command["transfer_id"]),
                mm_hash=MmHash(command["mm_hash"]),
                nbytes=nbytes,
                shape=(1, nbytes),
                dtype="uint8",
            )
        )
        return {}

    async def deliver(self, command: JSON) -> JSON:
        """Deliver the bytes made from `seed`, at `offset` of the sources."""
        name, nbytes = command["transfer_id"], command["nbytes"]
        view = self._sources.view(command.get("offset", 0), nbytes)
        if command.get("fill", True):
            view[:] = item_bytes(command["seed"], nbytes)
        result = await self._deliveries.pop(name).push(
            PushSource(
                address=self._sources.address + command.get("offset", 0),
                digest=blake3.blake3(view).hexdigest(),
                on_free=lambda: self._free.append(name),
            )
        )
        return {"outcome": result.outcome, "seconds": result.seconds}

    async def abort(self, command: JSON) -> JSON:
        """Give an announced item up."""
        self._deliveries.pop(command["transfer_id"]).abort()
        return {}

    async def take(self, command: JSON) -> JSON:
        """Wait for an item and return the digest of its bytes; `hold_s` keeps it before it is released."""
        received = await self.receiver.take(
            transfer_id=TransferId(command["transfer_id"]),
            mm_hash=MmHash(command["mm_hash"]),
            expect=TensorSpec((1, command["nbytes"]), "uint8"),
            deadline_s=command.get("deadline_s", 10),
        )
        await asyncio.sleep(command.get("hold_s", 0))
        digest = blake3.blake3(received.view).hexdigest()
        received.release()
        return {"digest": digest}

    async def cancel(self, command: JSON) -> JSON:
        """Say that nobody wants the item."""
        self.receiver.cancel(TransferId(command["transfer_id"]))
        return {}

    async def stats(self, command: JSON) -> JSON:
        """Return what both ends hold and have counted."""
        receiver, sender = self.receiver.stats(), self.sender.stats()
        counts: Counter[str] = Counter()
        for record in self.records:
            counts[f"{record.side}.{record.outcome}"] += 1
            counts[f"{record.side}.bytes"] += record.nbytes
        return {
            "reservations": receiver.reservations,
            "arena": receiver.arena_bytes,
            "waiting": receiver.waiting,
            "pending": sender.pending,
            "open": sender.open,
            "counts": dict(counts),
            "freed": list(self._free),
            "session": self.engine.session,
        }

    async def obey(self, command: JSON) -> JSON:
        """Carry out one command."""
        try:
            answer = await getattr(self, command["do"])(command)
        except EpdError as error:
            answer = {"error": error.code, "message": error.message}
        return {"id": command["id"], **answer}

    async def close(self) -> None:
        """End everything."""
        await self.sender.close()
        await self.receiver.close()
        await self.engine.close()


def _op(body: bytes) -> str:
    try:
        request = parse_request(body)
    except BadMessage:
        return ""
    return str(request.__struct_config__.tag)


async def serve(settings: JSON) -> None:
    """Obey commands until one says `stop`."""
    end = TransferEnd(settings)
    end.receiver.start()
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.bind(f"tcp://127.0.0.1:{settings['command_port']}")
    tasks: set[asyncio.Task[None]] = set()

    async def reply(identity: bytes, command: JSON) -> None:
        await socket.send_multipart([identity, json.dumps(await end.obey(command)).encode()])

    while True:
        identity, body = await socket.recv_multipart()
        command = json.loads(body)
        if command["do"] == "stop":
            break
        task = asyncio.create_task(reply(identity, command))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    await end.close()
    context.destroy(linger=0)


def main() -> None:
    """Read the settings, prepare the environment, and serve."""
    settings = json.loads(sys.argv[1])
    ports = settings.get("mooncake_ports")
    os.environ.update(
        mooncake_environment(
            os.environ,
            protocol="tcp",
            host=settings.get("host", ""),
            ports=tuple(ports) if ports else None,
        )
    )
    asyncio.run(serve(settings))


if __name__ == "__main__":
    main()
