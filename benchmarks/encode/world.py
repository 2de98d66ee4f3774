"""Processes of the benchmark: the real worker, a consumer of its embeddings, the bare tower.

Rules of this file: everything listens on loopback, and ends with its block.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from epdctl.local.deployment import free_ports

ROOT = Path(__file__).resolve().parents[2]
HOST, NAME = "127.0.0.1", "bench"
START_S = 300.0


class Line:
    """A process that is led by JSON lines."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.pid = process.pid

    async def hear(self) -> dict[str, Any]:
        """Return the next line that it says."""
        assert self._process.stdout is not None
        async with asyncio.timeout(START_S):
            line = await self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a process of the benchmark ended with {await self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    async def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """Send a line and return the answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question).encode() + b"\n")
        return await self.hear()


@asynccontextmanager
async def line_process(module: str, *arguments: str) -> AsyncIterator[Line]:
    """Run `python -m module` as a `Line`."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        module,
        *arguments,
        cwd=ROOT,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        yield Line(process)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        await process.wait()


class Worker:
    """A started encode worker. `start_s`: from the command to the first `/health` 200."""

    def __init__(self, process: asyncio.subprocess.Process, url: str, start_s: float) -> None:
        self.url = url
        self.start_s = start_s
        self.pid = process.pid
        self.engine_pid = _engine_of(process.pid)

    def pin(self, *, front: int, engine: int) -> None:
        """Give front and engine a core each."""
        pin(self.pid, front)
        pin(self.engine_pid, engine)

    async def encode(
        self,
        session: aiohttp.ClientSession,
        urls: Sequence[str],
        consumer: str | None = None,
        transfer_ids: Sequence[str] = (),
    ) -> float:
        """Post one request of pictures, to be delivered under these ids; return its seconds."""
        body: dict[str, Any] = {"messages": [{"role": "user", "content": _parts(urls)}]}
        if consumer is not None:
            body["ec_transfer_params"] = {
                "consumer_zmq": consumer,
                "ec_items": [{"transfer_id": name} for name in transfer_ids],
            }
        packed = json.dumps(body).encode()
        began = time.perf_counter()
        headers = {"content-type": "application/json"}
        async with session.post(self.url + "/v1/chat/completions", data=packed, headers=headers) as answer:
            text = await answer.text()
            if answer.status != 200:
                raise SystemExit(f"the worker answered {answer.status}: {text}")
        return time.perf_counter() - began

    async def metrics(self, session: aiohttp.ClientSession) -> dict[str, float]:
        """Return the samples of `/metrics`, by name and labels as they stand there."""
        async with session.get(self.url + "/metrics") as answer:
            lines = (await answer.text()).splitlines()
        pairs = (line.rpartition(" ") for line in lines if line and not line.startswith("#"))
        return {name: float(value) for name, _, value in pairs}


def _parts(urls: Sequence[str]) -> list[dict[str, Any]]:
    return [{"type": "image_url", "image_url": {"url": url}} for url in urls]


@asynccontextmanager
async def worker(model: Path, *flags: str) -> AsyncIterator[Worker]:
    """Run `epdctl worker encode`; give it once it is healthy."""
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "epdctl", "worker", "encode", "--model", str(model), "--host", HOST]
    command += ["--port", str(port), "--served-model-name", NAME, *flags]
    began = time.perf_counter()
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stderr=asyncio.subprocess.DEVNULL)
    url = f"http://{HOST}:{port}"
    try:
        async with asyncio.timeout(START_S):
            await _until_healthy(url, process)
        yield Worker(process, url, time.perf_counter() - began)
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def _until_healthy(url: str, process: asyncio.subprocess.Process) -> None:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session:
        while True:
            if process.returncode is not None:
                raise SystemExit(f"the worker ended with {process.returncode}")
            try:
                async with session.get(url + "/health") as answer:
                    if answer.status == 200:
                        return
            except (aiohttp.ClientError, TimeoutError):
                pass
            await asyncio.sleep(0.01)


def _engine_of(pid: int) -> int:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    for child in children:
        if b"encode.engine" in Path(f"/proc/{child}/cmdline").read_bytes():
            return int(child)
    raise SystemExit("the worker has no engine process")


def pin(pid: int, core: int) -> None:
    """Let all threads of a process run on one core only."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(task.name), {core})


def memory_of(pid: int) -> dict[str, int]:
    """Return the resident bytes of a process, and those that no file backs."""
    status = Path(f"/proc/{pid}/status").read_text()
    found = {name: re.search(rf"{name}:\s+(\d+) kB", status) for name in ("VmRSS", "RssAnon")}
    rss, anonymous = (int(match[1]) * 1024 if match else 0 for match in found.values())
    return {"rss": rss, "anonymous": anonymous}


def cpu_of(pid: int) -> float:
    """Return the processor seconds of all threads that a process has now."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        total += int((task / "schedstat").read_text().split()[0])
    return total / 1e9
