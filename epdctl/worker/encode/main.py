"""`epdctl worker encode`: builds the worker from its settings and runs it.

Rules of this file: what can be wrong with the command line is found before anything slow is started.
"""

from __future__ import annotations

import socket
import sys
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import uvloop

from epdctl.config import EXIT_FAILED, usage_error
from epdctl.config.worker import EncodeSettings
from epdctl.domain import Role
from epdctl.logs import configure_logs
from epdctl.metrics import WorkerMetrics
from epdctl.worker.announce import Announcement, NoAddress, SelfRegistration, advertised_url
from epdctl.worker.encode.api import add_encode_routes
from epdctl.worker.encode.checkpoint import find_checkpoint
from epdctl.worker.encode.engines import EncodeEngines
from epdctl.worker.encode.front import EncodeFront, FrontLimits
from epdctl.worker.encode.messages import EncodeEngineSettings, StoreSettings
from epdctl.worker.encode.options import PrepareLimits
from epdctl.worker.encode.reclaim import reclaim
from epdctl.worker.encode.without_torch import hide_torch
from epdctl.worker.engine import StartFailed
from epdctl.worker.free_memory import check_memory
from epdctl.worker.leave import leave
from epdctl.worker.media import MediaLimits
from epdctl.worker.media_address import FetchRules
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

PROG = "epdctl worker encode"
ENGINE_MODULE = "epdctl.worker.encode.engine"


def run(settings: EncodeSettings, *, engine_module: str = ENGINE_MODULE) -> int:
    """Run an encode worker until it is told to stop; end the process, or return the code of a bad start."""
    configure_logs(settings.log_format, settings.log_level)
    hide_torch()
    try:
        folder = find_checkpoint(settings.model)
        transport = _transport(settings)
        check_open_files(settings.data_parallel_size)
        check_memory(_memory(settings), times=settings.data_parallel_size)
        listener = bind_socket(settings.host, settings.port)
    except StartFailed as error:
        return _failed(str(error))
    except OSError as error:
        return _failed(
            f"--host {settings.host} --port {settings.port}: cannot listen there ({error.strerror})"
        )
    port = int(listener.getsockname()[1])
    try:
        url = advertised_url(settings.host, port, settings.advertise_url, settings.register_url)
    except NoAddress as error:
        listener.close()
        usage_error(PROG, str(error))
    return leave(uvloop.run(_serve(settings, folder, listener, url, engine_module, transport)))


def _transport(settings: EncodeSettings) -> str:
    """Return what carries embeddings; raises StartFailed when Mooncake would take something else."""
    is_folder = settings.shared_storage_path is not None
    if is_folder and settings.mooncake_store is None:
        return settings.ec_connector
    transport = check_transport(
        settings.mooncake_protocol, settings.mooncake_devices, settings.engine_environment()
    )
    return settings.ec_connector if is_folder else transport


def _memory(settings: EncodeSettings) -> list[tuple[str, int]]:
    """Return what each engine takes of the host's memory, by flag."""
    wanted = [("--cache-dram-bytes", settings.cache_dram_bytes)]
    if settings.arena == "host":
        wanted.insert(0, ("--cache-bytes", settings.cache_bytes))
    if settings.mooncake_store is not None:
        wanted.append(("--mooncake-store-segment-bytes", settings.mooncake_store_segment_bytes))
        wanted.append(("--mooncake-store-buffer-bytes", settings.mooncake_store_buffer_bytes))
    return wanted


def _failed(reason: str) -> int:
    print(f"{PROG}: {reason}", file=sys.stderr)  # noqa: T201 - the log is not for a wrong command line
    return EXIT_FAILED


async def _serve(
    settings: EncodeSettings,
    folder: Path,
    listener: socket.socket,
    url: str,
    engine_module: str,
    transport: str,
) -> int:
    metrics = WorkerMetrics()
    async with worker_sockets() as (context, directory):
        supervisors = [
            Supervisor(_engine_spec(settings, folder, url, engine_module, number), context, directory)
            for number in range(settings.data_parallel_size)
        ]
        engines = EncodeEngines(supervisors, metrics)
        front = EncodeFront(
            model=settings.model_name,
            model_id=settings.model,
            engines=engines,
            reclaim=partial(reclaim, context),
            limits=_front_limits(settings),
            media=_media_limits(settings),
            metrics=metrics,
        )
        edge = WorkerEdge(
            model_name=settings.model_name,
            model_root=settings.model,
            max_model_len=None,
            engines=supervisors,
            metrics=metrics,
            in_flight=InFlight(),
            trouble=front.trouble,
            loads=engines.loads,
            transport=transport,
            one_engine_is_enough=True,
        )
        app = build_app(edge, Role.ENCODE.value, settings.max_body_bytes)
        add_encode_routes(app, front, settings.model_name)
        worker = WorkerRun(
            app=app,
            listener=listener,
            edge=edge,
            announcer=_announcer(settings, url),
            grace_s=settings.shutdown_grace,
            prepare=lambda: front.start(folder),
        )
        try:
            return await run_worker(worker)
        finally:
            await front.close()


def _engine_spec(settings: EncodeSettings, folder: Path, url: str, module: str, number: int) -> EngineSpec:
    engine = EncodeEngineSettings(
        folder=str(folder),
        dtype=settings.dtype,
        device=settings.engine_devices[number],
        threads=settings.threads,
        compile=settings.compile,
        arena=settings.arena,
        cache_bytes=settings.cache_bytes,
        max_batch_tokens=settings.max_batch_tokens,
        max_batch_items=settings.max_batch_items,
        max_asked=2 * settings.media_threads,
        max_pending_pixel_bytes=256 * 1024 * 1024,
        reply_after=settings.reply_after,
        shared_storage_path=str(settings.shared_storage_path.resolve())
        if settings.shared_storage_path
        else None,
        host=urlsplit(url).hostname or "127.0.0.1",
        mooncake_protocol=settings.mooncake_protocol,
        mooncake_devices=",".join(settings.mooncake_devices),
        transfer_timeout_s=settings.transfer_timeout,
        cache_dram_bytes=settings.cache_dram_bytes,
        store=_store(settings),
    )
    return EngineSpec(
        name=f"encode-{number}",
        module=module,
        settings=msgspec.to_builtins(engine),
        environment=settings.engine_environment(engine.host),
        log_format=settings.log_format,
        log_level=settings.log_level,
    )


def _store(settings: EncodeSettings) -> StoreSettings | None:
    if settings.mooncake_store is None:
        return None
    return StoreSettings(
        address=settings.mooncake_store,
        segment_bytes=settings.mooncake_store_segment_bytes,
        buffer_bytes=settings.mooncake_store_buffer_bytes,
        timeout_s=settings.mooncake_store_timeout,
    )


def _front_limits(settings: EncodeSettings) -> FrontLimits:
    return FrontLimits(
        max_items=settings.max_items,
        queue_items=settings.queue_items,
        media_threads=settings.media_threads,
        media_memory_bytes=settings.media_memory_bytes,
        prepare=PrepareLimits(
            max_pixels=settings.max_image_pixels,
            max_rows=settings.max_item_tokens,
            max_video_frames=settings.max_video_frames,
            max_video_pixels=settings.max_video_pixels,
            video_timeout_s=settings.video_timeout,
        ),
        is_shared_folder=settings.shared_storage_path is not None,
    )


def _media_limits(settings: EncodeSettings) -> MediaLimits:
    return MediaLimits(
        max_bytes=settings.max_media_bytes,
        timeout_s=settings.media_timeout,
        max_redirects=settings.media_redirects,
        rules=FetchRules(allowed_hosts=settings.allowed_media_domains),
        local_path=settings.allowed_local_media_path,
    )


def _announcer(settings: EncodeSettings, url: str) -> SelfRegistration | None:
    if settings.register_url is None:
        return None
    key = settings.admin_api_key
    return SelfRegistration(
        Announcement(
            registry_url=settings.register_url,
            url=url,
            role=Role.ENCODE,
            api_key=key.get_secret_value() if key else None,
            model=settings.model_name,
        )
    )
