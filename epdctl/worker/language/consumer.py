"""The engine's receiving end of embedding transfers: memory, Mooncake, control socket.

Rules of this file: what is opened is closed in the other order; what cannot be opened is a StartFailed that
names the flag.
"""

from __future__ import annotations

import os

from epdctl.metrics import WorkerMetrics
from epdctl.worker.engine import StartFailed
from epdctl.worker.language.checkpoint import ModelSpec
from epdctl.worker.language.messages import LanguageEngineSettings
from epdctl.worker.transfer.environment import mooncake_environment
from epdctl.worker.transfer.memory import HostMemory
from epdctl.worker.transfer.mooncake import TransferEngine, TransferSetupFailed
from epdctl.worker.transfer.ports import TransferRecord
from epdctl.worker.transfer.receiver import Receiver, ReceiverSettings
from epdctl.worker.transfer.tensors import TensorContract


class EcConsumer:
    """A replica's EC consumer; `receiver` hands out what was pushed."""

    def __init__(
        self, receiver: Receiver, engine: TransferEngine, memory: HostMemory, metrics: WorkerMetrics
    ) -> None:
        self.receiver = receiver
        self._engine = engine
        self._memory = memory
        self._metrics = metrics

    @classmethod
    def open(cls, settings: LanguageEngineSettings, spec: ModelSpec, metrics: WorkerMetrics) -> EcConsumer:
        """Open everything (inside the event loop); raises StartFailed."""
        os.environ.update(
            mooncake_environment(
                os.environ, protocol=settings.mooncake_protocol, ports=settings.mooncake_ports
            )
        )
        try:
            memory = HostMemory(settings.ec_buffer_bytes)
            engine = TransferEngine(host=settings.ec_host, protocol=settings.mooncake_protocol)
            engine.register(memory.address, memory.nbytes)
        except (OSError, TransferSetupFailed) as error:
            raise StartFailed(f"embeddings cannot be received: {error}") from error
        receiver = Receiver(
            ReceiverSettings(
                host=settings.ec_ip,
                port=settings.ec_port,
                contract=TensorContract(dtype=spec.dtype, widths=frozenset({spec.embedding_width})),
            ),
            memory=memory,
            session=engine.session,
            observe=lambda record: _count(metrics, record),
        )
        try:
            receiver.start()
        except OSError as error:
            raise StartFailed(f"--ec-ip {settings.ec_ip} --ec-port {settings.ec_port}: {error}") from error
        return cls(receiver, engine, memory, metrics)

    def show(self) -> None:
        """Bring the gauges up to date."""
        for state, nbytes in self.receiver.stats().arena_bytes.items():
            self._metrics.arena_bytes.labels(state).set(nbytes)

    async def close(self) -> None:
        """Stop answering, then close the engine: only that keeps late writes out of our memory."""
        await self.receiver.close()
        await self._engine.close()
        self._memory.close()


def _count(metrics: WorkerMetrics, record: TransferRecord) -> None:
    metrics.ec_transfers.labels(record.side.value, record.outcome.value).inc()
    metrics.ec_bytes.labels(record.side.value).inc(record.nbytes)
    metrics.ec_seconds.labels(record.side.value).observe(record.seconds)
