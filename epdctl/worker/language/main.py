"""`epdctl worker prefill-decode`, `prefill` and `decode`: builds the worker from its settings and runs it.

Rules of this file: what can be wrong with the command line is found before anything slow is started.
"""

from __future__ import annotations

import contextlib
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import uvloop

from epdctl.config import EXIT_FAILED, usage_error
from epdctl.config.language import (
    DecodeSettings,
    EcConsumerSettings,
    LanguageSettings,
    PrefillDecodeSettings,
    PrefillSettings,
)
from epdctl.domain import Role, Stage
from epdctl.logs import configure_logs
from epdctl.metrics import WorkerMetrics
from epdctl.worker.announce import Announcement, NoAddress, SelfRegistration, advertised_url
from epdctl.worker.claim import claim_addresses
from epdctl.worker.engine import StartFailed
from epdctl.worker.free_memory import check_memory
from epdctl.worker.language.api import add_language_routes
from epdctl.worker.language.checkpoint import UnsupportedCheckpoint, declared_max_positions, find_checkpoint
from epdctl.worker.language.front import LanguageFront
from epdctl.worker.language.messages import EcEnd, KvReceiveEnd, KvSendEnd, LanguageEngineSettings
from epdctl.worker.leave import leave
from epdctl.worker.open_files import check_open_files
from epdctl.worker.server import (
    InFlight,
    WorkerEdge,
    WorkerRun,
    bind_socket,
    build_app,
    run_worker,
    worker_sockets,
)
from epdctl.worker.supervisor import EngineSpec, Supervisor
from epdctl.worker.transport import check_transport

ENGINE_MODULE = "epdctl.worker.language.engine"
KV_CONNECTOR = "nixl"
"""The label that tells a proxy how our KV parameters travel: prefill answers with them, decode gets them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Where the worker is: its files, its listening socket, its URL, and the host that its sockets are on."""

    folder: Path
    listener: socket.socket
    url: str

    @property
    def host(self) -> str:
        return urlsplit(self.url).hostname or "127.0.0.1"


def run_prefill_decode(settings: PrefillDecodeSettings) -> int:
    """Run a prefill_decode worker until it is told to stop; return the exit code."""
    return _run(settings, Role.PREFILL_DECODE)


def run_prefill(settings: PrefillSettings) -> int:
    """Run a prefill worker until it is told to stop; return the exit code."""
    return _run(settings, Role.PREFILL)


def run_decode(settings: DecodeSettings) -> int:
    """Run a decode worker until it is told to stop; return the exit code."""
    return _run(settings, Role.DECODE)


def _run(settings: LanguageSettings, role: Role) -> int:
    prog = f"epdctl worker {role.value.replace('_', '-')}"
    configure_logs(settings.log_format, settings.log_level)
    try:
        transport = check_transport(
            settings.mooncake_protocol, settings.mooncake_devices, settings.engine_environment()
        )
        check_open_files(settings.data_parallel_size)
        check_memory(_memory(settings), times=settings.data_parallel_size)
        place = _find_place(settings)
    except StartFailed as error:
        return _failed(prog, str(error))
    except UnsupportedCheckpoint as error:
        return _failed(prog, f"--model {error}")
    except NoAddress as error:
        usage_error(prog, str(error))
    except OSError as error:
        where = f"--host {settings.host} --port {settings.port}"
        return _failed(prog, f"{where}: cannot listen there ({error.strerror})")
    claims: list[socket.socket] = []
    if isinstance(settings, EcConsumerSettings):
        end = settings.ec_ip or place.host
        try:
            claims = claim_addresses(end, _ec_ports(settings))
        except OSError as error:
            return _failed(prog, f"--ec-ip {end} --ec-port {settings.ec_port}: {error.strerror}")
    with contextlib.ExitStack() as held:
        for claim in claims:
            held.enter_context(claim)
        return leave(uvloop.run(_serve(settings, role, place, transport)))


def _memory(settings: LanguageSettings) -> list[tuple[str, int]]:
    """Return what each replica takes of the host's memory, by flag."""
    wanted = (
        [("--ec-buffer-bytes", settings.ec_buffer_bytes)] if isinstance(settings, EcConsumerSettings) else []
    )
    if settings.device.partition(":")[0] == "cpu":
        wanted.insert(0, ("--kv-bytes", settings.kv_bytes))
    return wanted


def _failed(prog: str, reason: str) -> int:
    print(f"{prog}: {reason}", file=sys.stderr)  # noqa: T201 - the log is not for a wrong command line
    return EXIT_FAILED


def _find_place(settings: LanguageSettings) -> _Place:
    folder = find_checkpoint(settings.model)
    listener = bind_socket(settings.host, settings.port)
    try:
        port = int(listener.getsockname()[1])
        url = advertised_url(settings.host, port, settings.advertise_url, settings.register_url)
    except NoAddress:
        listener.close()
        raise
    return _Place(folder=folder, listener=listener, url=url)


async def _serve(settings: LanguageSettings, role: Role, place: _Place, transport: str) -> int:
    metrics = WorkerMetrics()
    stage = Stage.PREFILL if role is Role.PREFILL else Stage.DECODE
    async with worker_sockets() as (context, directory):
        engines = [
            Supervisor(_engine_spec(settings, place, replica), context, directory)
            for replica in range(settings.data_parallel_size)
        ]
        front = LanguageFront(
            str(place.folder),
            settings.model_name,
            role,
            engines,
            max_model_len=settings.max_model_len,
            default_max_tokens=settings.default_max_tokens,
            kv_bytes=settings.kv_bytes,
            in_flight=metrics.in_flight.labels(stage.value),
        )
        edge = WorkerEdge(
            model_name=settings.model_name,
            model_root=settings.model,
            max_model_len=settings.max_model_len or declared_max_positions(place.folder),
            engines=engines,
            metrics=metrics,
            in_flight=InFlight(),
            trouble=front.trouble,
            loads=front.loads,
            transport=transport,
        )
        app = build_app(edge, role.value, settings.max_body_bytes)
        add_language_routes(app, front, model=settings.model_name, draining=lambda: edge.in_flight.draining)
        worker = WorkerRun(
            app=app,
            listener=place.listener,
            edge=edge,
            announcer=_announcer(settings, role, place),
            grace_s=settings.shutdown_grace,
            prepare=lambda: _prepare(front, settings.dtype),
        )
        try:
            return await run_worker(worker)
        finally:
            front.close()


async def _prepare(front: LanguageFront, dtype: str) -> None:
    try:
        await front.start(dtype)
    except UnsupportedCheckpoint as error:
        raise StartFailed(f"--model {error}") from error


def _engine_spec(settings: LanguageSettings, place: _Place, replica: int) -> EngineSpec:
    engine = LanguageEngineSettings(
        model=str(place.folder),
        dtype=settings.dtype,
        device=settings.device,
        threads=settings.threads,
        step_tokens=settings.max_batch_tokens,
        sequences=settings.max_batch_items,
        waiting=settings.queue_size,
        kv_bytes=settings.kv_bytes,
        advertise_host=_transfer_host(settings, place),
        mooncake_protocol=settings.mooncake_protocol,
        mooncake_devices=",".join(settings.mooncake_devices),
        mooncake_ports=settings.mooncake_port_range,
        ec=_ec_end(settings, place, replica),
        kv_send=_kv_send_end(settings, place, replica),
        kv_receive=KvReceiveEnd(wait_s=settings.kv_wait_timeout)
        if isinstance(settings, DecodeSettings)
        else None,
    )
    return EngineSpec(
        name=f"language-{replica}",
        module=ENGINE_MODULE,
        settings=msgspec.to_builtins(engine),
        log_format=settings.log_format,
        log_level=settings.log_level,
    )


def _transfer_host(settings: LanguageSettings, place: _Place) -> str:
    """Return the host under which peers reach Mooncake and the control sockets."""
    if isinstance(settings, EcConsumerSettings):
        return settings.ec_advertise_host or settings.ec_ip or place.host
    return place.host


def _ec_end(settings: LanguageSettings, place: _Place, replica: int) -> EcEnd | None:
    if not isinstance(settings, EcConsumerSettings):
        return None
    return EcEnd(
        ip=settings.ec_ip or place.host,
        port=settings.ec_port + replica,
        buffer_bytes=settings.ec_buffer_bytes,
        push_wait_s=settings.push_wait_timeout,
    )


def _kv_send_end(settings: LanguageSettings, place: _Place, replica: int) -> KvSendEnd | None:
    if not isinstance(settings, PrefillSettings):
        return None
    return KvSendEnd(
        ip=settings.kv_ip or place.host,
        port=settings.kv_port + replica if settings.kv_port else 0,
        lease_s=settings.kv_lease,
    )


def _announcer(settings: LanguageSettings, role: Role, place: _Place) -> SelfRegistration | None:
    if settings.register_url is None:
        return None
    key = settings.admin_api_key
    return SelfRegistration(
        Announcement(
            registry_url=settings.register_url,
            url=place.url,
            role=role,
            api_key=key.get_secret_value() if key else None,
            model=settings.model_name,
            dp_size=settings.data_parallel_size,
            ec_zmq_addrs=_ec_addresses(settings, place),
            labels={} if role is Role.PREFILL_DECODE else {"kv_connector": KV_CONNECTOR},
        )
    )


def _ec_addresses(settings: LanguageSettings, place: _Place) -> tuple[str, ...]:
    if not isinstance(settings, EcConsumerSettings):
        return ()
    host = _transfer_host(settings, place)
    bracketed = f"[{host}]" if ":" in host else host
    return tuple(f"tcp://{bracketed}:{port}" for port in _ec_ports(settings))


def _ec_ports(settings: EcConsumerSettings) -> range:
    return range(settings.ec_port, settings.ec_port + settings.data_parallel_size)
