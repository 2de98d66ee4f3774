"""The front of an encode worker: takes a request apart, prepares its items, asks the engine, answers.

Rules of this file: order of steps. Fetching, decoding and resizing run on threads, never on the event loop;
an item is decoded only when the engine asks for its pixels, so a cached one is not decoded at all. What is
accepted is bounded: beyond `queue_items`, or without memory for its media, a request is answered 429.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import structlog

from epdctl.domain import Modality
from epdctl.errors import EngineUnavailable, EpdError, InvalidRequest, Overloaded
from epdctl.metrics import WorkerMetrics
from epdctl.worker.encode.engines import EncodeEngines
from epdctl.worker.encode.identifier import item_identifier
from epdctl.worker.encode.keys import cache_key, content_digest, identity_of, transfer_id_of
from epdctl.worker.encode.layout import Prepared
from epdctl.worker.encode.messages import Ask, Done, Pixels
from epdctl.worker.encode.options import ItemOptions, PrepareLimits, VideoOptions
from epdctl.worker.encode.reply import EncodedItem
from epdctl.worker.encode.request import EncodeRequest, MediaPart, parse_encode_request
from epdctl.worker.media import MediaFetcher, MediaLimits
from epdctl.worker.media_budget import MediaBudget, MediaShare
from epdctl.worker.supervisor import EngineCall
from epdctl.worker.transfer.ec_file import check_identifier

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontLimits:
    """Bounds of the front: items of a request, items accepted in all, what one item may be.

    With `is_shared_folder` embeddings go into a folder under their identifiers, and to no consumer by name.
    """

    max_items: int
    queue_items: int
    media_threads: int
    media_memory_bytes: int
    """Bytes of fetched media that all requests hold together."""
    prepare: PrepareLimits
    is_shared_folder: bool = False


class EncodeFront:
    """Serves encode requests with the worker's engines.

    `reclaim(consumer_zmq, transfer_id)` ends what a lost engine has begun at a consumer, and returns the id
    under which the item is delivered anew.
    """

    def __init__(
        self,
        model: str,
        model_id: str,
        engines: EncodeEngines,
        reclaim: Callable[[str, str], Awaitable[str]],
        limits: FrontLimits,
        media: MediaLimits,
        metrics: WorkerMetrics,
    ) -> None:
        self._model = model
        self._model_id = model_id
        self._engines = engines
        self._reclaim = reclaim
        self._limits = limits
        self._media = media
        self._in_flight = metrics.in_flight.labels("encode")
        self._items = 0
        self._budget = MediaBudget(limits.media_memory_bytes)
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
        if self._preparer is not None:
            self._preparer.close()
        self._reading.shutdown(wait=False, cancel_futures=True)

    def trouble(self) -> str | None:
        """Return why the front cannot serve, or None."""
        return None if self._preparer is not None else "the image processor is loading"

    async def encode(self, body: Mapping[str, Any]) -> list[EncodedItem]:
        """Encode and deliver every item of a request body; raises the first failure, naming its part."""
        request = parse_encode_request(body, model=self._model, max_items=self._limits.max_items)
        if request.consumer_zmq is not None:  # in every line about this request; answers do not name it
            structlog.contextvars.bind_contextvars(consumer=request.consumer_zmq)
        if self._preparer is None or self._fetcher is None:
            raise EngineUnavailable("the image processor is loading", retry_after_s=1)
        if self._limits.is_shared_folder and request.consumer_zmq is not None:
            text = "this worker writes embeddings into a shared folder and cannot push them to a consumer"
            raise InvalidRequest(text, param="ec_transfer_params.consumer_zmq")
        with self._admitted(len(request.parts)), self._budget.share() as share:
            contents = await together([self._fetch(part, share) for part in request.parts])
            asks = self._asks(request, [digest for _, digest in contents])
            works = [
                self._encode_one(part, ask, content, request.options[part.modality], share)
                for part, ask, (content, _) in zip(request.parts, asks, contents, strict=True)
            ]
            contents.clear()  # each item's bytes go when it ends, not when the last one does
            return await together(works)

    @contextmanager
    def _admitted(self, items: int) -> Iterator[None]:
        if items and self._items + items > self._limits.queue_items:
            raise Overloaded("too many items wait for the encoder (--queue-items)", retry_after_s=1)
        self._items += items
        self._in_flight.inc(items)
        try:
            yield
        finally:
            self._items -= items
            self._in_flight.dec(items)

    async def _fetch(self, part: MediaPart, share: MediaShare) -> tuple[bytes, str]:
        assert self._fetcher is not None
        with naming(part.param):
            content = await self._fetcher.fetch(part.url, share.take)
            try:
                return content, await self._on(self._reading, content_digest, content)
            finally:
                content = b""  # a cancellation may remember this frame for long

    def _asks(self, request: EncodeRequest, digests: Sequence[str]) -> list[Ask]:
        """Return what the engine is asked for each part; raises InvalidRequest for a name used twice."""
        identity = self._identity()
        fallback = uuid.uuid4().hex
        is_shared = self._limits.is_shared_folder
        is_named = not is_shared and (request.consumer_zmq is not None or bool(request.named))
        asks: list[Ask] = []
        for part, digest in zip(request.parts, digests, strict=True):
            options = request.options[part.modality].canonical
            key = cache_key(content=digest, modality=part.modality, options=options, identity=identity)
            mm_hash = self._identifier(request, part.modality, part.uuid) if part.uuid else key
            if is_shared:
                check_identifier(mm_hash, param=f"{part.param}.uuid")
            named = transfer_id_of(part.index, mm_hash, request.named, fallback)
            transfer_id = named if is_named else None
            asks.append(
                Ask(key=key, mm_hash=mm_hash, transfer_id=transfer_id, consumer_zmq=request.consumer_zmq)
            )
        _check_names(request.parts, asks)
        return asks

    def _identifier(self, request: EncodeRequest, modality: Modality, uuid: str) -> str:
        return item_identifier(
            model=self._model_id,
            modality=modality,
            uuid=uuid,
            processor_options=request.processor_options,
            media_options=request.media_options,
        )

    def _identity(self) -> str:
        """Return the identity of all that turns an item's bytes into rows; raises EngineUnavailable."""
        facts = self._engines.facts()
        return identity_of(self._preparer.identity, facts.model_type, facts.model_identity, facts.dtype)

    async def _encode_one(
        self,
        part: MediaPart,
        ask: Ask,
        content: bytes,
        options: ItemOptions | VideoOptions,
        share: MediaShare,
    ) -> EncodedItem:
        # Kept until the engine has answered: one that is lost makes another one ask for the pixels again.
        try:
            with naming(part.param):
                done = await self._ask(ask, lambda: self._preparer.prepare(content, options))
        finally:
            share.give(len(content))
            content = b""  # a failure may remember this frame for long
        return EncodedItem(
            modality=part.modality,
            index=part.index,
            mm_hash=ask.mm_hash,
            rows=done.rows,
            metadata=done.metadata,
            transfer_id=done.transfer_id,
        )

    async def _ask(self, ask: Ask, prepare: Callable[[], Prepared]) -> Done:
        sent: Ask | None = None

        async def attempt(call: EngineCall, is_retry: bool) -> Done:
            nonlocal sent
            asked = await self._asked_again(ask) if is_retry else ask
            sent = asked
            await call.send("encode", asked)
            while True:
                received = await call.receive()
                if received.kind == "send_pixels":
                    await self._send_pixels(call, prepare)
                else:
                    call.end()
                    return received.parse(Done)

        try:
            return await self._engines.run(ask.key, attempt)
        except EngineUnavailable:
            if sent is not None:
                # No other engine takes it; what the lost one has begun must not keep others waiting.
                await self._asked_again(sent)
            raise

    async def _asked_again(self, ask: Ask) -> Ask:
        """Return what to ask after an engine was lost, which may have begun to deliver the item."""
        if ask.consumer_zmq is None or ask.transfer_id is None:
            return ask
        fresh = await self._reclaim(ask.consumer_zmq, ask.transfer_id)
        return msgspec.structs.replace(ask, transfer_id=fresh)

    async def _send_pixels(self, call: EngineCall, prepare: Callable[[], Prepared]) -> None:
        prepared = await self._on(self._decoding, prepare)
        frame = memoryview(prepared.pixels).cast("B")
        await call.send("pixels", Pixels(layout=prepared.layout), (frame,))

    async def _on(self, pool: ThreadPoolExecutor, function: Any, *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(pool, function, *arguments)


def _load_preparer(folder: Path, limits: FrontLimits) -> Any:
    # transformers takes seconds to import, and the port must answer meanwhile.
    from epdctl.worker.encode.preparer import Preparer

    return Preparer(folder, limits.prepare)


def _check_names(parts: Sequence[MediaPart], asks: Sequence[Ask]) -> None:
    """Refuse one name for two items: a consumer could not tell their embeddings apart."""
    key_of: dict[str, str] = {}
    for part, ask in zip(parts, asks, strict=True):
        if key_of.setdefault(ask.mm_hash, ask.key) != ask.key:
            raise InvalidRequest("two different items have the same uuid", param=f"{part.param}.uuid")


@contextmanager
def naming(param: str) -> Iterator[None]:
    """Let a failure name the part of the request that it is about."""
    try:
        yield
    except EpdError as error:
        error.param = error.param or param
        raise


async def together(works: Sequence[Awaitable[T]]) -> list[T]:
    """Run `works` at the same time; the first failure cancels the rest, awaits them, and is raised.

    Not by `asyncio.gather`, which keeps all results until the garbage collector runs; they can be large.
    """
    tasks = [asyncio.ensure_future(work) for work in works]
    failure: BaseException | None = None
    try:
        if tasks:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        failure = _first_failure(tasks)
        if failure is not None:
            raise failure
        return [task.result() for task in tasks]
    finally:
        await _end(tasks)
        # A failure remembers this frame: it must lead back neither to the failure nor to the others' results.
        failure = None
        tasks.clear()


def _first_failure(tasks: Sequence[asyncio.Future[T]]) -> BaseException | None:
    """Return the failure of the first of `tasks` that has failed."""
    found = (task.exception() for task in tasks if task.done() and not task.cancelled())
    return next((failure for failure in found if failure is not None), None)


async def _end(tasks: Sequence[asyncio.Future[T]]) -> None:
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)
    for task in tasks:
        if not task.cancelled():
            task.exception()  # looked at: else asyncio complains of those that nobody waited for
