"""Waits for a request's embeddings and hands it to the generation loop with them.

Rules of this file: every embedding that was taken is released exactly once: by the loop when the request no
longer reads it, or here when the request does not get that far. A push that is not taken is cancelled at the
receiver, so that its bytes do not stay. A wait ends by the push, its failure, the deadline or a cancel.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import structlog
import torch

from epdctl.domain import MmHash, Modality, TransferId
from epdctl.errors import (
    EmbeddingUndelivered,
    EpdError,
    InternalFailure,
    ShuttingDown,
    TransferFailed,
    UpstreamTimeout,
)
from epdctl.worker.language.batch import Order
from epdctl.worker.language.kv_messages import KvTicket
from epdctl.worker.language.loop import GenerationLoop, Job
from epdctl.worker.language.messages import Generate, PromptImage
from epdctl.worker.language.positions import PlacedImage, mrope_positions
from epdctl.worker.language.runner import PlacedEmbedding, build_prompt
from epdctl.worker.language.sampling import Sampler
from epdctl.worker.language.spec import ModelSpec
from epdctl.worker.transfer.ports import Received, Taker, TensorSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class IntakeRules:
    """How long a request waits for its embeddings."""

    push_wait_s: float


class Intake:
    """Requests on their way to the loop."""

    def __init__(
        self,
        spec: ModelSpec,
        device: torch.device,
        taker: Taker | None,
        loop: GenerationLoop,
        *,
        rules: IntakeRules,
        failed: Callable[[str, EpdError], Awaitable[None]],
        give_up: Callable[[KvTicket], None] | None = None,
    ) -> None:
        """Without a `taker` embeddings are never read: prompts with images come with their KV.

        `give_up` tells a prefill that KV will not be fetched.
        """
        self._spec = spec
        self._device = device
        self._taker = taker
        self._loop = loop
        self._rules = rules
        self._failed = failed
        self._give_up = give_up
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def __len__(self) -> int:
        """Requests that still wait for embeddings."""
        return len(self._tasks)

    def begin(self, call_id: str, body: Generate) -> None:
        """Take a request; it goes to the loop, or its failure is told."""
        task = asyncio.create_task(self._bring(call_id, body))
        self._tasks[call_id] = task
        task.add_done_callback(lambda done: self._end(call_id, body, done))

    def cancel(self, call_id: str) -> bool:
        """Drop a request that still waits; False when it does not."""
        task = self._tasks.get(call_id)
        return task is not None and task.cancel()

    async def close(self) -> None:
        """Fail all that wait."""
        waiting = dict(self._tasks)
        for task in waiting.values():
            task.cancel()
        await asyncio.gather(*waiting.values(), return_exceptions=True)
        for call_id in waiting:
            await self._failed(call_id, ShuttingDown("this worker is shutting down"))

    def _end(self, call_id: str, body: Generate, task: asyncio.Task[None]) -> None:
        del self._tasks[call_id]
        if task.cancelled():  # perhaps before its first line: then nothing else cancels its pushes
            for image in body.images:
                self._cancel_push(image)

    def _cancel_push(self, image: PromptImage) -> None:
        if image.transfer_id is not None and self._taker is not None:
            self._taker.cancel(TransferId(image.transfer_id))

    async def _bring(self, call_id: str, body: Generate) -> None:
        received: Sequence[Received] = ()
        try:
            received = await self._take_all(body.images)
            job = self._job(call_id, body, received)
        except EpdError as error:
            await self._failed(call_id, error)
        except Exception:  # noqa: BLE001 - the one supervisor of a request's way to the loop: it costs that one only
            structlog.get_logger().exception("request_intake_failed")
            self._release(received, body.ticket)
            await self._failed(call_id, InternalFailure("the request could not be prepared"))
        else:
            self._loop.submit(job)

    async def _take_all(self, images: Sequence[PromptImage]) -> list[Received]:
        """Take every image's embedding, or none of them."""
        if self._taker is None:
            return []
        tasks = [asyncio.create_task(self._take(self._taker, image)) for image in images]
        try:
            return list(await asyncio.gather(*tasks))
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for image, task in zip(images, tasks, strict=True):
                self._give_back(image, task)
            raise

    def _give_back(self, image: PromptImage, task: asyncio.Task[Received]) -> None:
        if not task.cancelled() and task.exception() is None:
            task.result().release()
        else:
            self._cancel_push(image)

    async def _take(self, taker: Taker, image: PromptImage) -> Received:
        try:
            return await taker.take(
                transfer_id=None if image.transfer_id is None else TransferId(image.transfer_id),
                mm_hash=MmHash(image.mm_hash),
                expect=TensorSpec((image.rows, self._spec.embedding_width), self._spec.dtype),
                deadline_s=self._rules.push_wait_s,
            )
        except UpstreamTimeout as error:
            raise EmbeddingUndelivered(
                f"an item's embedding was not delivered within {self._rules.push_wait_s:g} s"
            ) from error
        except TransferFailed as error:
            raise EmbeddingUndelivered(f"an item's embedding was not delivered: {error.message}") from error

    def _job(self, call_id: str, body: Generate, received: Sequence[Received]) -> Job:
        spec, sampling = self._spec, body.sampling
        places = [_placed(image, spec.frame_step) for image in body.images]
        positions = mrope_positions(len(body.token_ids), places, spec.merge)
        pairs = zip(body.images, received, strict=self._taker is not None)
        embeddings = [PlacedEmbedding(offset=i.offset, rows=_rows(r, self._device)) for i, r in pairs]
        eos = () if sampling.ignore_eos else spec.eos_token_ids
        order = Order(
            request_id=call_id,
            prompt_tokens=len(body.token_ids),
            max_tokens=sampling.max_tokens,
            min_tokens=sampling.min_tokens,
            choices=sampling.n,
            stops=frozenset({*eos, *sampling.stop_token_ids}),
            imported=body.ticket is not None,
            hold=body.hold_kv,
        )
        return Job(
            order=order,
            prompt=build_prompt(body.token_ids, positions, embeddings, self._device),
            sampler=Sampler(sampling, spec.eos_token_ids),
            release=lambda: self._release(received, body.ticket),
            token_ids=body.token_ids,
            ticket=body.ticket,
        )

    def _release(self, received: Sequence[Received], ticket: KvTicket | None) -> None:
        for item in received:
            item.release()
        if ticket is not None and self._give_up is not None:
            self._give_up(ticket)


def _placed(image: PromptImage, frame_step: float) -> PlacedImage:
    step = frame_step if image.modality is Modality.VIDEO else 1.0
    return PlacedImage(offset=image.offset, grid=image.grid, step=step)


def _rows(received: Received, device: torch.device) -> torch.Tensor:
    """Return the item as a tensor: on a CPU a view of the arena, elsewhere a copy."""
    flat = torch.frombuffer(received.view, dtype=getattr(torch, received.dtype))
    return flat.view(received.shape).to(device)
