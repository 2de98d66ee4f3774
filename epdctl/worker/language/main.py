"""`epdctl worker prefill-decode`: builds the worker from its settings and runs it.

Rules of this file: what can be wrong with the command line is found before anything slow is started.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import uvloop

from epdctl.config import EXIT_FAILED, usage_error
from epdctl.config.language import EcConsumerSettings, PrefillDecodeSettings
from epdctl.domain import Role
from epdctl.logs import configure_logs
from epdctl.metrics import WorkerMetrics
from epdctl.worker.announce import Announcement, NoAddress, SelfRegistration, advertised_url
from epdctl.worker.engine import StartFailed
from epdctl.worker.language.api import add_language_routes
from epdctl.worker.language.checkpoint import UnsupportedCheckpoint, declared_max_positions, find_checkpoint
from epdctl.worker.language.front import LanguageFront
from epdctl.worker.language.messages import LanguageEngineSettings
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

ENGINE_MODULE = "epdctl.worker.language.engine"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Where the worker is: its files, its listening socket, and what others are told."""

    folder: Path
    listener: socket.socket
    url: str
    ec_ip: str
    ec_host: str


def run_prefill_decode(settings: PrefillDecodeSettings) -> int:
    """Run a prefill_decode worker until it is told to stop; return the exit code."""
    return run(settings, Role.PREFILL_DECODE)


def run(settings: EcConsumerSettings, role: Role) -> int:
    """Run a language worker in `role`."""
    prog = f"epdctl worker {role.value.replace('_', '-')}"
    configure_logs(settings.log_format, settings.log_level)
    try:
        place = _find_place(settings)
    except UnsupportedCheckpoint as error:
        return _failed(prog, f"--model {error}")
    except NoAddress as error:
        usage_error(prog, str(error))
    except OSError as error:
        where = f"--host {settings.host} --port {settings.port}"
        return _failed(prog, f"{where}: cannot listen there ({error.strerror})")
    return uvloop.run(_serve(settings, role, place))


def _failed(prog: str, reason: str) -> int:
    print(f"{prog}: {reason}", file=sys.stderr)  # noqa: T201 - the log is not for a wrong command line
    return EXIT_FAILED


def _find_place(settings: EcConsumerSettings) -> _Place:
    folder = find_checkpoint(settings.model)
    listener = bind_socket(settings.host, settings.port)
    try:
        port = int(listener.getsockname()[1])
        url = advertised_url(settings.host, port, settings.advertise_url, settings.register_url)
    except NoAddress:
        listener.close()
        raise
    ec_ip = settings.ec_ip or urlsplit(url).hostname or "127.0.0.1"
    return _Place(
        folder=folder,
        listener=listener,
        url=url,
        ec_ip=ec_ip,
        ec_host=settings.ec_advertise_host or ec_ip,
    )


async def _serve(settings: EcConsumerSettings, role: Role, place: _Place) -> int:
    metrics = WorkerMetrics()
    async with worker_sockets() as (context, directory):
        engines = [Supervisor(spec, context, directory) for spec in _engine_specs(settings, place)]
        front = LanguageFront(
            str(place.folder),
            settings.model_name,
            engines,
            max_model_len=settings.max_model_len,
            in_flight=metrics.in_flight.labels("decode"),
        )
        edge = WorkerEdge(
            model_name=settings.model_name,
            model_root=settings.model,
            max_model_len=settings.max_model_len or declared_max_positions(place.folder),
            engines=engines,
            metrics=metrics,
            in_flight=InFlight(),
            trouble=front.trouble,
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


def _engine_specs(settings: EcConsumerSettings, place: _Place) -> Sequence[EngineSpec]:
    return [
        EngineSpec(
            name=f"language-{replica}",
            module=ENGINE_MODULE,
            settings=msgspec.to_builtins(_engine_settings(settings, place, replica)),
            log_format=settings.log_format,
            log_level=settings.log_level,
        )
        for replica in range(settings.data_parallel_size)
    ]


def _engine_settings(settings: EcConsumerSettings, place: _Place, replica: int) -> LanguageEngineSettings:
    return LanguageEngineSettings(
        model=str(place.folder),
        dtype=settings.dtype,
        device=settings.device,
        threads=settings.threads,
        step_tokens=settings.max_batch_tokens,
        sequences=settings.max_batch_items,
        waiting=settings.queue_size,
        kv_bytes=settings.kv_bytes,
        ec_ip=place.ec_ip,
        ec_port=settings.ec_port + replica,
        ec_host=place.ec_host,
        ec_buffer_bytes=settings.ec_buffer_bytes,
        mooncake_protocol=settings.mooncake_protocol,
        mooncake_ports=settings.mooncake_port_range,
        push_wait_s=settings.push_wait_timeout,
    )


def _announcer(settings: EcConsumerSettings, role: Role, place: _Place) -> SelfRegistration | None:
    if settings.register_url is None:
        return None
    host = f"[{place.ec_host}]" if ":" in place.ec_host else place.ec_host
    ports = range(settings.ec_port, settings.ec_port + settings.data_parallel_size)
    key = settings.admin_api_key
    return SelfRegistration(
        Announcement(
            registry_url=settings.register_url,
            url=place.url,
            role=role,
            api_key=key.get_secret_value() if key else None,
            model=settings.model_name,
            dp_size=settings.data_parallel_size,
            ec_zmq_addrs=tuple(f"tcp://{host}:{port}" for port in ports),
        )
    )
