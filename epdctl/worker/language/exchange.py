"""An engine's ends of embedding transfers and KV hand-overs, all on one Mooncake engine.

A prefill_decode engine receives embeddings; a prefill engine does that too and hands KV over; a decode engine
takes KV.

Rules of this file: what is opened is closed in the other order; what cannot be opened is a StartFailed that
names the flag.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import structlog

from epdctl.metrics import WorkerMetrics
from epdctl.worker.engine import StartFailed
from epdctl.worker.language.consumer import EcConsumer
from epdctl.worker.language.kv import KvPool, KvRegion
from epdctl.worker.language.kv_import import ImportEvents, KvImporter
from epdctl.worker.language.kv_messages import KvTicket
from epdctl.worker.language.kv_server import KvServer, KvServerSettings
from epdctl.worker.language.messages import KvSendEnd, LanguageEngineSettings
from epdctl.worker.language.spec import ModelSpec
from epdctl.worker.transfer.environment import mooncake_environment, writes_to_ipv6
from epdctl.worker.transfer.mooncake import TransferEngine, TransferSetupFailed


class Exchange:
    """Everything of an engine that other processes reach."""

    def __init__(
        self,
        engine: TransferEngine,
        consumer: EcConsumer | None,
        server: KvServer | None,
        importer: KvImporter | None,
    ) -> None:
        self._engine = engine
        self.consumer = consumer
        self._server = server
        self._importer = importer

    @classmethod
    def open(
        cls,
        settings: LanguageEngineSettings,
        spec: ModelSpec,
        pool: KvPool,
        events: ImportEvents,
        metrics: WorkerMetrics,
    ) -> Exchange:
        """Open the ends that the settings name (inside the event loop); raises StartFailed."""
        engine = _open_mooncake(settings)
        consumer = server = importer = None
        if settings.ec is not None:
            consumer = EcConsumer.open(settings.ec, spec, engine, metrics)
        if settings.kv_send is not None or settings.kv_receive is not None:
            _register(engine, pool)
        if settings.kv_send is not None:
            server = _open_server(settings.kv_send, settings.advertise_host, spec, pool, engine, metrics)
        if settings.kv_receive is not None:
            wait_s = settings.kv_receive.wait_s
            importer = KvImporter(spec, pool, engine.session, events, metrics, wait_s=wait_s)
        return cls(engine, consumer, server, importer)

    @property
    def ec_address(self) -> str | None:
        """The control address that encoders are given, if embeddings are received."""
        return None if self.consumer is None else self.consumer.receiver.consumer_zmq

    @property
    def held(self) -> int:
        """Finished prompts that a decode may still come for."""
        return 0 if self._server is None else len(self._server)

    def hold(self, request_id: str, region: KvRegion, token_ids: Sequence[int]) -> KvTicket:
        """Keep a finished prompt's KV; return the ticket for it."""
        assert self._server is not None, "only a prefill engine holds KV"
        return self._server.hold(request_id, region, token_ids)

    def release(self, request_id: str) -> None:
        """Let go of KV that was kept for a request, if any is left."""
        if self._server is not None:
            self._server.release(request_id)

    def begin(self, request_id: str, region: KvRegion, ticket: KvTicket) -> None:
        """Have a prompt's KV written to `region`."""
        assert self._importer is not None, "only a decode engine takes KV"
        self._importer.begin(request_id, region, ticket)

    def cancel(self, request_id: str) -> bool:
        """Give that up; False when it has ended."""
        return self._importer is not None and self._importer.cancel(request_id)

    def give_up(self, ticket: KvTicket) -> None:
        """Tell a prefill that its KV will not be fetched."""
        if self._importer is not None:
            self._importer.give_up(ticket)

    async def close(self) -> None:
        """Stop answering and writing, then fence late writes off by closing Mooncake."""
        for end in (self._importer, self._server, self.consumer):
            if end is not None:
                await end.close()
        await self._engine.close()
        if self.consumer is not None:
            self.consumer.free()


def _open_mooncake(settings: LanguageEngineSettings) -> TransferEngine:
    # Mooncake reads its settings from the environment when it is imported.
    os.environ.update(
        mooncake_environment(
            os.environ,
            protocol=settings.mooncake_protocol,
            host=settings.advertise_host,
            ports=settings.mooncake_ports,
        )
    )
    try:
        engine = TransferEngine(
            host=settings.advertise_host,
            protocol=settings.mooncake_protocol,
            devices=settings.mooncake_devices,
            ipv6=writes_to_ipv6(os.environ),
        )
    except TransferSetupFailed as error:
        raise StartFailed(str(error)) from error
    structlog.get_logger().info(
        "transfer_ready", transport=settings.mooncake_protocol, session=engine.session
    )
    return engine


def _register(engine: TransferEngine, pool: KvPool) -> None:
    try:
        engine.register(pool.address, pool.nbytes)
    except TransferSetupFailed as error:
        raise StartFailed(f"--kv-bytes {pool.nbytes}: {error}") from error


def _open_server(
    end: KvSendEnd,
    host: str,
    spec: ModelSpec,
    pool: KvPool,
    engine: TransferEngine,
    metrics: WorkerMetrics,
) -> KvServer:
    server = KvServer(
        KvServerSettings(ip=end.ip, port=end.port, host=host, lease_s=end.lease_s),
        spec,
        pool,
        engine,
        metrics,
    )
    try:
        server.start()
    except OSError as error:
        raise StartFailed(f"--kv-ip {end.ip} --kv-port {end.port}: {error.strerror}") from error
    return server
