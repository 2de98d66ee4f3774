"""The producer's end of EC transfer, opened for an encode engine: Mooncake on the arena, or a shared folder.

Rules of this file: transfer's start-up failures become the engine's; how each transfer ended is counted here.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from pathlib import Path

import structlog

from epdctl.errors import StorageFull, StorageUnavailable
from epdctl.metrics import WorkerMetrics
from epdctl.worker.encode.arena_memory import ArenaMemory
from epdctl.worker.encode.messages import EncodeEngineSettings
from epdctl.worker.engine import StartFailed
from epdctl.worker.transfer.environment import writes_to_ipv6
from epdctl.worker.transfer.file_pusher import FilePusher
from epdctl.worker.transfer.mooncake import TransferEngine, TransferSetupFailed, find_wheel
from epdctl.worker.transfer.ports import RecordSink, TransferOutcome, TransferRecord
from epdctl.worker.transfer.push_steps import PushPolicy
from epdctl.worker.transfer.sender import Sender
from epdctl.worker.transfer.shared_folder import SharedFolder, this_machine

_CURE = "It takes epdctl[cuda12] or epdctl[cuda13], over RDMA also GPUDirect; or give --arena host"


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

    def is_suspect(self, consumer_zmq: str) -> bool:
        """Return whether a consumer has lately failed to answer, and not answered since."""
        return isinstance(self.pusher, Sender) and self.pusher.is_suspect(consumer_zmq)

    def is_held(self, consumer_zmq: str) -> bool:
        """Return whether a consumer is not to be asked now, since it has just failed to answer."""
        return isinstance(self.pusher, Sender) and self.pusher.is_held(consumer_zmq)

    async def close(self) -> None:
        """Give up what is under way, then stop Mooncake (about a second)."""
        await self.pusher.close()
        if self.engine is not None:
            await self.engine.close()


async def open_transfer(
    settings: EncodeEngineSettings, memory: ArenaMemory, metrics: WorkerMetrics
) -> EncodeTransfer:
    """Start Mooncake on `settings.host` and register `memory` once, or open the shared folder.

    Raises:
        StartFailed: Mooncake is missing, cannot listen, or refuses the memory; or the folder takes no files.
    """
    if settings.shared_storage_path is not None:
        return await _open_folder(settings, Path(settings.shared_storage_path), metrics)
    if settings.arena == "device":
        _check_wheel()
    try:
        engine = TransferEngine(
            host=settings.host,
            protocol=settings.mooncake_protocol,
            devices=settings.mooncake_devices,
            ipv6=writes_to_ipv6(os.environ),
        )
    except TransferSetupFailed as error:
        raise StartFailed(str(error)) from error
    try:
        engine.register(memory.address, memory.nbytes)
    except TransferSetupFailed as error:
        raise StartFailed(_refused(error) if settings.arena == "device" else str(error)) from error
    structlog.get_logger().info(
        "transfer_ready", transport=settings.mooncake_protocol, session=engine.session
    )
    policy = PushPolicy(deadline_s=settings.transfer_timeout_s)
    return EncodeTransfer(
        session=engine.session,
        pusher=Sender(engine, policy=policy, observe=record_sink(metrics)),
        engine=engine,
    )


def _check_wheel() -> None:
    """Refuse a build of Mooncake without CUDA, which registers any address and cannot read a GPU's."""
    wheel = find_wheel()
    if wheel is not None and not wheel.has_cuda:
        raise StartFailed(f"--arena device: {wheel} cannot read the memory of a GPU. {_CURE}")


def _refused(error: TransferSetupFailed) -> str:
    wheel = find_wheel() or "the Mooncake that is installed"
    return f"--arena device: {wheel} does not take memory of the device: {error}. {_CURE}"


async def _open_folder(settings: EncodeEngineSettings, path: Path, metrics: WorkerMetrics) -> EncodeTransfer:
    folder = SharedFolder(path, machine=this_machine())
    try:
        await asyncio.to_thread(folder.open)
    except (StorageFull, StorageUnavailable) as error:
        raise StartFailed(f"--shared-storage-path {path}: {error.message}") from error
    structlog.get_logger().info("transfer_ready", transport="shared-filesystem", folder=str(path))
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
