"""`epdctl serve`: the object graph, and nothing else.

Rules of this file: objects are made here and handed down, top to bottom; what is started is stopped in the
opposite order. No decision, no protocol.
"""

from __future__ import annotations

import random
import ssl
import time
from collections.abc import AsyncIterator
from pathlib import Path

from aiohttp import web
from pydantic import SecretStr

from epdctl import garbage
from epdctl.config import EXIT_FAILED
from epdctl.config.serve import ServeSettings
from epdctl.health.api import HealthApi
from epdctl.health.loop import HealthLoop
from epdctl.health.prober import HttpProber
from epdctl.health.schedule import SchedulePolicy
from epdctl.health.verdict import VerdictPolicy
from epdctl.http_auth import AdminKey
from epdctl.http_errors import error_middleware
from epdctl.lifecycle import (
    CannotListen,
    LeavePolicy,
    Presence,
    announce_ready,
    bind_socket,
    keep_freed_memory,
    run_loop,
    say,
    serve_until_signal,
    url_of,
)
from epdctl.logs import configure_logs
from epdctl.metrics import ControlMetrics
from epdctl.proxy.api import add_proxy_routes
from epdctl.registry.api import InstancesApi
from epdctl.registry.driver import RegistryDriver
from epdctl.registry.registry import Registry, RegistryPolicy
from epdctl.registry.store import StoreFailed, make_store


def build_app(settings: ServeSettings, presence: Presence | None = None) -> web.Application:
    """Return the application of `epdctl serve`; its clean-up context starts and stops what it is made of.

    `presence` is the process's word on whether it is leaving; without one the application never leaves.
    """
    presence = presence or Presence()
    metrics = ControlMetrics()
    schedule = SchedulePolicy(interval_s=settings.probe_interval, timeout_s=settings.probe_timeout)
    store = make_store(settings.store_location())
    driver = RegistryDriver(Registry(_registry_policy(settings, schedule)), store, metrics, time.monotonic)
    prober = HttpProber(
        timeout_s=settings.probe_timeout,
        api_key=_reveal(settings.upstream_api_key),
        tls=_tls(settings.upstream_ca_file),
    )
    health = HealthLoop(driver, prober, schedule, settings.fail_threshold, metrics, random.random)

    async def live(app: web.Application) -> AsyncIterator[None]:
        try:
            await driver.start(settings.static_specs())
            await prober.open()
            health.start()
            yield
        finally:
            await health.close()
            await prober.close()
            await driver.close()

    app = web.Application(
        middlewares=[error_middleware, presence.middleware()], client_max_size=settings.max_body_bytes
    )
    app.cleanup_ctx.append(live)
    InstancesApi(
        driver,
        health.probe_now,
        AdminKey(_reveal(settings.admin_api_key)),
        accepts_registrations=settings.dynamic_registration,
        protect_reads=settings.protect_reads,
    ).add_routes(app)
    HealthApi(driver, metrics, presence.is_leaving).add_routes(app)
    add_proxy_routes(app, settings=settings, routing=driver, metrics=metrics)
    return app


def run(settings: ServeSettings) -> int:
    """Serve until a signal; return 0 after a polite end, 1 when serving could not begin or was cut short."""
    configure_logs(settings.log_format, "debug" if settings.log_requests else settings.log_level)
    keep_freed_memory()
    garbage.collect_seldom(garbage.PROXY)
    try:
        return run_loop(lambda: _serve(settings))
    except (CannotListen, StoreFailed) as error:
        say(f"epdctl serve: {error}")
        return EXIT_FAILED


async def _serve(settings: ServeSettings) -> int:
    listener = bind_socket(settings.host, settings.port)
    presence = Presence()
    policy = LeavePolicy(drain_delay_s=settings.drain_delay, shutdown_grace_s=settings.shutdown_grace)
    url = url_of(listener, settings.host)
    return await serve_until_signal(
        build_app(settings, presence),
        listener,
        presence,
        policy,
        lambda: announce_ready("epdctl serve", url, settings.log_format),
    )


def _registry_policy(settings: ServeSettings, schedule: SchedulePolicy) -> RegistryPolicy:
    return RegistryPolicy(
        verdict=VerdictPolicy(fail_threshold=settings.fail_threshold, rise_threshold=settings.rise_threshold),
        ttl_s=settings.evicted_ttl,
        window_s=schedule.window_s,
        result_s=schedule.result_s,
    )


def _reveal(secret: SecretStr | None) -> str | None:
    return None if secret is None else secret.get_secret_value()


def _tls(ca_file: Path | None) -> ssl.SSLContext | None:
    return None if ca_file is None else ssl.create_default_context(cafile=ca_file)
