"""The producer's end of EC transfer, opened for an encode engine: Mooncake on the arena, or a shared folder.

Rules of this file: transfer's start-up failures become the engine's; how each transfer ended is counted here.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

from epdctl.errors import StorageFull, StorageUnavailable
from epdctl.metrics import WorkerMetrics
from epdctl.worker.encode.messages import EncodeEngineSettings
from epdctl.worker.engine import StartFailed
from epdctl.worker.transfer.file_pusher import FilePusher
from epdctl.worker.transfer.memory import HostMemory
from epdctl.worker.transfer.mooncake import TransferEngine, TransferSetupFailed
from epdctl.worker.transfer.ports import RecordSink, TransferOutcome, TransferRecord
from epdctl.worker.transfer.push_steps import PushPolicy
from epdctl.worker.transfer.sender import Sender
from epdctl.worker.transfer.shared_folder import SharedFolder, this_machine


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodeTransfer:
    """An open producer: `pusher` delivers what lies in the arena; `session` is its Mooncake address, or "".

    Without Mooncake `engine` is None and `pusher` writes into a shared folder.
    """

    session: str
    pusher: Sender | FilePusher
    engine: TransferEngine | None

    def trouble(self) -> str | None:
        """Return why nothing can be delivered to anybody now, or None."""
        return self.pusher.trouble() if isinstance(self.pusher, FilePusher) else None

    async def close(self) -> None:
        """Give up what is under way, then stop Mooncake (about a second)."""
        await self.pusher.close()
        if self.engine is not None:
            await self.engine.close()


async def open_transfer(
    settings: EncodeEngineSettings, memory: HostMemory, metrics: WorkerMetrics
) -> EncodeTransfer:
    """Start Mooncake on `settings.host` and register `memory` once, or open the shared folder.

    Raises:
        StartFailed: Mooncake is missing, cannot listen, or refuses the memory; or the folder takes no files.
    """
    if settings.shared_storage_path is not None:
        return await _open_folder(settings, Path(settings.shared_storage_path), metrics)
    try:
        engine = TransferEngine(
            host=settings.host, protocol=settings.mooncake_protocol, devices=settings.mooncake_devices
        )
        engine.register(memory.address, memory.nbytes)
    except TransferSetupFailed as error:
        raise StartFailed(str(error)) from error
    policy = PushPolicy(deadline_s=settings.transfer_timeout_s)
    return EncodeTransfer(
        session=engine.session,
        pusher=Sender(engine, policy=policy, observe=record_sink(metrics)),
        engine=engine,
    )


async def _open_folder(settings: EncodeEngineSettings, path: Path, metrics: WorkerMetrics) -> EncodeTransfer:
    folder = SharedFolder(path, machine=this_machine())
    try:
        await asyncio.to_thread(folder.open)
    except (StorageFull, StorageUnavailable) as error:
        raise StartFailed(f"--shared-storage-path {path}: {error.message}") from error
    pusher = FilePusher(folder, observe=record_sink(metrics), deadline_s=settings.transfer_timeout_s)
    return EncodeTransfer(session="", pusher=pusher, engine=None)


def record_sink(metrics: WorkerMetrics) -> RecordSink:
    """Return the function that counts each ended transfer in `metrics`."""

    def count(record: TransferRecord) -> None:
        side = record.side.value
        metrics.ec_transfers.labels(side, record.outcome.value).inc()
        metrics.ec_bytes.labels(side).inc(record.nbytes)
        if record.outcome in (TransferOutcome.DELIVERED, TransferOutcome.CACHED):
            metrics.ec_seconds.labels(side).observe(record.seconds)

    return count
