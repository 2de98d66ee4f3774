"""Send streaming requests with one drawn picture each to an OpenAI-compatible endpoint; print how it went.

A stand-in for `vllm bench serve` where neither vLLM nor its data sets are at hand. The figures go to stderr.
Exit code 1 if a request failed.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import colorsys
import io
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import aiohttp
from PIL import Image

SIDES = (112, 168, 224)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """One request that ended: `error` is empty when it ended well; times in seconds since it was sent."""

    first_token_s: float
    total_s: float
    error: str = ""


def drawn_picture(index: int) -> str:
    """Return a picture of its own for each index, as a data URL."""
    red, green, blue = colorsys.hsv_to_rgb(index * 0.618 % 1, 0.9, 0.9)
    side = SIDES[index % len(SIDES)]
    packed = io.BytesIO()
    Image.new("RGB", (side, side), (int(red * 255), int(green * 255), int(blue * 255))).save(packed, "PNG")
    return "data:image/png;base64," + base64.b64encode(packed.getvalue()).decode()


def chat_body(model: str, question: str, index: int) -> dict[str, object]:
    """Return a streaming chat request with one picture."""
    content = [
        {"type": "image_url", "image_url": {"url": drawn_picture(index)}},
        {"type": "text", "text": question},
    ]
    fixed = {"model": model, "temperature": 0, "max_tokens": 64, "stream": True}
    return {**fixed, "messages": [{"role": "user", "content": content}]}


async def send(session: aiohttp.ClientSession, url: str, body: dict[str, object]) -> Finished:
    """Send one request and read its stream to the end."""
    started = time.monotonic()
    first = 0.0
    ended = False
    try:
        async with session.post(f"{url}/v1/chat/completions", json=body) as answer:
            if answer.status != 200:
                return _failed(started, f"status {answer.status}: {(await answer.text())[:200]}")
            async for line in answer.content:
                if line.startswith(b'data: {"error"'):
                    return _failed(started, line.decode()[:200])
                if line.startswith(b"data: {") and not first and _carries_text(line):
                    first = time.monotonic() - started
                ended = ended or line.strip() == b"data: [DONE]"
    except (aiohttp.ClientError, TimeoutError) as error:
        return _failed(started, type(error).__name__)
    total = time.monotonic() - started
    return Finished(first_token_s=first or total, total_s=total, error="" if ended else "no [DONE]")


def _failed(started: float, error: str) -> Finished:
    return Finished(first_token_s=0.0, total_s=time.monotonic() - started, error=error)


def _carries_text(line: bytes) -> bool:
    choices = json.loads(line[len(b"data: ") :]).get("choices", ())
    return any(choice["delta"].get("content") for choice in choices)


async def send_all(url: str, model: str, question: str, count: int, at_once: int) -> list[Finished]:
    """Send `count` requests, `at_once` of them at a time."""
    slots = asyncio.Semaphore(at_once)
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(timeout=timeout) as session:

        async def one(index: int) -> Finished:
            async with slots:
                return await send(session, url, chat_body(model, question, index))

        return await asyncio.gather(*(one(index) for index in range(count)))


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value that `share` of `values` do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def report(finished: Sequence[Finished], elapsed_s: float) -> str:
    """Return the figures of a run as text."""
    good = [f for f in finished if not f.error]
    rate = len(good) / elapsed_s
    lines = [f"{len(good)} of {len(finished)} requests in {elapsed_s:.1f} s, {rate:.2f} requests/s"]
    for name, values in (
        ("time to first token", [f.first_token_s for f in good]),
        ("whole request", [f.total_s for f in good]),
    ):
        if values:
            middle, late = percentile(values, 0.5) * 1e3, percentile(values, 0.99) * 1e3
            lines.append(f"  {name}: median {middle:.0f} ms, p99 {late:.0f} ms")
    lines += [f"  failed: {error}" for error in sorted({f.error for f in finished if f.error})]
    return "\n".join(lines)


def main() -> int:
    """Entry of the script."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--url", required=True, help="base URL of the endpoint")
    parser.add_argument("--model", required=True, help="model name in the requests")
    parser.add_argument("--count", type=int, default=100, help="how many requests (default: 100)")
    parser.add_argument("--at-once", type=int, default=4, help="how many at a time (default: 4)")
    parser.add_argument("--question", default="What is the color of the image?")
    given = parser.parse_args()
    started = time.monotonic()
    finished = asyncio.run(send_all(given.url, given.model, given.question, given.count, given.at_once))
    print(report(finished, time.monotonic() - started), file=sys.stderr)
    return int(any(f.error for f in finished))


if __name__ == "__main__":
    raise SystemExit(main())
