"""Bring a local deployment up and take it down, in order.

Rules of this file: the one who starts a process stops it, also when a later start fails or the user presses
Ctrl-C; progress goes to `say`, one line an event.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from epdctl.local.plan import (
    HOST,
    STORE_PORTS,
    ProcessPlan,
    WorkerOptions,
    plan_proxy,
    plan_store,
    plan_workers,
    ports_needed,
)
from epdctl.local.processes import Child, StartFailed, start_child, stop_children, wait_healthy
from epdctl.local.shape import Shape
from epdctl.wire import encode_json

Say = Callable[[str], None]

# Below the kernel's ephemeral range, from which an outgoing connection could take a port while a model loads.
_PORT_RANGE = range(20000, 32000)
_PROXY_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """A deployment that serves: its proxy's URL, its admin key and its processes."""

    url: str
    admin_key: str
    children: tuple[Child, ...]


def _port_is_free(port: int) -> bool:
    with socket.socket() as candidate:
        try:
            candidate.bind((HOST, port))
        except OSError:
            return False
    return True


def free_ports(count: int) -> list[int]:
    """Return `count` different TCP ports that are free on loopback now."""
    found: list[int] = []
    while len(found) < count:
        port = secrets.choice(_PORT_RANGE)
        if port not in found and _port_is_free(port):
            found.append(port)
    return found


async def _register(session: aiohttp.ClientSession, proxy: str, plan: ProcessPlan, key: str) -> None:
    headers = {"X-API-Key": key, "Content-Type": "application/json"}
    async with session.post(
        f"{proxy}/instances", data=encode_json(plan.registration), headers=headers
    ) as answer:
        if answer.status != 200:
            raise StartFailed(
                f"the proxy refused {plan.name} with status {answer.status}: {await answer.text()}"
            )


async def _wait_servable(session: aiohttp.ClientSession, proxy: str, timeout_s: float) -> None:
    deadline = asyncio.get_running_loop().time() + timeout_s
    while asyncio.get_running_loop().time() < deadline:
        async with session.get(f"{proxy}/ready") as answer:
            if answer.status == 200:
                return
        await asyncio.sleep(0.1)
    raise StartFailed(
        f"the proxy was not ready within {timeout_s:g} s; ask {proxy}/instances?view=detail why"
    )


async def _start_all(
    plans: Sequence[ProcessPlan], log_dir: Path, environment: dict[str, str], say: Say, children: list[Child]
) -> None:
    for plan in plans:
        children.append(await start_child(plan, log_dir, environment))
        say(f"{plan.name}: starting on {plan.url}, log {children[-1].log}")


async def _wait_all(children: Sequence[Child], timeout_s: float, say: Say) -> None:
    started = time.monotonic()

    async def wait_one(child: Child) -> None:
        await wait_healthy(child, timeout_s)
        say(f"{child.plan.name}: healthy after {time.monotonic() - started:.1f} s")

    async with asyncio.TaskGroup() as group:
        for child in children:
            group.create_task(wait_one(child))


@asynccontextmanager
async def deploy(
    shape: Shape,
    options: WorkerOptions,
    *,
    proxy_port: int,
    log_dir: Path,
    environment: dict[str, str],
    start_timeout_s: float,
    stop_grace_s: float,
    say: Say,
) -> AsyncIterator[Deployment]:
    """Start proxy and workers of `shape`, register them, and yield once the proxy is ready; stop them after.

    Raises StartFailed when a process ends or is late, or a registration is refused.
    """
    if not _port_is_free(proxy_port):
        raise StartFailed(f"port {proxy_port} is in use on {HOST}: give another one with --port")
    key = environment.get("ADMIN_API_KEY") or secrets.token_hex(16)
    environment = {**environment, "ADMIN_API_KEY": key}
    await asyncio.to_thread(log_dir.mkdir, parents=True, exist_ok=True)
    proxy = plan_proxy(proxy_port)
    ports = free_ports(STORE_PORTS + ports_needed(shape))
    stores = (plan_store(ports[:STORE_PORTS]),) if options.with_store else ()
    store = f"{HOST}:{ports[0]}" if options.with_store else None
    workers = plan_workers(shape, ports[STORE_PORTS:], options, store)
    children: list[Child] = []
    try:
        await _start_all((proxy, *stores, *workers), log_dir, environment, say, children)
        try:
            await _wait_all(children, start_timeout_s, say)
        except ExceptionGroup as group:
            raise group.exceptions[0] from None
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_PROXY_TIMEOUT_S)) as session:
            for plan in workers:
                await _register(session, proxy.url, plan, key)
                say(f"{plan.name}: registered")
            await _wait_servable(session, proxy.url, _PROXY_TIMEOUT_S)
        yield Deployment(url=proxy.url, admin_key=key, children=tuple(children))
    finally:
        say("stopping")
        await stop_children(children, stop_grace_s)
