"""Tokens a second of a prefill_decode worker, one answer at a time and many at once.

    python -m benchmarks.language [--model FOLDER] [--streams 32] [--tokens 200] [--rounds 3]

It starts the worker itself, on loopback, and takes turns: each round runs the same requests one after another
and then all at once, so that a busy machine hits both. It ends with exit code 1 when together is not faster.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp

from epdctl.local.deployment import free_ports

ROOT = Path(__file__).resolve().parents[2]
HOST, NAME = "127.0.0.1", "bench"
START_S = 120


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of a run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.language", description=__doc__)
    parser.add_argument("--model", default=str(ROOT / "models" / "tiny-vlm" / "qwen2_5_vl"))
    parser.add_argument("--streams", type=int, default=32, help="requests of a round")
    parser.add_argument("--tokens", type=int, default=200, help="tokens of each answer")
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_args(arguments)


@asynccontextmanager
async def worker(model: str) -> AsyncIterator[str]:
    """Run a worker; give its URL once it is healthy."""
    port, ec_port = free_ports(2)
    command = [sys.executable, "-m", "epdctl", "worker", "prefill-decode", "--model", model]
    command += ["--served-model-name", NAME, "--host", HOST, "--port", str(port), "--ec-port", str(ec_port)]
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stderr=asyncio.subprocess.DEVNULL)
    try:
        url = f"http://{HOST}:{port}"
        async with asyncio.timeout(START_S):
            await _until_healthy(url, process)
        yield url
    finally:
        process.terminate()
        await process.wait()


async def _until_healthy(url: str, process: asyncio.subprocess.Process) -> None:
    async with aiohttp.ClientSession() as session:
        while True:
            if process.returncode is not None:
                raise SystemExit(f"the worker ended with {process.returncode}")
            try:
                async with session.get(url + "/health") as answer:
                    if answer.status == 200:
                        return
            except aiohttp.ClientConnectionError:
                pass
            await asyncio.sleep(0.2)


async def _answer(session: aiohttp.ClientSession, url: str, tokens: int) -> int:
    body = {
        "model": NAME,
        "messages": [{"role": "user", "content": "Count to 20."}],
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": 0,
    }
    async with session.post(url + "/v1/chat/completions", json=body) as answer:
        return int((await answer.json())["usage"]["completion_tokens"])


async def measure(url: str, options: argparse.Namespace) -> list[dict[str, float]]:
    """Return tokens a second of each round, sequential and together."""
    rounds = []
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as session:
        for _ in range(options.rounds):
            began = time.monotonic()
            counts = [await _answer(session, url, options.tokens) for _ in range(options.streams)]
            sequential = sum(counts) / (time.monotonic() - began)
            began = time.monotonic()
            works = [_answer(session, url, options.tokens) for _ in range(options.streams)]
            together = sum(await asyncio.gather(*works)) / (time.monotonic() - began)
            rounds.append({"sequential": sequential, "together": together, "ratio": together / sequential})
    return rounds


async def run(options: argparse.Namespace) -> int:
    """Measure, print one JSON object, and return the exit code."""
    async with worker(options.model) as url:
        rounds = await measure(url, options)
    median = {name: round(statistics.median(r[name] for r in rounds), 2) for name in rounds[0]}
    print(json.dumps({"streams": options.streams, "tokens": options.tokens, "tokens_per_s": median}))
    return 0 if median["ratio"] > 1 else 1


if __name__ == "__main__":
    raise SystemExit(asyncio.run(run(parse_arguments())))
