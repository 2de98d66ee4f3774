"""A running encode worker, a consumer of its embeddings, and the truth to compare with.

Rules of this file: the worker is the real command in its own process group; the consumer is the product's
receiver in the test's process, written to by real Mooncake; the truth is transformers alone.
"""

from __future__ import annotations

import base64
import io
import json
import os
import sys
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import torch
import transformers
from PIL import Image

from epdctl.domain import MmHash, TransferId
from epdctl.ec.client import ControlClient
from epdctl.worker.transfer.environment import mooncake_environment
from epdctl.worker.transfer.memory import HostMemory
from epdctl.worker.transfer.mooncake import TransferEngine
from epdctl.worker.transfer.ports import TensorSpec, TransferRecord
from epdctl.worker.transfer.receiver import Receiver, ReceiverSettings
from epdctl.worker.transfer.tensors import TensorContract
from tests.stubs.ports import free_port
from tests.stubs.process import Process, start_process

MODELS = Path(__file__).parents[2] / "models" / "tiny-vlm"
START_S = 90.0


def picture(colour: tuple[int, int, int] = (200, 30, 30), size: tuple[int, int] = (112, 112)) -> bytes:
    """Return a PNG of one colour with a darker square, so that patches differ."""
    image = Image.new("RGB", size, colour)
    image.paste((10, 20, 30), (0, 0, max(1, size[0] // 3), max(1, size[1] // 4)))
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


def solid(colour: tuple[int, int, int], size: tuple[int, int]) -> bytes:
    """Return a PNG of one colour."""
    out = io.BytesIO()
    Image.new("RGB", size, colour).save(out, "PNG")
    return out.getvalue()


def part(data: bytes, name: str | None = None) -> dict[str, Any]:
    """Return the content part of a picture, named `name`."""
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    return {"type": "image_url", "image_url": {"url": url}} | ({"uuid": name} if name else {})


@dataclass(slots=True, kw_only=True)
class Reply:
    """An answer of the worker."""

    status: int
    body: dict[str, Any]

    @property
    def code(self) -> str:
        """The error code."""
        return str(self.body["error"]["code"])

    @property
    def items(self) -> dict[str, Any]:
        """The `ec_transfer_params`."""
        assert self.status == 200, self.body
        return dict(self.body["ec_transfer_params"])


class EncodeWorker:
    """The command under test and the calls that tests make to it."""

    def __init__(self, process: Process, url: str) -> None:
        self.process = process
        self.url = url

    async def encode(
        self,
        *parts: Mapping[str, Any],
        consumer: str | None = None,
        transfer_ids: Sequence[str] = (),
        timeout_s: float = 30.0,
        **fields: Any,
    ) -> Reply:
        """Post one encode request."""
        body: dict[str, Any] = {"messages": [{"role": "user", "content": list(parts)}], **fields}
        if consumer is not None:
            named = [{"transfer_id": transfer_id} for transfer_id in transfer_ids]
            body["ec_transfer_params"] = {"consumer_zmq": consumer, "ec_items": named}
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.post(self.url + "/v1/chat/completions", json=body) as answer,
        ):
            return Reply(status=answer.status, body=await answer.json())

    async def get(self, path: str) -> tuple[int, str]:
        """Return status and text of a GET; status 0 while nothing listens."""
        try:
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session,
                session.get(self.url + path) as answer,
            ):
                return answer.status, await answer.text()
        except (aiohttp.ClientError, TimeoutError):
            return 0, ""

    async def is_healthy(self) -> bool:
        """Whether `/health` says 200."""
        return (await self.get("/health"))[0] == 200

    async def ready(self) -> EncodeWorker:
        """Wait until the worker is healthy."""
        await self.process.wait_until(self.is_healthy, "healthy", START_S)
        return self

    async def metric(self, name: str, **labels: str) -> float:
        """Return the value of one sample, 0 when it is not there."""
        _, text = await self.get("/metrics")
        for line in text.splitlines():
            left, _, value = line.rpartition(" ")
            if left.split("{")[0] == name and all(f'{k}="{v}"' in left for k, v in labels.items()):
                return float(value)
        return 0.0

    def engine_pid(self) -> int:
        """Return the process id of the first engine."""
        pids = self.engine_pids()
        if not pids:
            raise AssertionError("the worker has no engine process")
        return pids[0]

    def engine_pids(self) -> list[int]:
        """Return the process ids of the engines."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return [int(child) for child in children if _is_engine(child)]

    async def engines(self) -> list[dict[str, Any]]:
        """Return what `/health` says of each engine."""
        _, text = await self.get("/health")
        return list(json.loads(text)["engines"])


def _is_engine(pid: str) -> bool:
    line = Path(f"/proc/{pid}/cmdline").read_bytes()
    return b"encode_engine" in line or b"encode.engine" in line


def start_worker(
    log_dir: Path,
    *flags: str,
    model: str | Path = "qwen2_5_vl",
    module: str = "epdctl worker encode",
    env: Mapping[str, str | None] | None = None,
    name: str = "encode",
) -> EncodeWorker:
    """Start the worker on a free port of the loopback."""
    port = free_port()
    folder = MODELS / model if isinstance(model, str) else model
    command = [sys.executable, "-m", *module.split(), "--model", str(folder), "--served-model-name", "tiny"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--cache-bytes", str(32 * 2**20), *flags]
    process = start_process(command, log_dir, name, env={"OMP_NUM_THREADS": "1", **(env or {})})
    return EncodeWorker(process, f"http://127.0.0.1:{port}")


class Consumer:
    """An EC consumer in this process."""

    def __init__(self, receiver: Receiver, records: list[TransferRecord]) -> None:
        self.receiver = receiver
        self.records = records

    @property
    def address(self) -> str:
        """What an encode request names as `consumer_zmq`."""
        return self.receiver.consumer_zmq

    async def is_ready(self, transfer_id: str) -> bool:
        """Return whether a transfer has arrived whole, as a producer would be told."""
        client = ControlClient(self.address, 2.0)
        try:
            status = await client.status(transfer_id)
            return status is not None and status.ready
        finally:
            await client.close()

    async def rows(self, transfer_id: str, mm_hash: str, shape: tuple[int, int]) -> torch.Tensor:
        """Return the float32 rows of one delivery."""
        received = await self.receiver.take(
            transfer_id=TransferId(transfer_id),
            mm_hash=MmHash(mm_hash),
            expect=TensorSpec(shape, "float32"),
            deadline_s=10.0,
        )
        try:
            return torch.frombuffer(bytearray(received.view), dtype=torch.float32).reshape(shape)
        finally:
            received.release()


@asynccontextmanager
async def open_consumer(
    nbytes: int = 16 * 2**20, contract: TensorContract | None = None
) -> AsyncIterator[Consumer]:
    """Run a consumer with an arena of `nbytes`, which takes items of the `contract` only."""
    os.environ.update(mooncake_environment(os.environ, protocol="tcp", ports=None))
    memory = HostMemory(nbytes)
    engine = TransferEngine(host="127.0.0.1")
    engine.register(memory.address, memory.nbytes)
    records: list[TransferRecord] = []
    settings = ReceiverSettings(port=free_port(), contract=contract)
    receiver = Receiver(settings, memory=memory, session=engine.session, observe=records.append)
    receiver.start()
    try:
        yield Consumer(receiver, records)
    finally:
        await receiver.close()
        await engine.close()
        memory.close()


class Truth:
    """The same checkpoint, loaded whole by transformers."""

    def __init__(self, folder: Path) -> None:
        self._network: Any = transformers.AutoModelForImageTextToText.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True
        ).eval()
        self._processor: Any = transformers.AutoImageProcessor.from_pretrained(
            folder, backend="pil", local_files_only=True
        )

    @torch.no_grad()
    def rows(self, data: bytes, **options: Any) -> torch.Tensor:
        """Return the rows of a picture; deepstack levels side by side."""
        seen = self._processor(
            images=[Image.open(io.BytesIO(data)).convert("RGB")], return_tensors="pt", **options
        )
        return _side_by_side(
            self._network.model.get_image_features(seen["pixel_values"], seen["image_grid_thw"])
        )

    @torch.no_grad()
    def video_rows(self, patches: torch.Tensor, grid: Sequence[int]) -> torch.Tensor:
        """Return the rows of a video's patches `[t*h*w, elements]`."""
        return _side_by_side(self._network.model.get_video_features(patches, torch.tensor([list(grid)])))


def _side_by_side(out: Any) -> torch.Tensor:
    levels = [torch.cat(list(out.pooler_output))]
    levels += [
        torch.cat(list(level)) if isinstance(level, (tuple, list)) else level
        for level in (getattr(out, "deepstack_features", None) or ())
    ]
    return torch.cat(levels, dim=1)


def new_id() -> str:
    """Return a transfer id as a proxy makes it."""
    return uuid.uuid4().hex
