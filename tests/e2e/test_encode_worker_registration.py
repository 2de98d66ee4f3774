"""An encode worker that registers itself with a real proxy."""

from __future__ import annotations

import signal
from pathlib import Path

import aiohttp
import pytest

from tests.conftest import StartProcess
from tests.e2e.encode_worker import start_worker
from tests.stubs.ports import free_port
from tests.stubs.process import epdctl_command, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.worker]

KEY = "a-key-of-the-test"


async def listed(proxy: str, state: str) -> list[str]:
    """Return the encode instances that the proxy lists in `state`; nothing while it does not answer."""
    try:
        async with aiohttp.ClientSession() as session, session.get(proxy + "/instances") as answer:
            return list((await answer.json())["encode"][state])
    except aiohttp.ClientError:
        return []


async def test_worker_joins_by_itself_and_leaves_on_sigterm(start: StartProcess, tmp_path: Path) -> None:
    """With --register a worker is live at the proxy without any other call, and gone after SIGTERM."""
    port = free_port()
    proxy = f"http://127.0.0.1:{port}"
    command = ["serve", "--host", "127.0.0.1", "--port", str(port), "--dynamic-registration"]
    start(epdctl_command(*command, "--store", "memory"), "proxy", env={"ADMIN_API_KEY": KEY})

    worker = start_worker(tmp_path, "--register", proxy, env={"ADMIN_API_KEY": KEY})
    try:

        async def is_live() -> bool:
            return worker.url in await listed(proxy, "live")

        await worker.process.wait_until(is_live, "live at the proxy", 90.0)
        worker.process.send_signal(signal.SIGTERM)

        assert await worker.process.wait_exit(20.0) == 0

        async def is_gone() -> bool:
            return worker.url not in await listed(proxy, "live")

        await wait_until(is_gone, "gone from the proxy", 10.0)
        assert KEY not in worker.process.stderr
    finally:
        worker.process.close()
