"""The producer's end of EC transfer, opened for an encode engine: Mooncake over the arena, and the sender.

Rules of this file: transfer's start-up failures become the engine's; how each transfer ended is counted here.
"""

from __future__ import annotations

from dataclasses import dataclass

from epdctl.metrics import WorkerMetrics
from epdctl.worker.encode.messages import EncodeEngineSettings
from epdctl.worker.engine import StartFailed
from epdctl.worker.transfer.memory import HostMemory
from epdctl.worker.transfer.mooncake import TransferEngine, TransferSetupFailed
from epdctl.worker.transfer.ports import RecordSink, TransferOutcome, TransferRecord
from epdctl.worker.transfer.push_steps import PushPolicy
from epdctl.worker.transfer.sender import Sender


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodeTransfer:
    """An open producer: `session` is its Mooncake address, `pusher` delivers what lies in the arena."""

    session: str
    pusher: Sender
    engine: TransferEngine

    async def close(self) -> None:
        """Give up what is under way, then stop Mooncake (about a second)."""
        await self.pusher.close()
        await self.engine.close()


async def open_transfer(
    settings: EncodeEngineSettings, memory: HostMemory, metrics: WorkerMetrics
) -> EncodeTransfer:
    """Start Mooncake on `settings.host`, register `memory` once, and return the open producer.

    Raises:
        StartFailed: Mooncake is missing, cannot listen, or refuses the memory.
    """
    try:
        engine = TransferEngine(host=settings.host, protocol=settings.mooncake_protocol)
        engine.register(memory.address, memory.nbytes)
    except TransferSetupFailed as error:
        raise StartFailed(str(error)) from error
    policy = PushPolicy(deadline_s=settings.transfer_timeout_s)
    return EncodeTransfer(
        session=engine.session,
        pusher=Sender(engine, policy=policy, observe=record_sink(metrics)),
        engine=engine,
    )


def record_sink(metrics: WorkerMetrics) -> RecordSink:
    """Return the function that counts each ended transfer in `metrics`."""

    def count(record: TransferRecord) -> None:
        side = record.side.value
        metrics.ec_transfers.labels(side, record.outcome.value).inc()
        metrics.ec_bytes.labels(side).inc(record.nbytes)
        if record.outcome in (TransferOutcome.DELIVERED, TransferOutcome.CACHED):
            metrics.ec_seconds.labels(side).observe(record.seconds)

    return count
