"""The front of an encode worker: takes a request apart, prepares its pictures, asks the engine, answers.

Rules of this file: order of steps. Fetching, decoding and resizing run on threads, never on the event loop;
a picture is decoded only when the engine asks for its pixels, so a cached one is not decoded at all. What is
accepted is bounded: beyond `queue_items` a request is answered 429.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from epdctl.errors import EngineUnavailable, EpdError, Overloaded
from epdctl.metrics import WorkerMetrics
from epdctl.worker.encode.keys import cache_key, content_digest, identity_of, transfer_id_of
from epdctl.worker.encode.messages import Ask, Done, Pixels, ReadyFacts
from epdctl.worker.encode.options import ItemOptions
from epdctl.worker.encode.reply import EncodedItem
from epdctl.worker.encode.request import EncodeRequest, MediaPart, parse_encode_request
from epdctl.worker.media import MediaFetcher, MediaLimits
from epdctl.worker.supervisor import EngineCall, Supervisor

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontLimits:
    """Bounds of the front: items of a request, items accepted in all, pixels and rows of one item."""

    max_items: int
    queue_items: int
    max_image_pixels: int
    max_item_tokens: int
    media_threads: int


class EncodeFront:
    """Serves encode requests with one engine."""

    def __init__(
        self,
        model: str,
        engine: Supervisor,
        limits: FrontLimits,
        media: MediaLimits,
        metrics: WorkerMetrics,
    ) -> None:
        self._model = model
        self._engine = engine
        self._limits = limits
        self._media = media
        self._in_flight = metrics.in_flight.labels("encode")
        self._items = 0
        self._decoding = ThreadPoolExecutor(limits.media_threads, thread_name_prefix="decode")
        self._reading = ThreadPoolExecutor(4, thread_name_prefix="read")
        self._fetcher: MediaFetcher | None = None
        self._preparer: Any = None

    async def start(self, folder: Path) -> None:
        """Load the image processor (on a thread) and open the media session; raises StartFailed."""
        self._fetcher = MediaFetcher(self._media, self._reading)
        self._preparer = await self._on(self._decoding, _load_preparer, folder, self._limits)

    async def close(self) -> None:
        """End the session and the threads."""
        if self._fetcher is not None:
            await self._fetcher.close()
        self._decoding.shutdown(wait=False, cancel_futures=True)
        self._reading.shutdown(wait=False, cancel_futures=True)

    def trouble(self) -> str | None:
        """Return why the front cannot serve, or None."""
        return None if self._preparer is not None else "the image processor is loading"

    async def encode(self, body: Mapping[str, Any]) -> list[EncodedItem]:
        """Encode and deliver every picture of a request body; raises the first failure, naming its part."""
        request = parse_encode_request(body, model=self._model, max_items=self._limits.max_items)
        if self._preparer is None or self._fetcher is None:
            raise EngineUnavailable("the image processor is loading", retry_after_s=1)
        with self._admitted(len(request.parts)):
            contents = await together([self._fetch(part) for part in request.parts])
            fallback = uuid.uuid4().hex
            works = [
                self._encode_one(request, part, content, digest, fallback)
                for part, (content, digest) in zip(request.parts, contents, strict=True)
            ]
            return await together(works)

    @contextmanager
    def _admitted(self, items: int) -> Iterator[None]:
        if items and self._items + items > self._limits.queue_items:
            raise Overloaded("too many images wait for the encoder", retry_after_s=1)
        self._items += items
        self._in_flight.inc(items)
        try:
            yield
        finally:
            self._items -= items
            self._in_flight.dec(items)

    async def _fetch(self, part: MediaPart) -> tuple[bytes, str]:
        assert self._fetcher is not None
        with naming(part.param):
            content = await self._fetcher.fetch(part.url)
            return content, await self._on(self._reading, content_digest, content)

    async def _encode_one(
        self, request: EncodeRequest, part: MediaPart, content: bytes, digest: str, fallback: str
    ) -> EncodedItem:
        facts = ReadyFacts(**self._engine.status().facts) if self._engine.status().facts else None
        if facts is None:
            raise self._engine.unavailable()
        identity = identity_of(self._preparer.identity, facts.model_type, facts.model_identity, facts.dtype)
        key = cache_key(
            content=digest, modality=request.modality, options=request.options.canonical, identity=identity
        )
        mm_hash = part.uuid or key
        named = request.consumer_zmq is not None or bool(request.named)
        transfer_id = transfer_id_of(part.index, mm_hash, request.named, fallback) if named else None
        ask = Ask(key=key, mm_hash=mm_hash, transfer_id=transfer_id, consumer_zmq=request.consumer_zmq)
        with naming(part.param):
            done = await self._ask(ask, content, request.options)
        return EncodedItem(
            index=part.index, mm_hash=mm_hash, grid=done.grid, rows=done.rows, transfer_id=done.transfer_id
        )

    async def _ask(self, ask: Ask, content: bytes, options: ItemOptions) -> Done:
        async with self._engine.call() as call:
            await call.send("encode", ask)
            while True:
                received = await call.receive()
                if received.kind == "send_pixels":
                    await self._send_pixels(call, content, options)
                else:
                    call.end()
                    return received.parse(Done)

    async def _send_pixels(self, call: EngineCall, content: bytes, options: ItemOptions) -> None:
        prepared = await self._on(self._decoding, self._preparer.prepare, content, options)
        frame = memoryview(prepared.pixels).cast("B")
        await call.send("pixels", Pixels(grid=prepared.grid), (frame,))

    async def _on(self, pool: ThreadPoolExecutor, function: Any, *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(pool, function, *arguments)


def _load_preparer(folder: Path, limits: FrontLimits) -> Any:
    # transformers takes seconds to import, and the port must answer meanwhile.
    from epdctl.worker.encode.preparer import Preparer

    return Preparer(folder, max_pixels=limits.max_image_pixels, max_rows=limits.max_item_tokens)


@contextmanager
def naming(param: str) -> Iterator[None]:
    """Let a failure name the part of the request that it is about."""
    try:
        yield
    except EpdError as error:
        error.param = error.param or param
        raise


async def together(works: Sequence[Awaitable[T]]) -> list[T]:
    """Run `works` at the same time; the first failure cancels the rest, awaits them, and is raised."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
