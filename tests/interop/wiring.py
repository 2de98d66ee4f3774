"""Taps, registrations and static flags: how the parts of a deployment are put together."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Any

import aiohttp

from tests.interop.control_tap import ControlTap
from tests.interop.tap import HttpTap
from tests.stubs.ports import free_port

ADMIN_KEY = "interop-admin-key"


async def http_tap(stack: AsyncExitStack, hop: str, target: str) -> HttpTap:
    """Open a tap in front of `target`; the stack closes it."""
    tap = HttpTap(hop, target, free_port())
    stack.push_async_callback(tap.close)
    return await tap.open()


async def control_tap(stack: AsyncExitStack, target: str) -> ControlTap:
    """Open a tap in front of a consumer's EC control address; the stack closes it."""
    tap = ControlTap(target, free_port())
    stack.push_async_callback(tap.close)
    return await tap.open()


async def register(
    proxy: str, role: str, url: str, ec_address: str | None = None, **fields: str
) -> dict[str, Any]:
    """Register an instance with the proxy at `proxy` and return its answer; any refusal raises."""
    body = {"role": role, "url": url, "ec_zmq_addrs": [ec_address] if ec_address else [], **fields}
    timeout = aiohttp.ClientTimeout(total=30)
    async with (
        aiohttp.ClientSession(timeout=timeout, headers={"X-API-Key": ADMIN_KEY}) as session,
        session.post(f"{proxy}/instances", json=body) as answer,
    ):
        assert answer.status == 200, await answer.text()
        return dict(await answer.json())
