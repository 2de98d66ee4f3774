"""A bundled language worker as a process, and a test-side producer that pushes what the tower computed.

Rules of this file: real processes, real Mooncake over loopback; waiting is for conditions with deadlines.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from epdctl.domain import MmHash, TransferId
from epdctl.worker.transfer.digest import digest_of
from epdctl.worker.transfer.environment import mooncake_environment
from epdctl.worker.transfer.memory import HostMemory
from epdctl.worker.transfer.mooncake import TransferEngine
from epdctl.worker.transfer.ports import PushItem, PushResult
from epdctl.worker.transfer.sender import Sender
from tests.e2e.tiny_pictures import Message, Picture
from tests.e2e.tower import Encoded, Tower
from tests.stubs.ports import free_ports
from tests.stubs.process import Process, epdctl_command, start_process

MODEL = "tiny"
HOST = "127.0.0.1"
_ITEM_BYTES = 1 << 20
_ITEMS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A worker's answer: its status, and its body or the events of its stream (None for `[DONE]`)."""

    status: int
    body: Any
    events: tuple[Any, ...] = ()
    headers: Mapping[str, str]

    @property
    def text(self) -> str:
        """The text of the first choice, from the body or from the stream's pieces."""
        if not self.events:
            return str(self.body["choices"][0]["message"]["content"])
        return "".join(
            choice["delta"].get("content") or ""
            for event in self.events
            if event
            for choice in event["choices"]
            if choice["index"] == 0
        )

    @property
    def error(self) -> Mapping[str, Any]:
        """The error object."""
        found: Mapping[str, Any] = self.body["error"]
        return found


@dataclass(slots=True, kw_only=True)
class Worker:
    """A running worker."""

    process: Process
    url: str
    ec_port: int
    session: aiohttp.ClientSession

    @property
    def consumer_zmq(self) -> str:
        """The control address of its first replica."""
        return f"tcp://{HOST}:{self.ec_port}"

    async def ask(
        self, messages: Sequence[Message], *, headers: Mapping[str, str] | None = None, **fields: Any
    ) -> Answer:
        """Send a greedy chat request, unless `fields` say otherwise."""
        body = {"model": MODEL, "messages": list(messages), "temperature": 0, "max_tokens": 32, **fields}
        return await self.post("/v1/chat/completions", body, headers)

    async def post(self, path: str, body: Any, headers: Mapping[str, str] | None = None) -> Answer:
        """Send a body, JSON unless it is bytes; read the whole answer."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        sent = {"Content-Type": "application/json", **(headers or {})}
        async with self.session.post(self.url + path, data=data, headers=sent) as answer:
            text = await answer.text()
            if answer.content_type == "text/event-stream":
                events = tuple(parse_event(block) for block in text.split("\n\n") if block)
                return Answer(status=answer.status, body=None, events=events, headers=answer.headers)
            return Answer(status=answer.status, body=json.loads(text), headers=answer.headers)

    async def metric(self, name: str, **labels: str) -> float:
        """Return the sum of a metric over the series with these labels."""
        async with self.session.get(self.url + "/metrics") as answer:
            text = await answer.text()
        series = re.findall(rf"^{name}(?:\{{(.*)\}})? (\S+)$", text, re.MULTILINE)
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        return sum(float(value) for found, value in series if all(pair in found for pair in wanted))

    async def health(self) -> tuple[int, Any]:
        """Return status and body of /health."""
        async with self.session.get(self.url + "/health") as answer:
            return answer.status, await answer.json()

    async def is_idle(self) -> bool:
        """Whether nothing is in flight and nothing is held: sequences, KV, leases, reservations and pins."""
        held = [
            await self.metric("epdctl_in_flight"),
            await self.metric("epdctl_sequences"),
            await self.metric("epdctl_kv_bytes", state="used"),
            await self.metric("epdctl_kv_bytes", state="pinned"),
            await self.metric("epdctl_arena_bytes", state="used"),
            await self.metric("epdctl_arena_bytes", state="pinned"),
        ]
        return not any(held)

    async def until_idle(self, timeout_s: float = 10.0) -> None:
        """Wait until nothing is in flight or held."""
        await self.process.wait_until(self.is_idle, "nothing is in flight or held", timeout_s)


def parse_event(block: str) -> Any:
    """Return the JSON of one event, None for `[DONE]`."""
    assert block.startswith("data: "), block
    data = block.removeprefix("data: ")
    return None if data == "[DONE]" else json.loads(data)


@asynccontextmanager
async def language_worker(
    folder: Path, log_dir: Path, *flags: str, role: str = "prefill-decode", replicas: int = 1
) -> AsyncIterator[Worker]:
    """Run a worker for the time of the context; it is ready when the context is entered."""
    port, *ec_ports = free_ports(1 + replicas)
    ec_flags = ("--ec-port", str(ec_ports[0]), "--ec-buffer-bytes", str(16 << 20))
    command = epdctl_command(
        *("worker", role, "--model", str(folder), "--served-model-name", MODEL),
        *("--host", HOST, "--port", str(port), "--kv-bytes", str(16 << 20)),
        *(() if role == "decode" else ec_flags),
        *("--data-parallel-size", str(replicas)),
        *flags,
    )
    process = start_process(command, log_dir, role, env={"OMP_NUM_THREADS": "1"})
    timeout = aiohttp.ClientTimeout(total=60)
    try:
        # A connection for each request: a worker hangs up after an error in a stream, and a request that went
        # out on the same connection in that moment would be reset.
        fresh = aiohttp.TCPConnector(force_close=True, limit=0)
        async with aiohttp.ClientSession(timeout=timeout, connector=fresh) as session:
            worker = Worker(
                process=process, url=f"http://{HOST}:{port}", ec_port=ec_ports[0], session=session
            )
            await process.wait_until(lambda: _is_healthy(worker), "healthy", 60)
            yield worker
    finally:
        process.close()


def engine_pids(worker: Worker) -> list[int]:
    """Return the worker's engine processes, in the order of its replicas."""
    pid = worker.process.pid
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return sorted(int(child) for child in children)


async def _is_healthy(worker: Worker) -> bool:
    try:
        status, _ = await worker.health()
    except aiohttp.ClientError:
        return False
    return status == 200


class Producer:
    """Pushes pictures' embeddings to consumers, as an encode worker does."""

    def __init__(self, tower: Tower) -> None:
        self._tower = tower
        os.environ.update(mooncake_environment(os.environ, protocol="tcp"))
        self._engine = TransferEngine(host=HOST)
        self._memory = HostMemory(_ITEMS * _ITEM_BYTES)
        self._engine.register(self._memory.address, self._memory.nbytes)
        self._sender = Sender(self._engine, observe=lambda _: None)
        self._free = list(range(_ITEMS))

    async def close(self) -> None:
        """Stop pushing."""
        await self._sender.close()
        await self._engine.close()
        self._memory.close()

    def encode(self, pictures: Sequence[Picture]) -> list[Encoded]:
        """Return the embedding of each picture."""
        return self._tower.encode([picture.image for picture in pictures])

    async def push(
        self,
        consumer_zmq: str,
        item: Encoded,
        *,
        mm_hash: str,
        transfer_id: str,
        shape: tuple[int, ...] | None = None,
        data: bytes | None = None,
    ) -> PushResult:
        """Deliver an item; `shape` and `data` may say something else than the item is."""
        content = item.data if data is None else data
        slot = self._free.pop()
        self._memory.view(slot * _ITEM_BYTES, len(content))[:] = content
        return await self._sender.push(
            PushItem(
                consumer_zmq=consumer_zmq,
                transfer_id=TransferId(transfer_id),
                mm_hash=MmHash(mm_hash),
                nbytes=len(content),
                shape=shape or tuple(item.rows.shape),
                dtype="float32",
                address=self._memory.address + slot * _ITEM_BYTES,
                digest=digest_of(content),
                on_source_free=lambda: self._free.append(slot),
            )
        )

    async def prepare(
        self, consumer_zmq: str, messages: Sequence[Message], pictures: Sequence[Picture]
    ) -> dict[str, Any]:
        """Push the pictures of a conversation; return the fields of the request as the proxy rewrites it."""
        encoded = self.encode(pictures)
        items = [{"mm_hash": uuid.uuid4().hex, "transfer_id": uuid.uuid4().hex} for _ in encoded]
        pairs = list(zip(encoded, items, strict=True))
        await asyncio.gather(*(self.push(consumer_zmq, e, **item) for e, item in pairs))
        return rewritten(messages, encoded, items)


def rewritten(
    messages: Sequence[Message], encoded: Sequence[Encoded], items: Sequence[Mapping[str, str]]
) -> dict[str, Any]:
    """Return messages with metadata in the place of pictures, and the ec_items that name the pushes."""
    parts = iter(
        {
            "type": "image_embeds",
            "image_embeds": {"image_grid_thw": list(e.grid)},
            "uuid": item["mm_hash"],
        }
        for e, item in zip(encoded, items, strict=True)
    )
    new = [
        message
        if isinstance(message["content"], str)
        else message
        | {"content": [next(parts) if p["type"] == "image_url" else p for p in message["content"]]}
        for message in messages
    ]
    return {"messages": new, "ec_transfer_params": {"ec_items": list(items)}}
