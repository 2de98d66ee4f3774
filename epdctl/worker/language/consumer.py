"""A replica's receiving end of embeddings: memory registered with Mooncake, and the control socket.

Rules of this file: what cannot be opened is a StartFailed that names the flag.
"""

from __future__ import annotations

from epdctl.metrics import WorkerMetrics
from epdctl.worker.engine import StartFailed
from epdctl.worker.language.messages import EcEnd
from epdctl.worker.language.spec import ModelSpec
from epdctl.worker.transfer.memory import HostMemory
from epdctl.worker.transfer.mooncake import TransferEngine, TransferSetupFailed
from epdctl.worker.transfer.ports import TransferRecord
from epdctl.worker.transfer.receiver import Receiver, ReceiverSettings
from epdctl.worker.transfer.tensors import TensorContract


class EcConsumer:
    """An open EC consumer; `receiver` hands out what was pushed."""

    def __init__(self, receiver: Receiver, memory: HostMemory, metrics: WorkerMetrics) -> None:
        self.receiver = receiver
        self._memory = memory
        for state in receiver.stats().arena_bytes:
            gauge = metrics.arena_bytes.labels(state)
            gauge.set_function(lambda state=state: receiver.stats().arena_bytes[state])  # type: ignore[misc]

    @classmethod
    def open(cls, end: EcEnd, spec: ModelSpec, engine: TransferEngine, metrics: WorkerMetrics) -> EcConsumer:
        """Register memory and bind the control socket (inside the event loop); raises StartFailed."""
        try:
            memory = HostMemory(end.buffer_bytes)
            engine.register(memory.address, memory.nbytes)
        except (OSError, OverflowError, TransferSetupFailed) as error:
            raise StartFailed(f"--ec-buffer-bytes {end.buffer_bytes}: {error}") from error
        receiver = Receiver(
            ReceiverSettings(
                host=end.ip,
                port=end.port,
                contract=TensorContract(dtype=spec.dtype, widths=frozenset({spec.embedding_width})),
            ),
            memory=memory,
            session=engine.session,
            observe=lambda record: _count(metrics, record),
        )
        try:
            receiver.start()
        except OSError as error:
            raise StartFailed(f"--ec-ip {end.ip} --ec-port {end.port}: {error}") from error
        return cls(receiver, memory, metrics)

    async def close(self) -> None:
        """Stop answering. Close Mooncake next: only that keeps late writes out of the memory."""
        await self.receiver.close()

    def free(self) -> None:
        """Unmap the memory; nothing can write to it any more."""
        self._memory.close()


def _count(metrics: WorkerMetrics, record: TransferRecord) -> None:
    metrics.ec_transfers.labels(record.side.value, record.outcome.value).inc()
    metrics.ec_bytes.labels(record.side.value).inc(record.nbytes)
    metrics.ec_seconds.labels(record.side.value).observe(record.seconds)
