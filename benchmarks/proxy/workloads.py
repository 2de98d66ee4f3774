"""What is measured: the workloads, their bodies, and the figures to reach.

Rules of this file: pure; bodies come from a fixed generator, so that every run sends the same bytes.
"""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum


class Mode(StrEnum):
    """How a workload is driven: whole requests, streams, or streams beside 8 MB requests."""

    REQUESTS = "rps"
    STREAMS = "sse"
    MIXED = "mix"


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One row of work; `separate_prefill` asks for E+P+D rather than E+PD."""

    name: str
    mode: Mode
    body: str
    concurrency: int
    seconds: float
    separate_prefill: bool = False


BACKGROUND_BODY, BACKGROUND_CONCURRENCY = "image-8m", 4


def workloads() -> list[Workload]:
    """Return all workloads: text, images by size, four images, streams, streams beside images, E+P+D."""
    listed = [_requests(f"text-c{c}", "text", c, 1.5) for c in (1, 64)]
    for size in ("100k", "1m", "8m"):
        listed += [
            _requests(f"{size}-c{c}", f"image-{size}", c, 2.5 if size == "8m" else 1.5) for c in (1, 8)
        ]
    listed += [_requests(f"4x1m-c{c}", "image-4x1m", c, 2) for c in (1, 4)]
    for c in (20, 200):
        listed.append(
            Workload(name=f"streams-{c}", mode=Mode.STREAMS, body="stream", concurrency=c, seconds=4)
        )
    listed.append(
        Workload(name="streams-beside-8m", mode=Mode.MIXED, body="stream", concurrency=2, seconds=5)
    )
    return [
        *listed,
        *(_requests(f"epd-100k-c{c}", "image-100k", c, 1.5, separate_prefill=True) for c in (1, 8)),
    ]


def _requests(
    name: str, body: str, concurrency: int, seconds: float, *, separate_prefill: bool = False
) -> Workload:
    return Workload(
        name=name,
        mode=Mode.REQUESTS,
        body=body,
        concurrency=concurrency,
        seconds=seconds,
        separate_prefill=separate_prefill,
    )


def bodies() -> Iterator[tuple[str, bytes]]:
    """Yield name and JSON of each request body; images are base64 noise that nobody can compress."""
    noise = random.Random(7)
    question = {"type": "text", "text": "What is in this image?"}

    def image(size: int) -> dict[str, object]:
        data = base64.b64encode(noise.randbytes(size * 3 // 4)).decode()
        return {"type": "image_url", "image_url": {"url": f"data:image/jpeg;base64,{data}"}}

    yield "text", _chat("Say something about " + "the weather " * 12, max_tokens=32)
    yield "stream", _chat("count", stream=True, max_tokens=100, seed=10_000)
    for name, size in (("100k", 100_000), ("1m", 1_000_000), ("8m", 8_000_000)):
        yield f"image-{name}", _chat([question, image(size)], max_tokens=32)
    yield "image-4x1m", _chat([question, *(image(1_000_000) for _ in range(4))], max_tokens=32)


def _chat(content: object, **options: object) -> bytes:
    messages = [{"role": "system", "content": "You are terse."}, {"role": "user", "content": content}]
    body = {"model": "mock", "messages": messages, "temperature": 0, **options}
    return json.dumps(body, separators=(",", ":")).encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A figure to reach: `figure` of `workload` against the reference proxy in the same run.

    `at_least` says that more is better; otherwise `must` and `stretch` are upper bounds. With
    `stretch_is_absolute` the second one bounds the figure itself, not its ratio.
    """

    workload: str
    figure: str
    must: float
    stretch: float
    at_least: bool = False
    stretch_is_absolute: bool = False

    def met(self, ratio: float) -> bool:
        """Whether a ratio is as good as it must be."""
        return ratio >= self.must if self.at_least else ratio <= self.must


TARGETS = (
    Target(workload="text-c64", figure="cpu_ms", must=0.40, stretch=0.15),
    Target(workload="text-c64", figure="per_s", must=2.5, stretch=7, at_least=True),
    Target(workload="text-c1", figure="added_p50_ms", must=0.5, stretch=0.2),
    Target(workload="100k-c8", figure="cpu_ms", must=0.60, stretch=0.25),
    Target(workload="1m-c8", figure="cpu_ms", must=0.40, stretch=0.15),
    Target(workload="8m-c8", figure="cpu_ms", must=0.35, stretch=0.18),
    Target(workload="8m-c8", figure="per_s", must=3, stretch=5, at_least=True),
    Target(workload="4x1m-c4", figure="cpu_ms", must=0.45, stretch=0.20),
    Target(workload="epd-100k-c8", figure="cpu_ms", must=0.60, stretch=0.20),
    Target(workload="streams-20", figure="cpu_ms", must=0.95, stretch=0.50),
    Target(workload="streams-200", figure="cpu_ms", must=0.95, stretch=0.50),
    Target(workload="streams-200", figure="added_p99_ms", must=0.3, stretch=0.1),
    Target(workload="streams-beside-8m", figure="p99_ms", must=0.50, stretch=0.33),
    Target(workload="8m-c8", figure="rss_mb", must=0.5, stretch=100, stretch_is_absolute=True),
)
"""What the proxy has to reach beside vLLM's example proxy; the stretch figures are not required."""
