"""Claims about a whole E+P+D deployment under load while one of its workers is killed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from epdctl.local.deployment import Deployment, deploy, free_ports
from epdctl.local.plan import WorkerOptions
from epdctl.local.processes import Child, start_child, stop_children, wait_healthy
from epdctl.local.shape import parse_shape
from epdctl.wire import parse_object
from tests.e2e.tiny_pictures import QWEN2_5_VL, ask, expected_answer, held_out_pictures
from tests.stubs.process import wait_until

pytestmark = [pytest.mark.fault, pytest.mark.worker, pytest.mark.timeout(400)]

MODEL = "tiny-vlm"
DEADLINE_S = 60.0
HONEST_FAILURES = {500, 502, 503, 504}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a request ended: its status, its text, and whether a stream was closed by `[DONE]` or an error."""

    status: int
    text: str
    is_whole: bool
    said_why: bool


async def _stream(session: aiohttp.ClientSession, url: str, number: int) -> Outcome:
    body = {
        "model": MODEL,
        "messages": ask(held_out_pictures(1, first=number)),
        "temperature": 0,
        "max_tokens": 32,
        "stream": True,
    }
    text, is_whole, said_why = "", False, False
    async with session.post(f"{url}/v1/chat/completions", json=body) as answer:
        if answer.status != 200:
            return Outcome(
                status=answer.status, text="", is_whole=False, said_why="error" in await answer.json()
            )
        with contextlib.suppress(aiohttp.ClientPayloadError):
            async for line in answer.content:
                payload = line.removeprefix(b"data: ").strip()
                if payload == b"[DONE]":
                    is_whole = True
                elif payload:
                    event = parse_object(payload)
                    said_why = said_why or "error" in event
                    text += "".join(c["delta"].get("content") or "" for c in event.get("choices", []))
        return Outcome(status=200, text=text, is_whole=is_whole, said_why=said_why)


@contextlib.asynccontextmanager
async def _world(
    logs: Path, environment: dict[str, str]
) -> AsyncIterator[tuple[Deployment, aiohttp.ClientSession]]:
    async with (
        deploy(
            parse_shape("2e2p2d"),
            WorkerOptions(model=str(QWEN2_5_VL), served_model_name=MODEL, device="cpu", with_store=True),
            proxy_port=free_ports(1)[0],
            log_dir=logs,
            environment=environment,
            start_timeout_s=180,
            stop_grace_s=15,
            say=lambda _: None,
        ) as deployment,
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=DEADLINE_S)) as session,
    ):
        yield deployment, session


async def _detail(session: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    async with session.get(f"{url}/instances?view=detail") as answer:
        return dict(await answer.json())


async def _held(session: aiohttp.ClientSession, child: Child) -> list[str]:
    """Return the series of a worker's metrics that say that something is still held for a request."""
    names = ("epdctl_in_flight{", 'epdctl_arena_bytes{state="pinned"}', 'epdctl_kv_bytes{state="used"}')
    async with session.get(f"{child.plan.url}/metrics") as answer:
        lines = (await answer.text()).splitlines()
    return [line for line in lines if line.startswith(names) and not line.endswith(" 0.0")]


async def _kill_under_load(
    deployment: Deployment, session: aiohttp.ClientSession, victim: Child, first: int
) -> list[tuple[int, Outcome]]:
    """Send 24 requests, kill `victim` when six are answered, and return how each ended."""
    numbers = range(first, first + 24)
    running = {asyncio.create_task(_stream(session, deployment.url, n)): n for n in numbers}
    for answered, next_done in enumerate(asyncio.as_completed(running), start=1):
        await next_done
        if answered == 6:
            os.killpg(victim.process.pid, signal.SIGKILL)
    return [(number, task.result()) for task, number in running.items()]


async def test_each_role_may_be_killed_under_load(tmp_path: Path) -> None:
    """Every request ends rightly or with an honest error, nothing stays held, and the worker comes back.

    The encoders share a store: what the killed one had lent it is gone, and nobody fails for that.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MC_FORCE_TCP": "1", "ADMIN_API_KEY": "k"}
    restarted: list[Child] = []
    async with _world(tmp_path, environment) as (deployment, session):
        for log in (tmp_path / "encode-0.log", tmp_path / "encode-1.log"):
            await wait_until(lambda log=log: '"event":"store_up"' in log.read_text(), "the store is used", 60)
        try:
            for round_, name in enumerate(("encode-0", "prefill-0", "decode-0")):
                victim = next(c for c in deployment.children if c.plan.name == name)
                survivors = [c for c in deployment.children[1:] if c is not victim]

                outcomes = await _kill_under_load(deployment, session, victim, 2000 + 100 * round_)

                for number, outcome in outcomes:
                    if outcome.is_whole:
                        assert outcome.text == expected_answer(held_out_pictures(1, first=number))
                    else:
                        assert outcome.said_why, (name, outcome)
                        assert outcome.status == 200 or outcome.status in HONEST_FAILURES
                assert sum(outcome.is_whole for _, outcome in outcomes) >= 12

                async def nothing_held(survivors: list[Child] = survivors) -> bool:
                    detail = await _detail(session, deployment.url)
                    held = [await _held(session, child) for child in survivors]
                    return not any(held) and not any(i["in_flight"] for i in detail["instances"])

                await wait_until(nothing_held, f"nothing is held after {name} was killed", 30)
                (tmp_path / "again").mkdir(exist_ok=True)
                back = await start_child(victim.plan, tmp_path / "again", environment)
                restarted.append(back)
                await wait_healthy(back, 120)

                async def is_ready(url: str = victim.plan.url) -> bool:
                    instances = (await _detail(session, deployment.url))["instances"]
                    return any(i["url"] == url and i["state"] == "ready" for i in instances)

                await wait_until(is_ready, f"{name} is routed to again without registering", 60)
        finally:
            await stop_children(restarted, 5)
