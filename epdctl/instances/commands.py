"""The commands `epdctl instances …`: call, wait, print.

Rules of this file: data goes to stdout, words about progress and failures to stderr; exit code 0 when the
proxy did what was asked, 1 when not. What may take long says so every few seconds.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, TypeVar

from epdctl.config import EXIT_FAILED, EXIT_OK
from epdctl.config.client import (
    DrainSettings,
    ListSettings,
    ProxySettings,
    RegisterSettings,
    RemoveSettings,
    ShowSettings,
)
from epdctl.instances.client import AdminClient, ProxyUnreachable, Refused
from epdctl.instances.table import find_instance, render_instance, render_list
from epdctl.wire import encode_json

T = TypeVar("T")

_PROGRESS_EVERY_S = 5.0
_POLL_EVERY_S = 0.25


def list_instances(settings: ListSettings) -> int:
    """`epdctl instances list`."""

    async def work(client: AdminClient) -> int:
        detail = await client.detail()
        _print(settings, detail, lambda: render_list(detail, time.time()))
        return EXIT_OK

    return _run(settings, work)


def show(settings: ShowSettings) -> int:
    """`epdctl instances show`."""

    async def work(client: AdminClient) -> int:
        instance = find_instance(await client.detail(), settings.instance)
        if instance is None:
            return _fail(f"{settings.instance} is not registered")
        _print(settings, instance, lambda: render_instance(instance, time.time()))
        return EXIT_OK

    return _run(settings, work)


def register(settings: RegisterSettings) -> int:
    """`epdctl instances register`."""

    async def work(client: AdminClient) -> int:
        deadline = time.monotonic() + settings.wait_ready
        answer = await _with_progress(
            f"registering {settings.instance}", _register_by(client, settings, deadline)
        )
        ready = answer["state"] == "ready" or not settings.wait_ready
        if not ready:
            answer = answer | {"state": await _wait_ready(client, settings.instance, deadline)}
        _print(settings, answer, lambda: _registration_line(settings.instance, answer))
        if settings.wait_ready and answer["state"] != "ready":
            return _fail(f"{settings.instance} was not ready within {settings.wait_ready:g} s")
        return EXIT_OK

    return _run(settings, work)


async def _register_by(client: AdminClient, settings: RegisterSettings, deadline: float) -> dict[str, Any]:
    """Register; with `--wait-ready`, a proxy that does not answer yet is asked again until `deadline`."""
    while True:
        try:
            return await client.register(settings.registration())
        except ProxyUnreachable:
            if time.monotonic() + _POLL_EVERY_S >= deadline:
                raise
        await asyncio.sleep(_POLL_EVERY_S)


async def _wait_ready(client: AdminClient, url: str, deadline: float) -> str:
    """Return the instance's state once it is ready, or at `deadline`; Refused when it is gone."""

    async def poll() -> str:
        while True:
            instance = find_instance(await client.detail(), url)
            if instance is None:
                raise Refused(404, f"{url} was removed while it was waited for")
            if instance["state"] == "ready" or time.monotonic() + _POLL_EVERY_S >= deadline:
                return str(instance["state"])
            await asyncio.sleep(_POLL_EVERY_S)

    return await _with_progress(f"waiting for {url} to be ready", poll())


def _registration_line(url: str, answer: Mapping[str, Any]) -> str:
    word = (
        "registered" if answer["registered"] else "updated" if answer.get("updated") else "already registered"
    )
    return f"{url} {word}, {answer['state']}"


def remove(settings: RemoveSettings) -> int:
    """`epdctl instances remove`."""
    return _run(
        settings,
        lambda client: _leave(settings, settings.missing_ok, client.remove(settings.instance)),
    )


def drain(settings: DrainSettings) -> int:
    """`epdctl instances drain`."""

    async def work(client: AdminClient) -> int:
        call = client.drain(settings.instance, settings.timeout)
        return await _leave(
            settings, settings.missing_ok, _with_progress(f"draining {settings.instance}", call)
        )

    return _run(settings, work)


async def _leave(
    settings: RemoveSettings | DrainSettings, missing_ok: bool, call: Awaitable[dict[str, Any]]
) -> int:
    try:
        answer = await call
    except Refused as refusal:
        if refusal.status != 404:
            raise
        if not missing_ok:
            return _fail(f"{settings.instance} is not registered (--missing-ok makes this no failure)")
        answer = {"removed": False}
    _print(settings, answer, lambda: _departure_line(settings.instance, answer))
    return EXIT_OK


def _departure_line(url: str, answer: Mapping[str, Any]) -> str:
    if not answer["removed"]:
        return f"{url} was not registered"
    if answer.get("drained") is False:
        return f"{url} removed with {answer['in_flight']} requests still in flight (the timeout was over)"
    return f"{url} drained and removed" if "drained" in answer else f"{url} removed"


def _run(settings: ProxySettings, work: Callable[[AdminClient], Coroutine[Any, Any, int]]) -> int:
    key = settings.admin_api_key

    async def main() -> int:
        async with AdminClient(settings.url, key.get_secret_value() if key else None) as client:
            return await work(client)

    try:
        return asyncio.run(main())
    except Refused as refusal:
        return _fail(_with_cause(refusal, has_key=key is not None))
    except ProxyUnreachable as error:
        return _fail(str(error))


def _with_cause(refusal: Refused, *, has_key: bool) -> str:
    if refusal.status == 403 and not has_key:
        return f"{refusal} (this shell has no ADMIN_API_KEY; set it to the proxy's)"
    return str(refusal)


async def _with_progress(what: str, call: Awaitable[T]) -> T:
    """Await `call`, with a line on stderr every few seconds."""
    task = asyncio.ensure_future(call)
    started = time.monotonic()
    try:
        while not (await asyncio.wait({task}, timeout=_PROGRESS_EVERY_S))[0]:
            print(f"{what}, {time.monotonic() - started:.0f} s so far", file=sys.stderr, flush=True)
        return await task
    finally:
        task.cancel()


def _print(settings: ProxySettings, value: object, render: Callable[[], str]) -> None:
    print(encode_json(value).decode() if settings.json_output else render(), flush=True)


def _fail(message: str) -> int:
    print(f"epdctl instances: {message}", file=sys.stderr)
    return EXIT_FAILED
